"""Check that the members of a group agree and reach each other, before it is built.

Theory of operation
===================

To Gloo and NCCL, a wrong address or a peer with another config looks like a slow peer:
they wait until their timeout. Here each member first puts a *card* (rendezvous entry)
with its group's shape and its listening port into the store, and reads all cards.

If the members have more than one address, each connects to every member with another
address, which greets with a keyed hash (by the lane's secret, of its rank and port): a
listener with the same port on another machine cannot pass. Each member puts its
findings into the store and reads all findings. So all of them reach the same verdict
within about two seconds, with the same links and the same culprits: the members that
most others could not reach.

If a member cannot bind its own address, its card has the error. Members wait for a
missing card until the deadline (the sidecar may be starting), in steps of half a
second, so that they find a disagreement with a present member without that wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from replicas.common.decoding import MALFORMED
from replicas.common.reason import Reason
from replicas.errors import Preflight
from replicas.linux.processes import boot_id, namespace
from replicas.linux.sockets import tcp_socket
from replicas.messages import Backend, GroupSpec
from replicas.sidecar.signed_store import SignedStore

CONNECT_S = 1.5
"""Timeout to connect to a member: a lost first packet is sent again after 1 s."""
GREETING_S = 3.0
"""Timeout from the attempt to connect to the greeting, sent by the peer's thread."""
_FINDINGS_S = GREETING_S + 2.0
_GREETING_NBYTES = 16

_T = TypeVar("_T")
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class Unreachable(Preflight):
    """Members could not connect to each other. ``links``: pairs of their addresses."""

    links: tuple[tuple[str, str], ...] = ()


class _Card(msgspec.Struct, frozen=True):
    """A member's entry in the store.

    :ivar host: machine and network namespace.
    :ivar port: listening port; 0 if all members have one address.
    :ivar error: why it cannot take part.
    """

    name: str
    backend: Backend
    size: int
    address: str
    host: str
    port: int
    error: str = ""


_Finding = dict[int, str]
"""Reasons, by rank, why members could not be reached."""


def meet(store: SignedStore, spec: GroupSpec, deadline: float) -> None:
    """Check with all members of the group, over ``store``, that it can be built; block.

    Each member puts a card (its view of the group) and its findings (members that it
    cannot connect to) into the store, and reads those of all.

    :param store: has the group's prefix.
    :param deadline: by ``time.monotonic()``.
    :raises replicas.errors.Preflight: they cannot work together; its ``members`` are at
        fault.
    :raises replicas.errors.StoreTampered: another client writes into the store.
    :raises RuntimeError: a member did not join by the deadline, or the store failed.
    """
    several = len(set(spec.addresses)) > 1
    host = f"{boot_id()}/{namespace('net')}"
    with _listening(spec, listen=several) as (port, error):
        mine = _Card(spec.name(spec.rank), spec.backend, spec.size, spec.address, host, port, error)
        store.set(f"card/{spec.rank}", msgspec.msgpack.encode(mine))
        cards = _collect(store, spec, "card", _Card, deadline, lambda card: _check(mine, card))
        _check_hosts(cards[rank] for rank in range(spec.size))
        if not several:
            return
        found = asyncio.run(_reach(spec, mine, cards))
        store.set(f"finding/{spec.rank}", msgspec.msgpack.encode(found))
        until = min(deadline, time.monotonic() + _FINDINGS_S)
        findings = _collect(store, spec, "finding", _Finding, until, lambda finding: None)
    edges = {(rank, other): why for rank, finding in findings.items() for other, why in finding.items()}
    _verdict(edges, cards)


def _check(mine: _Card, card: _Card) -> None:
    """Raise Preflight if ``card``, of a member, cannot be in one group with ``mine``.

    A card is a member's entry in the store.
    """
    if card.error:
        raise Preflight(
            f"{card.name} cannot listen at its address {card.address} ({card.error})",
            members=(card.name,),
            hint="the coordinator must be reached by an address that the other members can use too, "
            "not through a tunnel or address translation",
        )
    for what, value, there in (("backend", mine.backend, card.backend), ("size", mine.size, card.size)):
        if value != there:
            text = f"{mine.name} builds a process group of {what} {value}, {card.name} one of {what} {there}"
            hint = "give all members the same version of this library and the same config"
            raise Preflight(text, members=(mine.name, card.name), hint=hint)


def _check_hosts(cards: Iterable[_Card]) -> None:
    """Raise Preflight if two members on different machines have the same address.

    :param cards: the store's entries of all members, so that every member raises alike.
    """
    known: dict[str, _Card] = {}
    for card in cards:
        first = known.setdefault(card.address, card)
        if first.host != card.host:
            raise Preflight(
                f"{first.name} and {card.name} have the same address {card.address} on two machines or network namespaces",
                members=(first.name, card.name),
                hint="join with an address of the coordinator that is not local to one machine",
            )


