"""Compare two configs of a live run: the plan of a reload, as data. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import attrgetter

import msgspec

from replicas.common.sizes import size_text
from replicas.config.structs import Config, GroupConfig

_RESTARTING = ("nproc_per_node", "nnodes", "command", "launcher", "preload", "resources", "placement", "env", "cwd")
"""Fields of a group for the start of its processes, which a change restarts."""
_WITHOUT_EFFECT = ("name", "replicas", "env_file")
_started_with = attrgetter(*_RESTARTING)
_others = attrgetter(
    *(field for field in GroupConfig.__struct_fields__ if field not in (*_RESTARTING, *_WITHOUT_EFFECT))
)
_REMEDY = "end the run and start it again"
_FIXED = (
    "schema_version",
    "run.name",
    "run.state_dir",
    "run.events_max_nbytes",
    "run.adopt_s",
    "store",
    "control",
    "cluster.local",
    "cluster.lease_s",
    "cluster.carry_port",
    "channels",
)
"""Settings that a reload cannot change. ``run.stop_when``, ``logs``, ``cluster.labels``
and ``cluster.join_timeout`` apply immediately; ``cluster.min_nodes`` and ``slurm`` are
for the start only."""


def digest_of_start(group: GroupConfig) -> str:
    """Return a digest (hex) of the settings whose change restarts the group's
    processes: equal digests mean that no restart is needed."""
    return hashlib.sha256(msgspec.json.encode(_started_with(group), enc_hook=str)).hexdigest()[:32]


class ConfigDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two configs of a run, which a reload carries out.

    :param added: groups to start.
    :param removed: groups to drain.
    :param restarted: groups whose processes must be replaced, as a start setting has
        changed.
    :param adjusted: groups whose other settings (policies, timeouts, dependencies)
        apply from now on; without those in ``restarted``.
    :param resized: new number of replicas by group, if changed, also of ``restarted``.
    :param refused: changes that are impossible while the run lives, one line each.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()
    resized: dict[str, int] = {}
    refused: tuple[str, ...] = ()


def diff(old: Config, new: Config) -> ConfigDiff:
    """Compare two configs; return the plan of a reload from ``old`` to ``new``, and
    start nothing. Groups that are removed are listed in the order of ``old``, all
    others in the order of ``new``."""
    both = {name: (old.groups[name], group) for name, group in new.groups.items() if name in old.groups}
    changed = [name for name, (before, after) in both.items() if _started_with(before) != _started_with(after)]
    restarted = [name for name in changed if not new.groups[name].external]
    adjusted = [name for name, (before, after) in both.items() if _others(before) != _others(after) or name in changed]
    return ConfigDiff(
        added=tuple(name for name in new.groups if name not in old.groups),
        removed=tuple(name for name in old.groups if name not in new.groups),
        restarted=tuple(restarted),
        adjusted=tuple(name for name in adjusted if name not in restarted),
        resized={name: after.replicas for name, (before, after) in both.items() if before.replicas != after.replicas},
        refused=tuple(_refusals(old, new)),
    )


def _refusals(old: Config, new: Config) -> Iterator[str]:
    """Yield a line, with the remedy, for each change from ``old`` to ``new`` that is
    impossible while the run lives."""
    for path in _FIXED:
        before, after = attrgetter(path)(old), attrgetter(path)(new)
        if before != after:
            name = path.replace("max_nbytes", "max_size").removesuffix("_s")
            change = f" ({_text(path, before)} -> {_text(path, after)})" if "." in path else ""
            yield f"{name} cannot change while the run lives{change}: {_REMEDY}"
    for name in old.groups.keys() & new.groups.keys():
        if old.groups[name].external != new.groups[name].external:
            yield f'groups.{name}.launcher: a change from or to "external" is impossible while the run lives: {_REMEDY}'
    if (asking := _asking(new, "gpus")) and not _asking(old, "gpus"):
        place = f"groups.{asking[0]}.resources.gpus"
        yield f"{place}: GPUs can be assigned only at the start of the run, as its processes may use all of them: {_REMEDY}"
    limits = ("memory_nbytes", "max_processes")
    if (limited := _asking(new, *limits)) and not _asking(old, *limits):
        yield f"groups.{limited[0]}.resources: limits need control groups that are made at the start: {_REMEDY}"


def _text(path: str, value: object) -> str:
    """Return a setting as text with its unit, for a message; ``path`` (such as
    ``run.adopt_s``) tells the unit."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int) and path.endswith(("_s", "_nbytes")):
        return f"{value:g} s" if path.endswith("_s") else size_text(value)
    return str(value)


def _asking(config: Config, *resources: str) -> list[str]:
    """Return the names of the config's groups that set at least one of these resources
    to a value other than None and 0.

    :param resources: names of fields of ``ResourcesConfig``, such as ``"gpus"``.
    """
    return [
        name
        for name, group in config.groups.items()
        if any(getattr(group.resources, resource) for resource in resources)
    ]
