"""Group sizes that differ from the config, because groups were scaled. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from replicas.config.structs import Config
from replicas.supervisor.fleet.machine import Machine
from replicas.supervisor.fleet.resources import problems
from replicas.supervisor.state.run_state import SavedGroup

__all__ = ["fitting", "with_sizes"]


def with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    """The config with other numbers of replicas."""
    groups = {
        name: msgspec.structs.replace(group, replicas=sizes.get(name, group.replicas))
        for name, group in config.groups.items()
    }
    return msgspec.structs.replace(config, groups=groups)


def fitting(
    saved: Mapping[str, SavedGroup], config: Config, machine: Machine, say: Callable[[str], None]
) -> dict[str, SavedGroup]:
    """A dead supervisor's groups; sizes that do not fit (any more) are the config's."""
    sizes = {
        name: saved[name].size
        for name, group in config.groups.items()
        if name in saved and saved[name].configured == group.replicas
    }
    found = problems(with_sizes(config, sizes), machine)
    if not found:
        return dict(saved)
    say(f"the groups were scaled to what does not fit here; they have their sizes of the config: {'; '.join(found)}")
    return {
        name: msgspec.structs.replace(one, size=one.configured) if name in sizes else one for name, one in saved.items()
    }
