"""Checks across the keys of a channel. Each function adds problems to a place."""

from __future__ import annotations

from collections.abc import Mapping

from replicas.config.structs import ChannelConfig, Config
from replicas.config.values import Place

_FEWEST_SLOTS = 2


def roles(place: Place, channel: ChannelConfig) -> None:
    """Refuse a channel with peers and sources, without either, or with mixed ranks."""
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
        place.problem("needs sources (and targets), or peers")
    if len({party.ranks for party in channel.peers}) > 1:
        place.at("peers").problem("all peers of a channel must have the same ranks")


def together(place: Place, channel: ChannelConfig) -> None:
    """Refuse ``adopt_together`` on a channel without targets."""
    if channel.peers:
        place.problem("is for targets, which load versions, and peers run collectives; remove it")


def encryption(place: Place, channel: ChannelConfig) -> None:
    """Refuse settings with which weights would be sent over a process group."""
    if channel.peers:
        place.problem("collectives of peers use process groups, which torch does not encrypt; remove it")
    elif channel.transport == "group":
        place.problem('transport = "group" uses process groups, which torch does not encrypt; remove one of the two')
    elif channel.staging != "host":
        place.problem('is for slots in host memory, and these are on GPUs; set staging = "host", or remove it')


def slots(place: Place, channel: ChannelConfig, replicas: Mapping[str, int]) -> None:
    """Check ``min_targets`` and ``slots`` against the number of targets.

    :param replicas: number of replicas of each known group.
    """
    targets = [replicas.get(party.group) for party in channel.targets]
    count = sum(number for number in targets if number is not None)
    if channel.min_targets > count and None not in targets:
        place.at("min_targets").problem(f"{channel.min_targets} is more than the {count} replicas of the target groups")
    if channel.sources and channel.slots < _FEWEST_SLOTS:
        place.at("slots").problem(
            f"{channel.slots} is too few: the newest version stays in one while the next is received into another; "
            f"use at least {_FEWEST_SLOTS}"
        )


def device_staging(place: Place, channel: ChannelConfig, config: Config) -> None:
    """Refuse groups without GPUs: ``gpus = 0``, or unset while other groups set it."""
    shared_out = any(group.resources.gpus for group in config.groups.values())
    for party in (*channel.sources, *channel.targets, *channel.peers):
        group = config.groups.get(party.group)
        if group is not None and (group.resources.gpus == 0 or (group.resources.gpus is None and shared_out)):
            place.problem(
                f'slots on GPUs, but group "{group.name}" sees none; set its resources.gpus, or staging = "host"'
            )
