"""Checks across the keys of a channel. Each function adds problems to a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from replicas.config import tables as config_tables
from replicas.config.archive import ArchiveSource
from replicas.config.structs import ChannelConfig, ChannelRole, Config
from replicas.config.values import NAMED_MAX, Place, show

_FEWEST_SLOTS = 2
_PROMOTED_SLOTS = 3


def check(place: Place, channel: ChannelConfig) -> None:
    """Add a problem to ``place`` (which collects problems by key) for each key of the
    channel that does not fit its other keys. Raise nothing."""
    roles(place, channel)
    steering(place, channel)
    if channel.archive is not None and channel.staging == "device":
        place.at("archive").problem('copies versions from host memory; remove it, or staging = "device"')
    if channel.encrypt:
        encryption(place.at("encrypt"), channel)
    if channel.adopt_together:
        together(place.at("adopt_together"), channel)


def roles(place: Place, channel: ChannelConfig) -> None:
    """Add a problem to ``place``, the channel's, if the channel has both peers and
    sources or targets, has no members, or has peers with different ``ranks``."""
    if channel.peers and (channel.sources or channel.targets):
        others = {party.group for party in (*channel.sources, *channel.targets)}
        both = next((party.group for party in channel.peers if party.group in others), None)
        if both is not None:
            place.at("peers").problem(
                f'group "{both}" cannot be a peer and a source or target; give it another channel'
            )
        else:
            place.at("peers").problem("a channel has either peers or sources and targets; make two channels of it")
    elif not (
        channel.peers or channel.sources or any(path[: len(place.path)] == place.path for path, _ in place.problems)
    ):
        place.problem("has no members: name its sources (and targets), or its peers")
    if len({party.ranks for party in channel.peers}) > 1:
        place.at("peers").problem("all peers of a channel must have the same ranks")


def together(place: Place, channel: ChannelConfig) -> None:
    """Add a problem to ``place``, that of the key ``adopt_together``, if the channel
    has peers, which load no versions."""
    if channel.peers:
        place.problem("is for targets, which load versions, and peers run collectives; remove it")


def steering(place: Place, channel: ChannelConfig) -> None:
    """Add a problem to ``place``, the channel's, for each key of a canary or of
    ``follow = "promoted"`` that cannot work with the others."""
    canary, here = channel.canary, place.at("canary")
    if channel.follow == "promoted" and channel.peers:
        place.at("follow").problem("is for targets, which load versions, and peers run collectives; remove it")
    if channel.follow == "promoted" and channel.slots < _PROMOTED_SLOTS:
        place.at("slots").problem(
            f'{channel.slots} is too few with follow = "promoted": the version that is served, the candidate and the '
            f"next one need a slot each; use at least {_PROMOTED_SLOTS}, and one more for each version to keep"
        )
    if canary is None:
        return
    if channel.follow != "promoted":
        here.problem('is for channels with follow = "promoted"; set it, or remove the canary')
    if channel.adopt_together:
        here.problem("lets a few replicas load a version before the others, and adopt_together none; remove one")
    if canary.group not in {party.group for party in channel.targets}:
        here.at("group").problem(f'"{canary.group}" is no target of the channel')
    scored = canary.promote == "scored"
    if scored and (not canary.metric or (canary.min is None and canary.not_below_current_by is None)):
        here.at("promote").problem('"scored" needs the key metric, and min or not_below_current_by')
    if not scored and (canary.metric or canary.min is not None or canary.not_below_current_by is not None):
        here.at("promote").problem('metric, min and not_below_current_by are for promote = "scored"')


def encryption(place: Place, channel: ChannelConfig) -> None:
    """Add a problem to ``place``, that of the key ``encrypt``, if the channel has its
    slots on GPUs, or sends over process groups, which torch does not encrypt."""
    if channel.peers:
        place.problem("collectives of peers use process groups, which torch does not encrypt; remove it")
    elif channel.transport == "group":
        place.problem('transport = "group" uses process groups, which torch does not encrypt; remove one of the two')
    elif channel.staging != "host":
        place.problem('is for slots in host memory, and these are on GPUs; set staging = "host", or remove it')


def slots(place: Place, channel: ChannelConfig, replicas: Mapping[str, int]) -> None:
    """Add problems to ``place``, the channel's, if ``min_targets`` or the canary's
    replicas are more than the target replicas, or ``slots`` is below 2 with sources.

    :param replicas: number of replicas of each known group; the first check is left
        out if a target group is unknown.
    """
    targets = [replicas.get(party.group) for party in channel.targets]
    count = sum(number for number in targets if number is not None)
    if channel.min_targets > count and None not in targets:
        place.at("min_targets").problem(f"{channel.min_targets} is more than the {count} replicas of the target groups")
    canary = channel.canary
    if canary is not None and (most := replicas.get(canary.group)) is not None and canary.replicas > most:
        text = f"{canary.replicas} is more than the {most} replicas of {canary.group}"
        place.at("canary").at("replicas").problem(text)
    if channel.sources and channel.slots < _FEWEST_SLOTS:
        place.at("slots").problem(
            f"{channel.slots} is too few: the newest version stays in one while the next is received into another; "
            f"use at least {_FEWEST_SLOTS}"
        )


def device_staging(place: Place, channel: ChannelConfig, config: Config) -> None:
    """Add a problem to ``place``, that of the key ``staging``, for each group of the
    channel without GPUs: ``gpus = 0``, or unset while other groups set it."""
    shared_out = any(group.resources.gpus for group in config.groups.values())
    for party in (*channel.sources, *channel.targets, *channel.peers):
        group = config.groups.get(party.group)
        if group is not None and (group.resources.gpus == 0 or (group.resources.gpus is None and shared_out)):
            place.problem(
                f'slots on GPUs, but group "{group.name}" sees none; set its resources.gpus, or staging = "host"'
            )


def parties(place: Place, value: object, default: Any, allowed: tuple[str, ...]) -> tuple[ChannelRole, ...]:
    """Return the groups of one role of a channel; add their problems to ``place``.
    ``default``: ranks of a group without any; ``allowed``: values of ``ranks``."""
    if not isinstance(value, list | tuple):
        place.problem(f"expected a list of group names, got {show(value)}")
        return ()
    if len(value) > NAMED_MAX:
        place.problem(f"expected at most {NAMED_MAX} group names, got {len(value):,}")
        return ()
    parties: list[ChannelRole] = []
    for item in value:
        table = {"ranks": default, **item} if isinstance(item, Mapping) else item
        if isinstance(item, Mapping) and "archive" in item:  # it could not be read before
            config_tables.read(place, item, ArchiveSource)
            continue
        party = ChannelRole(item, default) if isinstance(item, str) else config_tables.read(place, table, ChannelRole)
        if party is UNSET:
            continue
        if any(party.group == other.group for other in parties):
            place.problem(f'group "{party.group}" is listed twice')
        if party.ranks not in allowed:
            listed = " or ".join(f'"{word}"' for word in allowed)
            place.problem(f'ranks of group "{party.group}": expected {listed}, got "{party.ranks}"')
        parties.append(party)
    return tuple(parties)
