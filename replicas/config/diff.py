"""Compare two configs of a live run: the plan of a reload, as data. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from replicas.config.structs import Config, GroupConfig

__all__ = ["ConfigDiff", "diff"]

_RESTARTING = ("nproc_per_node", "nnodes", "command", "launcher", "resources", "env", "cwd")
"""Fields of a group that its processes start with: a change restarts them."""
_WITHOUT_EFFECT = ("name", "replicas", "env_file")
_REMEDY = "end the run and start it again"
_FIXED = ("schema_version", "run.name", "run.state_dir", "run.events_max_nbytes", "store", "control", "channels")


class ConfigDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two configs of a run.

    :param added: groups to start. :param removed: groups to drain.
    :param restarted: groups whose processes must be replaced, as a field that they
        start with has changed.
    :param adjusted: groups whose other settings (policies, timeouts, dependencies)
        apply from now on; none of ``restarted``.
    :param resized: new number of replicas by group, where it has changed, ``restarted``
        ones included.
    :param settings: settings of the run that apply from now on.
    :param refused: changes that are impossible while the run lives, one line each.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()
    resized: dict[str, int] = {}
    settings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the configs are equal in effect."""
        return self == ConfigDiff()


def diff(old: Config, new: Config) -> ConfigDiff:
    """Return what a reload from ``old`` to ``new`` does.

    In the order of the new config; ``removed`` in that of the old one.
    """
    both = {name: (old.groups[name], group) for name, group in new.groups.items() if name in old.groups}
    restarted = tuple(name for name, (before, after) in both.items() if _differ(before, after, _RESTARTING))
    others = [field for field in GroupConfig.__struct_fields__ if field not in (*_RESTARTING, *_WITHOUT_EFFECT)]
    return ConfigDiff(
        added=tuple(name for name in new.groups if name not in old.groups),
        removed=tuple(name for name in old.groups if name not in new.groups),
        restarted=restarted,
        adjusted=tuple(
            name for name, (before, after) in both.items() if name not in restarted and _differ(before, after, others)
        ),
        resized={name: after.replicas for name, (before, after) in both.items() if before.replicas != after.replicas},
        settings=tuple(path for path in ("run.stop_when", "logs") if _value(old, path) != _value(new, path)),
        refused=tuple(_refusals(old, new)),
    )


def _differ(before: object, after: object, fields: tuple[str, ...] | list[str]) -> bool:
    return any(getattr(before, field) != getattr(after, field) for field in fields)


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for field in path.split("."):
        value = getattr(value, field)
    return value


def _refusals(old: Config, new: Config) -> Iterator[str]:
    for path in _FIXED:
        before, after = _value(old, path), _value(new, path)
        if before == after:
            continue
        name = path.removesuffix("_nbytes").replace("events_max", "events_max_size")
        change = f" ({before} -> {after})" if "." in path else ""
        yield f"{name} cannot change while the run lives{change}: {_REMEDY}"
    if not _with_gpus(old) and _with_gpus(new):
        place = f"groups.{_with_gpus(new)[0]}.resources.gpus"
        yield f"{place}: GPUs are assigned from the start on, and running processes may use all of them: {_REMEDY}"
    if not _limits(old) and _limits(new):
        yield f"groups.{_limits(new)[0]}.resources: limits need control groups that are made at the start: {_REMEDY}"


def _with_gpus(config: Config) -> list[str]:
    """Return the groups that ask for GPUs of their own."""
    return [name for name, group in config.groups.items() if group.resources.gpus]


def _limits(config: Config) -> list[str]:
    """Return the groups with a limit of memory or processes."""
    both = ((name, group.resources) for name, group in config.groups.items())
    return [name for name, one in both if one.memory_nbytes is not None or one.max_processes is not None]
