"""Keep one set of weights in step across many separate torchrun jobs.

See README.md for a first example and ARCHITECTURE.md for the map of the code. Importing
this package does not import torch: the names below load their modules on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from replicas import errors

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:
    from replicas import engine as engine
    from replicas import sources as sources
    from replicas import status as status
    from replicas import testing as testing
    from replicas.archive import follow
    from replicas.channel import Change, Channel, Lease, Pending, Receipt, Shard, Update, Versions, join
    from replicas.coordinator import Coordinator
    from replicas.messages.identity import Member
    from replicas.supervisor import Supervisor

__all__ = [
    "Change",
    "Channel",
    "Coordinator",
    "Lease",
    "Member",
    "Pending",
    "Receipt",
    "Shard",
    "Supervisor",
    "Update",
    "Versions",
    "__version__",
    "errors",
    "follow",
    "join",
]

_OF_A_RANK = ("Change", "Channel", "Lease", "Pending", "Receipt", "Shard", "Update", "Versions", "join")
_HOMES = dict.fromkeys(_OF_A_RANK, "replicas.channel") | {
    "Coordinator": "replicas.coordinator",
    "Member": "replicas.messages.identity",
    "Supervisor": "replicas.supervisor",
    "follow": "replicas.archive",
}
_MODULES = ("engine", "sources", "status", "testing")


def __getattr__(name: str) -> object:
    """Return a public name of the package, imported from its module at the first use
    and kept here after that.

    :raises AttributeError: the package has no such name.
    """
    if name in _MODULES:
        return importlib.import_module(f"replicas.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the package's public names, sorted, also those not imported yet."""
    return sorted([*__all__, *_MODULES])
