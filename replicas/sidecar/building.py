"""Build process groups over a TCPStore; no other module makes one.

Connect to the store -> meet -> build -> probe. The connection is retried until the
deadline: nothing has moved yet, and the store may be restarting. The rest is tried
once, after the members have met (:mod:`replicas.sidecar.meeting`). Nothing here guards
against a frozen store or a hung device: the owner kills this process when the deadline
has passed.

ProcessGroupNCCL without its watchdog
=====================================

The watchdog of ProcessGroupNCCL assumes that the rank ends with its group. Here the
process's owner enforces the deadlines, and the store is shared by all. So the watchdog
is off, by torch's own rule for blocking waits (``TORCH_NCCL_BLOCKING_WAIT``). It cannot
write a dump signal (``exception_dump``, unprefixed: every other process with a group on
that store would abort minutes later), abort the process, tear down after an error, or
apply a timeout earlier than ours. The other variables disable its actions, in case a
torch release starts a watchdog nevertheless. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would
turn all of that on again, so the level is lowered, in this process only.

The process group is never destroyed: that would abort its communicators, wait up to its
timeout, and delay the error that the sidecar has to report. The end of the process
cleans up.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import msgspec
import tenacity
import torch
import torch.distributed as dist

from replicas.common.backoff import Backoff
from replicas.core.members.preflight import MULTI_RANK_VERSION
from replicas.errors import StoreTampered
from replicas.linux.interfaces import interface_of
from replicas.linux.processes import boot_id
from replicas.messages import GroupSpec
from replicas.sidecar.groups import CollectiveGroup, GlooGroup, NcclGroup
from replicas.sidecar.meeting import meet
from replicas.sidecar.signed_store import SignedStore
from replicas.weights.copies.accelerator import accelerator

_c10d: Any = dist  # torch's own annotations leave out most of the names below

STORE_CONNECT = Backoff(0.5, 4.0)
"""Timeout of an attempt to connect: 0.5 s, doubled each time up to 4 s.

It exceeds a long round trip; torch's client takes up to twice the timeout."""
PROBE_NBYTES = 64 << 10
NCCL_TIMEOUT = timedelta(days=30)
"""ProcessGroupNCCL's own timeout, out of reach: each ``StartedWork`` has a deadline."""
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_NAN_CHECK": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Set in every sidecar with NCCL; overrides the rank's own environment."""
_never_destroyed: list[Any] = []


def build_group(spec: GroupSpec) -> CollectiveGroup:
    """Form the process group of ``spec``, over the TCPStore that it names; block.

    The members meet first: they check that they agree and reach each other. All use one
    prefix of keys. NCCL groups change environment variables of this process, select its
    GPU, and are tested with an all-reduce.

    :raises replicas.errors.Preflight: members, which it names, disagree, or cannot
        reach each other.
    :raises replicas.errors.StoreTampered: another client writes into the store.
    :raises RuntimeError: a peer did not join in time, or the store or test failed.
    """
    deadline = time.monotonic() + spec.timeout_s
    found = accelerator()
    if spec.backend == "nccl" and found is not None and found.group_backend == "gloo":  # an accelerator other than CUDA
        spec = msgspec.structs.replace(spec, backend="gloo")
    if spec.backend == "nccl":
        _set_nccl_environment(spec)
    plain = _c10d.PrefixStore(spec.prefix, connect_store(spec.store_host, spec.store_port, deadline))
    store = SignedStore(plain, spec.secret)
    try:
        meet(store, spec, deadline)
        remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        store.set_timeout(remaining)
        group = _build_gloo(store, spec, remaining) if spec.backend == "gloo" else _build_nccl(store, spec)
        if group.backend == "nccl":  # it connects in the first operation: all members must take part
            _probe(group, deadline)
        return group
    except RuntimeError as error:
        if store.tampered and not isinstance(error, StoreTampered):  # torch has wrapped the error
            raise StoreTampered(store.tampered) from error
        raise


