"""The groups that a group waits for before it starts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from replicas.config.values import Place, form, names, show


class Dependency(msgspec.Struct, frozen=True):
    """A group to wait for: each replica ready or finished, or each one finished."""

    group: str
    condition: Literal["ready", "finished"] = "ready"

    def __str__(self) -> str:
        """Return the dependency as in a config: ``GROUP`` or ``GROUP:finished``."""
        return self.group if self.condition == "ready" else f"{self.group}:{self.condition}"


@form('list of "GROUP", "GROUP:ready" or "GROUP:finished"', names.range)
def dependencies(place: Place, value: object) -> Any:
    """Read a list of dependencies; return a tuple of those that are well formed, or
    UNSET if ``value`` is not a list of group names. Add problems to ``place``."""
    words = names.read(place, value)
    if words is UNSET:
        return words
    dependencies = []
    for word in words:
        group, colon, condition = word.partition(":")
        if colon and condition not in ("ready", "finished"):
            place.problem(f'expected "{group}:ready" or "{group}:finished", got {show(word)}')
        else:
            dependencies.append(Dependency(group, condition or "ready"))
    return tuple(dependencies)
