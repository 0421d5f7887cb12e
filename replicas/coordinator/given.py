"""Validate the arguments of an embedded coordinator by the rules of the config file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET
from starlette.routing import BaseRoute

from replicas import errors
from replicas.config.values import Form, Place, address, folder, listen
from replicas.core.members.roster import GroupShape
from replicas.messages import arguments
from replicas.messages.bounds import RANKS_MAX, shown

__all__ = [
    "bind_address",
    "checked_shape",
    "epochs_of",
    "listen_host",
    "live_of",
    "port_of",
    "routes_of",
    "shapes_of",
    "state_folder",
]

_PORT_MAX = 65535


def _mapping(what: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise errors.UsageError(f"{what} must be a mapping, not {shown(value)}")
    return value


def shapes_of(groups: object) -> dict[str, GroupShape]:
    """The shape of each group, given as a shape or a number of replicas."""
    given = _mapping("groups", {} if groups is None else groups)
    return {
        arguments.name("groups: a name", name): checked_shape(f"groups[{shown(name)}]", one)
        for name, one in given.items()
    }


def checked_shape(what: str, shape: object) -> GroupShape:
    """A valid shape; an integer means that many replicas of one rank."""
    given = shape if isinstance(shape, GroupShape) else GroupShape(replicas=shape)  # type: ignore[arg-type]  # see below
    return GroupShape(
        replicas=arguments.integer(f"{what}: replicas", given.replicas, least=0, most=RANKS_MAX),
        world_size=arguments.integer(f"{what}: world_size", given.world_size, least=1, most=RANKS_MAX),
        heartbeat_timeout_s=arguments.seconds(f"{what}: heartbeat_timeout_s", given.heartbeat_timeout_s),
    )


def epochs_of(epochs: object) -> dict[str, int]:
    """The newest epoch of each channel."""
    given = _mapping("epochs", {} if epochs is None else epochs)
    return {name: arguments.integer(f"epochs[{shown(name)}]", one, least=0) for name, one in given.items()}


def port_of(what: str, port: object) -> int:
    return arguments.integer(what, port, least=0, most=_PORT_MAX)


def listen_host(host: object) -> str:
    """Host name or address, for sessions and HTTP."""
    brackets = "[{}]:0" if isinstance(host, str) and ":" in host else "{}:0"
    found: str = _read("host", listen, brackets.format(host) if isinstance(host, str) else host)[0]
    return found


def bind_address(host: object) -> str:
    """An address of this machine, for the store."""
    found: str = _read("store_bind", address, host)
    return found


def state_folder(given: object) -> Path | None:
    """An absolute folder, or None."""
    found: Path | None = None if given is None else _read("state_dir", folder, given)
    return found


def _read(what: str, read: Form, value: object) -> Any:
    place = Place(Path.cwd(), (what,))
    found = read(place, value)
    if found is UNSET:
        raise errors.UsageError(place.problems[0][1])
    return found


def live_of(live: object) -> Callable[[], bool] | None:
    """The liveness callback, or None."""
    if live is not None and not callable(live):
        raise errors.UsageError(f"live must be a function without arguments, not {shown(live)}")
    return live


def routes_of(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    """Further routes to serve."""
    try:
        found = list(routes)
    except TypeError as error:
        raise errors.UsageError(f"routes must be a sequence, not {shown(routes)}") from error
    for route in found:
        if not isinstance(route, BaseRoute):
            raise errors.UsageError(f"routes: {shown(route)} is no route of Starlette's")
    return found