def _collect(
    store: SignedStore, spec: GroupSpec, what: str, kind: type[_T], deadline: float, check: Callable[[_T], None]
) -> dict[int, _T]:
    """Wait for the values of all members in the store; check each; return all by rank.

    :param what: first part of the keys: ``card`` or ``finding``.
    :param kind: type of the decoded values.
    :param deadline: by ``time.monotonic()``.
    :param check: called with each value as it comes; raises to end the wait.
    :raises RuntimeError: a member's value is missing at the deadline, or malformed.
    """
    found: dict[int, _T] = {}
    while missing := [rank for rank in range(spec.size) if rank not in found]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            names = ", ".join(spec.name(rank) for rank in missing)
            raise RuntimeError(f"{names} did not join the process group by the deadline")
        store.set_timeout(timedelta(seconds=max(0.01, min(store.slice_s, remaining))))
        try:
            values = store.multi_get([f"{what}/{rank}" for rank in missing])
        except _c10d.DistStoreError:  # some keys are still missing
            missing = [rank for rank in missing if store.check([f"{what}/{rank}"])]
            values = store.multi_get([f"{what}/{rank}" for rank in missing]) if missing else []
        for rank, value in zip(missing, values, strict=True):
            try:
                found[rank] = msgspec.msgpack.decode(value, type=kind)
            except MALFORMED as error:  # signed, so a member wrote it
                raise RuntimeError(f"the {what} of {spec.name(rank)} in the store is malformed: {error}") from error
            check(found[rank])
    return found


@contextmanager
def _listening(spec: GroupSpec, *, listen: bool) -> Iterator[tuple[int, str]]:
    """Context manager: check that the member's address can be bound, by binding it.

    With ``listen``, listen there on a free port, and greet callers on a thread. Yields
    (port, error's text): the text is empty if all went well, and the port is 0 without
    ``listen`` or after an error. Ends the thread and closes the port on exit.
    """
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(tcp_socket(spec.address))
            listener.bind((spec.address, 0))
            if listen:
                listener.listen(min(spec.size, socket.SOMAXCONN))
        except OSError as error:
            yield 0, str(error.strerror or error)
            return
        if not listen:
            yield 0, ""
            return
        port = listener.getsockname()[1]
        words = _greeting(spec, spec.rank, port)
        greeter = threading.Thread(target=_greet, args=(listener, words), name="greeter", daemon=True)
        greeter.start()
        try:
            yield port, ""
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept()
            greeter.join()


def _greeting(spec: GroupSpec, rank: int, port: int) -> bytes:
    """Return the greeting that identifies the member with this rank, at this port.

    It is a hash keyed by the group's secret, which others cannot compute.
    """
    words = f"greeting {rank} {port}".encode()
    return hashlib.blake2b(words, digest_size=_GREETING_NBYTES, key=spec.secret).digest()


def _greet(listener: socket.socket, words: bytes) -> None:
    """Thread: send the greeting ``words`` to each caller, until ``listener`` ends."""
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:  # the listener was shut down
            return
        with caller:
            caller.setblocking(False)
            try:
                caller.send(words)
            except OSError:  # the caller is gone, and reports that in its finding
                continue


async def _reach(spec: GroupSpec, mine: _Card, cards: dict[int, _Card]) -> _Finding:
    """Connect to all members with another address; return the failures, by rank.

    :param mine: this member's card. ``cards``: those of all members, by rank.
    """
    others = [rank for rank, card in cards.items() if rank != spec.rank and card.address != mine.address]
    calls = [_call(cards[rank], _greeting(spec, rank, cards[rank].port)) for rank in others]
    reasons = await asyncio.gather(*calls)
    return {rank: why for rank, why in zip(others, reasons, strict=True) if why}


async def _call(card: _Card, greeting: bytes) -> Reason | None:
    """Connect to the member of ``card`` and check its greeting; then disconnect.

    Return why that failed, or None.

    :param greeting: the bytes that only this member can send.
    """
    loop = asyncio.get_running_loop()
    began, heard = loop.time(), b""
    awaited, limit_s = "connection", CONNECT_S
    with tcp_socket(card.address) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(limit_s) as limit:
                await loop.sock_connect(sock, (card.address, card.port))
                awaited, limit_s = "greeting", GREETING_S
                limit.reschedule(began + limit_s)
                while len(heard) < len(greeting):
                    data = await loop.sock_recv(sock, len(greeting) - len(heard))
                    if not data:
                        break
                    heard += data
        except TimeoutError:
            return f"no {awaited} within {limit_s:g} s"
        except OSError as error:
            return os.strerror(error.errno or 0)
    return None if heard == greeting else "another program answers there"


def blame(edges: set[tuple[int, int]]) -> list[int]:
    """Return the ranks at fault for failed connections.

    Greedy: blame the ranks that most others failed to reach, drop their pairs, repeat.

    :param edges: pairs of ranks: the caller, and the member that it could not reach.
    """
    left, guilty = set(edges), set[int]()
    while left:
        counts = Counter(other for _, other in left)
        worst = {rank for rank, count in counts.items() if count == max(counts.values())}
        guilty |= worst
        left = {edge for edge in left if not worst & set(edge)}
    return sorted(guilty)


def _verdict(edges: dict[tuple[int, int], str], cards: dict[int, _Card]) -> None:
    """Raise Unreachable if any connection failed, naming the members at fault.

    :param edges: reasons by the ranks of (caller, called); empty if none failed.
    :param cards: the store's entries of all members, by rank.
    """
    if not edges:
        return
    guilty = blame(set(edges))
    parts: list[str] = []
    for rank in guilty:
        card = cards[rank]
        callers = {other: why for (other, called), why in edges.items() if called == rank}
        others = ", ".join(f"{cards[other].name} at {cards[other].address}" for other in callers)
        reasons = ", ".join(sorted(set(callers.values())))
        parts.append(f"{card.name} cannot be reached at {card.address} by {others}: {reasons}")
    error = Unreachable(
        "; ".join(parts),
        members=tuple(cards[rank].name for rank in guilty),
        hint="open all TCP ports between these machines, and join each by an address that the others can reach",
    )
    found = {tuple(sorted((cards[one].address, cards[other].address))) for one, other in edges}
    error.links = tuple((one, other) for one, other in sorted(found))
    raise error
