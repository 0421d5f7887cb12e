"""Sessions, the store process, the decision log: the asyncio shell round :mod:`replicas.core`."""

from replicas.coordinator.coordinator import Coordinator
from replicas.coordinator.readiness import Readiness
from replicas.core.effects import Event
from replicas.core.roster import GroupShape

__all__ = ["Coordinator", "Event", "GroupShape", "Readiness"]
