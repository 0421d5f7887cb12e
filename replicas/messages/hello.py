"""The first message of a session."""

from __future__ import annotations

from typing import Annotated

import msgspec

from replicas.messages.bounds import INFO_ENTRIES, RANKS_MAX, Digest, Number, Text
from replicas.messages.carried import Beacon, HeldVersion
from replicas.messages.identity import Member, ProcessIdentity

_HELD = 256
_GPUS = 64
_Rank = Annotated[int, msgspec.Meta(ge=-RANKS_MAX, le=RANKS_MAX)]
"""The roster says what is wrong with a negative one."""
_Info = Annotated[dict[Text, Text], msgspec.Meta(max_length=INFO_ENTRIES)]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a session: the member's identity and its state.

    :ivar resume_term: 0 for a new join, else the term whose session continues.
    :ivar epoch: knowledge for a coordinator of another term, as are ``latest`` (with
        its digest, and the version whose bytes it has), ``assigned`` and ``publishes``.
    :ivar nccl_env: the process's NCCL_* variables.
    :ivar nccl_version: empty without NCCL.
    :ivar lent: versions that this member no longer holds, but whose memory others may
        still have mapped.
    :ivar any_replica: True if the coordinator chooses the index of its replica.
    :ivar proof: proves that the process runs under a shim of this generation
        (:func:`~replicas.messages.identity.proof_of`); empty without a shim.
    :ivar adopted: the newest version that it knows adopted; ``unadopted``: the newest
        that it knows rejected, or has refused.
    """

    protocol: Number
    run: Text
    channel: Text
    group: Text
    replica: _Rank
    rank: _Rank
    world_size: _Rank
    incarnation: Text
    generation: Number
    process: ProcessIdentity
    observe: bool = False
    info: _Info = {}
    torch_version: Text = ""
    nccl_version: Text = ""
    nccl_env: _Info = {}
    cuda_devices: Annotated[tuple[Text, ...], msgspec.Meta(max_length=_GPUS)] = ()
    resume_term: Number = 0
    received: Number = 0
    held: Annotated[tuple[HeldVersion, ...], msgspec.Meta(max_length=_HELD)] = ()
    loaded: Number = 0
    epoch: Number = 0
    latest: Number = 0
    latest_digest: Digest = ""
    latest_content: Number = 0
    assigned: Number = 0
    publishes: Number = 0
    beacon: Beacon | None = None
    lent: Annotated[tuple[Number, ...], msgspec.Meta(max_length=_HELD)] = ()
    any_replica: bool = False
    proof: Digest = ""
    adopted: Number = 0
    unadopted: Number = 0

    @property
    def member(self) -> Member:
        """Identity of the member that sends it, made of the fields group, replica, rank
        and incarnation. With ``any_replica`` the replica's index is not chosen yet."""
        return Member(self.group, self.replica, self.rank, self.incarnation)
