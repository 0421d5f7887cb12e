"""Describe a run as one JSON document, and changes of it as patches. Pure.

The page holds one document, which the server changes by merge patches (RFC 7396). Named
things are objects by name, so that a patch has only the changes. Fields without a value
are left out, because ``null`` in a patch removes a field. Ages would change all the
time, so the document has points in time (``since``), which a patch leaves out if they
differ by less than :data:`SETTLED_S`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from replicas.status import ChannelStatus, GroupStatus, MemberStatus, RunStatus
from replicas.telemetry.verdict import verdict

SETTLED_S = 0.75
_INFO_NCHARS = 400
"""A member's ``info`` with more characters is not shown."""
_MOMENTS = {
    "state_age_s": "since",
    "lived_s": "started",
    "uptime_s": "started",
    "heard_age_s": "heard",
    "seconds": "since",
}
_MOMENTS_BY_CHANNEL = {"lag_s": "behind_since", "open_s": "open_since"}
"""Ages of a status, and the names of their points in time in the document."""
_JITTER = frozenset({*_MOMENTS.values(), *_MOMENTS_BY_CHANNEL.values(), "lag_s", "until"})
_ELSEWHERE: dict[type, frozenset[str]] = {
    RunStatus: frozenset({"groups", "channels", "nodes", "store", "event_loop_lag_s", "newest_event"}),
    GroupStatus: frozenset({"replicas"}),
    ChannelStatus: frozenset({"members", "under_way", "versions"}),
}
"""Fields of a status that the document has in another place."""
_PLAIN = frozenset({str, int, float, bool})

Tree = dict[str, Any]


def document(status: RunStatus, now: float) -> Tree:
    """Return the run's status as the page's JSON document, a new dict: ``run`` and
    ``verdict`` (what is wrong), and objects by name under ``groups``, ``replicas``,
    ``nodes`` and ``channels``.

    :param now: time of the status, in seconds since 1970.
    """
    judged = verdict(status, now)
    troubles = {one.text: msgspec.structs.asdict(one) for one in judged.troubles}
    run = {**_own(status, now), "lag_s": round(status.event_loop_lag_s, 1), "store": status.store.up}
    return {
        "run": run,
        "verdict": {"level": judged.level, "sentence": judged.sentence, "troubles": troubles},
        "groups": {one.name: _own(one, now) for one in status.groups},
        "replicas": {one.name: _own(one, now) for group in status.groups for one in group.replicas},
        "nodes": {one.name: _own(one, now) for one in status.nodes},
        "channels": {
            one.name: {
                **_own(one, now),
                "members": {member.name: _member(member, now) for member in one.members},
                "versions": {str(version.number): _own(version, now) for version in one.versions},
                "under_way": {str(publish.version): _own(publish, now) for publish in one.under_way},
            }
            for one in status.channels
        },
    }


def _member(member: MemberStatus, now: float) -> Tree:
    """Return a member's fields, without its ``info`` if that exceeds 400 characters.

    :param now: time of the status, in seconds since 1970.
    """
    found = _own(member, now)
    if sum(len(name) + len(text) for name, text in member.info.items()) > _INFO_NCHARS:
        del found["info"]
    return found


def _own(struct: msgspec.Struct, now: float) -> Tree:
    """Return the fields of a part of the status by name, as JSON data in a new dict.

    Left out are fields that are None or an empty text or collection (0 and False stay),
    ``heartbeat_age_s``, and what the document has in another place, such as a group's
    replicas. An age in seconds becomes a point in time, such as ``since``.

    :param now: time of the status, in seconds since 1970.
    """
    found: Tree = {}
    elsewhere = _ELSEWHERE.get(type(struct), frozenset())
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        kind = type(value)
        if value is None or name in elsewhere or (not value and kind not in (int, float, bool)):
            continue
        if name in _MOMENTS:
            found[_MOMENTS[name]] = round(now - value, 2)
        elif name in _MOMENTS_BY_CHANNEL:
            moments = {channel: round(now - age_s, 2) for channel, age_s in value.items() if age_s > 0}
            if moments:
                found[_MOMENTS_BY_CHANNEL[name]] = moments
        elif name == "left_s":
            found["until"] = round(now + value, 2)
        elif name != "heartbeat_age_s":
            found[name] = value if kind in _PLAIN else msgspec.to_builtins(value, str_keys=True)
    return found


def difference(old: Tree, new: Tree, *, jitters: bool = False) -> Tree:
    """Return the merge patch (RFC 7396) from ``old`` to ``new``, empty if they are
    equal; change neither.

    :param jitters: the values are times: ignore differences below 0.75 s.
    """
    patch: Tree = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value, jitters=name in _JITTER):
                patch[name] = inner
        elif before != value and not ((jitters or name in _JITTER) and _alike(before, value)):
            patch[name] = value
    return patch


def _alike(old: object, new: object) -> bool:
    """Return True for numbers (seconds) that differ by less than 0.75."""
    return isinstance(old, float | int) and isinstance(new, float | int) and abs(old - new) < SETTLED_S


def merge(tree: Tree, patch: Tree) -> None:
    """Change ``tree`` in place by a merge patch (RFC 7396), as the page does."""
    for name, value in patch.items():
        if value is None:
            tree.pop(name, None)
        elif isinstance(value, dict) and isinstance(tree.get(name), dict):
            merge(tree[name], value)
        else:
            tree[name] = value
