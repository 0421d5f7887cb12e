"""Bring a channel's versions into somebody's inference server: the Protocol
:class:`Engine`, its verbs, and :func:`follow`, the loop that calls them."""

from replicas.engine.following import follow
from replicas.engine.protocol import Engine, GateLike, Identity, PauseMode, Refused, VerifyLoad

__all__ = ["Engine", "GateLike", "Identity", "PauseMode", "Refused", "VerifyLoad", "follow"]
