"""Join a channel: identify this process, connect to the coordinator, check the GPU."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Mapping
from typing import Literal

import torch

from replicas import environ, errors
from replicas.channel.channel import Channel
from replicas.channel.session.hub import GRACE_S, Hub
from replicas.channel.session.loop import session_loop
from replicas.channel.session.session import Session
from replicas.common import own_loop
from replicas.common.logs import Log
from replicas.environ import Environment
from replicas.linux import needs, stacks
from replicas.memory.beacon import own_beacon, own_process
from replicas.messages import PROTOCOL, Hello, arguments
from replicas.messages.bounds import RANKS_MAX, clean
from replicas.messages.identity import proof_of
from replicas.sidecar.rank_side.device_probe import prove_device
from replicas.weights.copies.accelerator import accelerator

logger = Log("replicas.channel")

MIN_PROOF_S = 1.0


def join(
    channel: str,
    *,
    endpoint: str | None = None,
    token: str | None = None,
    run: str | None = None,
    group: str | None = None,
    replica: int | Literal["auto"] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    observe: bool = False,
    info: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Channel:
    """Join ``channel`` as a member; return without waiting for other members.

    Identity and address come from the environment that the supervisor set; arguments
    override it. A second join of one (group, replica, rank) fences the first. One
    process may join several channels, and one channel as several members. A membership
    lasts until the channel is closed, even if nothing refers to it.

    On a GPU, choose the device (``torch.cuda.set_device``) before joining. In an
    asyncio program call this in a worker thread if the coordinator runs on the same
    event loop.

    :param endpoint: ``host:port`` of the control port (``REPLICAS_ENDPOINT``).
    :param token: the run's join token (the content of ``REPLICAS_TOKEN_FILE``, which is
        read again at each reconnect). Off loopback it names the key of the control
        port; without a key, ``REPLICAS_CA_FILE`` must name a CA.
    :param run: name of the run (``REPLICAS_RUN``); not checked if neither is given.
    :param group: name of this rank's group (``REPLICAS_GROUP``).
    :param replica: index of this rank's replica in the group (``REPLICA_ID``, else 0).
        ``"auto"``: the lowest free index, the same on all channels that this process
        joins with ``"auto"``; read it from ``channel.member.replica``. It is meant for
        rank 0 of a replica that another program starts and counts; other ranks join
        with the index that rank 0 got.
    :param rank: this rank (``RANK``, else 0).
    :param world_size: ranks of the replica (``WORLD_SIZE``, else 1).
    :param observe: only watch commits, loads and members; no bytes. An observer needs
        no identity and fences no member: several may share a name, even a rank's.
    :param info: short texts for status pages and routers, such as ``{"url":
        "http://..."}``.
    :param timeout: limit in seconds for the connection; default 30.
    :raises replicas.errors.UsageError: an argument is missing or wrong (also: the token
        is not accepted, or the port has another key than it names), a coordinator runs
        on this thread's event loop, or the kernel denies a required call.
    :raises replicas.errors.UnknownChannel: the channel does not exist, or the group has
        no part in it.
    :raises replicas.errors.Preflight: this process is not compatible with the present
        members; or the channel's slots are in GPU memory (``staging = "device"``), and
        a test shows that a sidecar cannot use this process's GPU memory.
    :raises replicas.errors.Disconnected: no coordinator answered in time.
    """
    needs.check()
    own_loop.must_not_block("join")
    channel = arguments.name("join: channel", channel)
    timeout = arguments.seconds("join: timeout", timeout, zero=True)
    observe = arguments.flag("join: observe", observe)
    found = environ.read()
    address = found.endpoint if endpoint is None else endpoint
    if address is None:
        text = f"join: no address of a coordinator: {environ.ENDPOINT} is not set"
        raise errors.UsageError(text, hint="start this program with `replicas run`, or pass endpoint=...")
    address = arguments.endpoint("join: endpoint", address)
    secret = arguments.token("join: token", token) if token is not None else environ.token_reader(found)
    texts = arguments.texts("join: info", {} if info is None else info)
    own_group = group if group is not None else found.group or ("observer" if observe else None)
    if own_group is None:
        text = f"join: no group: {environ.GROUP} is not set"
        hint = "start this program with `replicas run`, or pass group=..., replica=..."
        raise errors.UsageError(text, channel=channel, hint=hint)
    chosen = found.replica if replica is None else replica
    number = chosen if not isinstance(chosen, str) or chosen != "auto" else None  # numpy's answer to `==` is no bool
    auto = chosen is not None and number is None
    incarnation = secrets.token_hex(8)
    hello = Hello(
        protocol=PROTOCOL,
        run=arguments.text("join: run", run if run is not None else found.run or ""),
        channel=channel,
        group=arguments.name("join: group", own_group),
        replica=_first("replica", number, 0),
        any_replica=auto and not observe,
        rank=_first("rank", rank, found.rank, 0),
        world_size=_first("world_size", world_size, found.world_size, 1),
        incarnation=incarnation,
        generation=found.generation,
        process=own_process(),
        observe=observe,
        proof="" if observe else proof_of(found.mark, incarnation),
        info=texts,
        torch_version=str(torch.__version__),
        nccl_version=_nccl_version(),
        nccl_env={clean(name): clean(value) for name, value in os.environ.items() if name.startswith("NCCL_")},
        cuda_devices=() if observe else _gpus(),
        beacon=None if observe else own_beacon(),
    )
    _show_stacks(found, hello)
    loop = session_loop()
    hub = Hub(loop, hello, found.forkserver)
    owners = None if token is not None else environ.token_owners(found)
    member = Channel(hub, Session(loop, address, secret, hello, hub, token_owners=owners))
    until = time.monotonic() + timeout
    try:
        member._open(timeout)
        _prove_device(hub, until)
        return member
    except BaseException:
        loop.call(member._start_to_leave)
        raise


def _prove_device(hub: Hub, until: float) -> None:
    """Raise Preflight if slots are on a GPU whose memory a sidecar cannot use.

    A sidecar is a helper process that runs collectives. Fork one to test it, block for
    that, and kill it; do nothing if no slot of this rank is on a GPU.

    :param hub: of the channel, whose session is open.
    :param until: deadline by ``time.monotonic()``.
    :raises replicas.errors.Preflight: the sidecar cannot, or the test could not be made
        in time.
    """
    settings = hub.settings
    ranks = {"source": settings.source_ranks, "peer": settings.peer_ranks}.get(settings.role, "all")
    if not hub.device or (ranks == "leader" and not hub.leader):
        return

    async def prove() -> None:
        """Session thread: test if a forked sidecar can open memory of this rank's GPU.

        :raises replicas.errors.Preflight: it cannot.
        :raises TimeoutError: the test takes longer than the time that is left to join.
        """
        left_s = max(MIN_PROOF_S, until - time.monotonic())
        async with asyncio.timeout(left_s):
            forkserver = await hub.loop.forkserver(hub.forkserver_name)
            await prove_device(forkserver, hub.device, timeout_s=left_s)

    try:
        hub.loop.run(prove, max(0.0, until - time.monotonic()) + GRACE_S)
    except errors.ReplicasError as error:
        error.channel, error.phase, error.members = hub.name, "join", (hub.member.name,)
        raise
    except (OSError, RuntimeError) as error:
        text = str(error) or "the test did not end before the timeout of join"
        text = f"cannot check whether other processes can use memory of GPU {hub.device} ({text})"
        hint = 'give join a longer timeout, or set staging = "host" on the channel'
        raise hub.error(errors.Preflight, text, phase="join", members=[hub.member.name], hint=hint) from error


def _show_stacks(found: Environment, hello: Hello) -> None:
    """Install the signal handler by which a supervisor gets the stacks of this process.

    The stacks go to a file in the log directory. It does nothing without a supervisor
    or for an observer; a failure is only logged.

    :param found: what the environment says of the supervisor, with the log directory.
    :param hello: names the rank and the process, from which the file is named.
    """
    if found.log_dir is None or hello.observe:
        return
    try:
        stacks.register(found.log_dir, hello.rank, hello.process.start_time)
    except OSError as error:
        logger.warning("channel %s: the supervisor will get no stacks of this process: %s", hello.channel, error)


def _first(what: str, *values: int | None) -> int:
    """Return the first of ``values`` that is not None.

    Raise UsageError if it is invalid.

    :param what: join's argument that the value is for, for the error.
    :param values: the argument, the environment's value, and the default, in this
        order.
    """
    value = next(value for value in values if value is not None)
    return arguments.integer(f"join: {what}", value, least=int(what == "world_size"), most=RANKS_MAX)


def _nccl_version() -> str:
    """Return NCCL's version, such as ``2.28.9``, or ""; does not initialise CUDA.

    It is "" for a torch without NCCL.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _gpus() -> tuple[str, ...]:
    """Return the UUID of this thread's current GPU in a tuple; () without a GPU."""
    found = accelerator()
    uuid = found.device() if found is not None else ""
    return (uuid,) if uuid else ()
