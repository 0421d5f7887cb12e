"""Load a channel's versions into an inference server: the Protocol :class:`Engine`, its
verbs, and :func:`follow`, the loop that calls them: check -> pause -> load ->
reset_caches -> resume. Nothing here knows a particular engine."""

from replicas.engine.following import follow
from replicas.engine.protocol import DemandGate, Engine, GateLike, Identity, PauseMode, Refused, VerifyLoad

__all__ = ["DemandGate", "Engine", "GateLike", "Identity", "PauseMode", "Refused", "VerifyLoad", "follow"]