def connect_store(host: str, port: int, deadline: float) -> Any:
    """Return a TCPStore client, retrying until it is connected; block.

    :param deadline: by ``time.monotonic()``.
    :raises RuntimeError: it is not connected by the deadline.
    """
    retry = tenacity.Retrying(
        wait=tenacity.wait_exponential(multiplier=0.02, max=0.5) + tenacity.wait_random(0, 0.05),
        stop=tenacity.stop_before_delay(max(deadline - time.monotonic(), 0.0)),
        retry=tenacity.retry_if_exception_type((OSError, RuntimeError)),
        reraise=True,
    )
    try:
        for attempt in retry:
            with attempt:
                number = attempt.retry_state.attempt_number
                if number > 1:
                    # Without a listener, torch's own client waits for twice its
                    # timeout, and logs pages about it.
                    socket.create_connection((host, port), timeout=_store_timeout_s(deadline, number)).close()
                timeout = timedelta(seconds=_store_timeout_s(deadline, number))
                return _c10d.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(f"cannot reach the rendezvous store at {host}:{port} ({reason})") from error
    raise AssertionError  # tenacity ends with a result or an error


def _store_timeout_s(deadline: float, number: int) -> float:
    """Return the timeout, in seconds, of attempt ``number`` (from 1) to connect to the
    store. It grows with the number, and ends at the deadline (``time.monotonic()``).
    """
    return max(0.05, min(STORE_CONNECT.after(number - 1), deadline - time.monotonic()))


def _build_gloo(store: Any, spec: GroupSpec, timeout: timedelta) -> CollectiveGroup:
    """Return a Gloo group, which listens on the member's address; wait for all members.

    :param store: with the prefix of the group's keys.
    :param timeout: for all members to come; torch raises RuntimeError after it.
    """
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=spec.address)]
    options._timeout = timeout
    device = accelerator() if spec.device else None
    return GlooGroup(_c10d.ProcessGroupGloo(store, spec.rank, spec.size, options), spec, device)


def _build_nccl(store: Any, spec: GroupSpec) -> CollectiveGroup:
    """Select this process's GPU, and return an NCCL group on it; wait for all members.

    :param store: with the prefix of the group's keys.
    :raises RuntimeError: there is no GPU, or no NCCL.
    """
    device = accelerator()
    uuid = "" if device is None else device.device()
    if device is None or not uuid or not _c10d.is_nccl_available():
        raise RuntimeError("the nccl backend needs a GPU and a torch with NCCL; this process lacks one of them")
    where = device.torch_device(uuid)
    torch.cuda.set_device(where)
    _allow_shared_device(store, spec, uuid)
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    backend = _c10d.ProcessGroupNCCL(store, spec.rank, spec.size, options)
    _never_destroyed.append(backend)
    if hasattr(backend, "eager_connect_single_device"):
        backend.eager_connect_single_device(where)
    return NcclGroup(backend, spec, device, where)


def _probe(group: CollectiveGroup, deadline: float) -> None:
    """Test a new group by an all-reduce of 64 KiB over all members; block until then.

    :param deadline: by ``time.monotonic()``.
    :raises RuntimeError: the result is wrong, or did not come by the deadline.
    """
    steps = torch.arange(PROBE_NBYTES // 8, dtype=torch.int64)
    tensor = steps * (group.rank + 1)
    group.all_reduce(tensor, "sum", deadline).wait()
    wrong = int((tensor != steps * (group.size * (group.size + 1) // 2)).sum())
    if wrong:
        raise RuntimeError(f"a test of the new process group gave {wrong} of {steps.numel()} wrong values")


def _set_nccl_environment(spec: GroupSpec) -> None:
    """Set environment variables of this process for NCCL.

    They turn torch's watchdog off and name the network interface (unless set). If the
    spec has ``NCCL_`` variables, those replace all such variables of the process.
    """
    os.environ.update(NCCL_ENVIRONMENT)
    if hasattr(_c10d, "set_debug_level"):
        _c10d.set_debug_level(_c10d.DebugLevel.OFF)
    if spec.nccl_env is not None:
        for name in [name for name in os.environ if name.startswith("NCCL_")]:
            del os.environ[name]
        os.environ.update(spec.nccl_env)
    interface = interface_of(spec.address)
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _allow_shared_device(store: Any, spec: GroupSpec, uuid: str) -> None:
    """If two ranks share a GPU (in tests), make them seem to be on two hosts to NCCL.

    Exchanges the ranks' GPUs over the store, and sets variables of this process.

    :param uuid: of this rank's GPU.
    """
    store.set(f"device/{spec.rank}", f"{boot_id()}/{uuid}")
    devices = [store.get(f"device/{rank}") for rank in range(spec.size)]
    if len(set(devices)) == len(devices):
        return
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and tuple(version[:2]) >= MULTI_RANK_VERSION:
        return  # such an NCCL allows shared GPUs
    os.environ["NCCL_HOSTID"] = f"replicas-{spec.prefix}-{spec.rank}"
    os.environ["NCCL_IB_DISABLE"] = "1"
