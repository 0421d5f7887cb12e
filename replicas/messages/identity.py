"""Identities of members and processes, as values."""

from __future__ import annotations

import hmac

import msgspec

from replicas.messages.bounds import Digest, Number, Pid


class Member(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One incarnation of a rank on a channel.

    :param group: name of its group.
    :param replica: index of its replica in the group, from 0.
    :param rank: its rank within the replica, from 0; rank 0 is the replica's leader.
    :param incarnation: random nonce of this one join.
    """

    group: str
    replica: int
    rank: int
    incarnation: str = ""

    @property
    def replica_name(self) -> str:
        """Name of the member's replica, as ``group/replica``."""
        return f"{self.group}/{self.replica}"

    @property
    def name(self) -> str:
        """``group/replica/rank``; equal for all incarnations (joins) of this rank."""
        return f"{self.group}/{self.replica}/{self.rank}"

    def __repr__(self) -> str:
        """Return :attr:`name`, so without the incarnation."""
        return self.name


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process on its machine; a pid alone could be reused.

    :param pid: process id in its own pid namespace.
    :param start_time: field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    :param boot_id: ``/proc/sys/kernel/random/boot_id``.
    :param pid_namespace: inode of ``/proc/PID/ns/pid``.
    """

    pid: Pid
    start_time: Number
    boot_id: Digest
    pid_namespace: Number


def proof_of(mark: str, incarnation: str) -> str:
    """Return an HMAC by which a member proves, for one join, that it has its shim's
    secret. The coordinator calls this, too, and compares.

    :param mark: the secret, which the supervising process (shim) gave its ranks; "" for
        a process without a shim: then return "".
    :param incarnation: the random nonce of the join, which the HMAC is of.
    """
    return hmac.new(mark.encode(), incarnation.encode(), "sha256").hexdigest() if mark else ""
