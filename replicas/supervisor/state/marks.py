"""Check that a joining process is a rank of a replica that this supervisor started.

Every process with a member token may join, and replaces an older process of its rank.
For its own replicas, the supervisor knows the right processes: each shim has a random
mark, which only its processes inherit. A rank proves in its Hello that it has the mark.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from replicas import errors
from replicas.environ import REPLICA
from replicas.linux.processes import MARK
from replicas.messages import Hello
from replicas.messages.identity import proof_of
from replicas.supervisor.state.run_state import ShimRecord


def check_mark(hello: Hello, shims: Iterable[ShimRecord] | None) -> None:
    """Check that a joining member proves the mark of one of these shims.

    :param hello: the first message of the member, with its proof.
    :param shims: those of its replica; None if its group has no such replica.
    :raises replicas.errors.Fenced: no shim of the member's generation has that mark.
    """
    own, name = (hello.group, hello.replica, hello.generation), hello.member.name
    known = [one.nonce for one in shims or () if (one.group, one.replica, one.generation) == own]
    shown = hello.proof.encode()
    if any(hmac.compare_digest(proof_of(one, hello.incarnation).encode(), shown) for one in known):
        return
    if hello.proof and shims is None:
        text = f"{name} cannot join: group {hello.group} has no replica {hello.replica}"
        hint = f"join without `replica`, as {REPLICA} has it; replicas scale {hello.group} N starts more"
    elif hello.proof:
        text = f"{name} cannot join: its generation {hello.generation} is over, or this run's supervisor has not started it"
        hint = "end this process: the supervisor starts the replica itself"
    else:
        text = f"{name} cannot join: {MARK} is not set, which the supervisor sets for its processes"
        hint = (
            "pass the environment of the command on to the program that joins; "
            f'or set launcher = "external" for group {hello.group}, if others start it'
        )
    raise errors.Fenced(text, channel=hello.channel, phase="join", members=[name], hint=hint)
