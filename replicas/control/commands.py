"""The orders that a run accepts over HTTP, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from replicas import errors
from replicas.messages.version_orders import VersionOrder
from replicas.trust.tokens import Role

RUN_HEADER = "Replicas-Run"
"""Header of an order: the run's name, percent-encoded. Any other run refuses it."""
TOKEN_HEADER = "Replicas-Token"
"""Header of a public page for a token that is not valid: why it is not."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Target = Name
"""``group`` or ``group/index``."""


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set the number of a group's replicas."""

    group: Name
    replicas: int


class Restart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Restart replicas; ``rolling``: only ``max_unavailable`` of a group at a time."""

    target: Target
    rolling: bool = False


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drain replicas, the whole run, or a node.

    :ivar target: None for the whole run, which then ends.
    :ivar hurry: True to send SIGKILL immediately.
    :ivar node: drain this node instead; its replicas start elsewhere.
    :ivar undo: let the node accept replicas again.
    """

    target: Target | None = None
    hurry: bool = False
    node: Name | None = None
    undo: bool = False


class Detach(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End the supervisor; leave the replicas running for the next one."""


class ResetFailed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reset failed replicas; ``target`` None means all of them."""

    target: Target | None = None


class Reload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read the config file again."""


class StacksOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collect stacks; ``target`` None means every rank of the run."""

    target: Target | None = None


class DoctorOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Check the machine of ``node``, or of all nodes."""

    node: Name | None = None


class TokensOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Show or change the tokens of a role, or of both.

    :ivar rotate: make a new token.
    :ivar revoke_old: retire the previous token.
    :ivar force: retire it even if disconnected nodes need it.
    """

    role: Role | None = None
    rotate: bool = False
    revoke_old: bool = False
    force: bool = False


Order = Scale | Restart | Drain | Detach | ResetFailed | Reload | StacksOrder | DoctorOrder | TokensOrder | VersionOrder

ORDERS: dict[str, type[Order]] = {
    "/scale": Scale,
    "/restart": Restart,
    "/drain": Drain,
    "/detach": Detach,
    "/reset-failed": ResetFailed,
    "/reload": Reload,
    "/stacks": StacksOrder,
    "/doctor": DoctorOrder,
    "/tokens": TokensOrder,
    **{f"/{kind.__name__.lower()}": kind for kind in get_args(VersionOrder)},
}
"""The type of the body of each ``POST``.

A run carries it out by a coroutine method with the name of the path, and its fields as
keywords (``/drain`` with a node: ``drain_node``; orders about versions: ``steer``, with
the order), which returns the result and raises :class:`replicas.errors.ReplicasError`.
"""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data. ``problems`` has a line for each of the config ``source``."""

    kind: str
    message: str
    hint: str = ""
    problems: tuple[str, ...] = ()
    source: str = ""

    @classmethod
    def of(cls, error: errors.ReplicasError) -> Problem:
        """Return an error as data, to be sent in an answer."""
        found = cls(kind=errors.kind_of(error), message=error.message, hint=error.hint)
        if isinstance(error, errors.BadConfig):
            return msgspec.structs.replace(found, problems=error.problems, source=error.source)
        return found

    def exception(self) -> errors.ReplicasError:
        """Return the error, of the class that ``kind`` names; do not raise it."""
        if self.kind == "BadConfig":
            return errors.BadConfig(self.problems, source=self.source)
        return errors.error_class(self.kind)(self.message, hint=self.hint)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Response to an order. It still runs if ``done`` is False without an error."""

    done: bool
    result: Any = None
    error: Problem | None = None
