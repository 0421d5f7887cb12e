"""What the random calls of the public API are made of
(:mod:`tests.support.channel.calls`).

:data:`POOLS` names every public method and what may be drawn for each parameter;
:func:`unknown` finds what is missing there.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import replicas
from replicas import errors
from replicas.control.log_files import Selection
from replicas.coordinator import GroupShape
from replicas.messages.version_orders import Label, Promote

__all__ = ["JUNK", "MOVING", "POOLS", "SLOW", "Drawn", "stir", "unknown"]


class Raising:
    """Somebody else's object, of which everything raises."""

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError("mine")

    __index__ = __float__ = __repr__ = __str__ = __iter__ = __len__ = __bool__ = keys = items = _raise


class Drawn(RuntimeError):
    """What goes through as it is, where the user's code raises it."""


class Silent(Drawn):
    def __str__(self) -> str:
        raise ZeroDivisionError("mine")


class Odd(torch.Tensor):
    """A subclass with nothing of its own."""


class Wrapper(torch.Tensor):
    """A subclass without memory, of which everything raises."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's own signature misses func
        raise ZeroDivisionError("mine")


class Deaf(torch.Tensor):
    """A subclass with memory, and code of its own that raises."""

    @classmethod
    def __torch_function__(cls, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ZeroDivisionError("mine")


def resized(nbytes: int) -> torch.Tensor:
    """A tensor whose storage has another size now: 0 if it was freed."""
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(2)


MOVING = [torch.ones(2), torch.ones(3), torch.nn.Parameter(torch.ones(2)), torch.ones(1 << 18)]
"""Another thread frees, resizes and replaces their memory all the time
(:func:`stir`)."""


def stir(choose: random.Random, over: threading.Event) -> None:
    """Free, shrink, enlarge and replace the memory of tensors that are drawn, as
    offloading, sleep modes and EMA swaps do, in a thread."""
    shapes = [one.shape for one in MOVING]
    while not over.wait(choose.uniform(0, 0.002)):
        number = choose.randrange(len(MOVING))
        one, storage = MOVING[number], MOVING[number].untyped_storage()
        match choose.randrange(5):
            case 0:
                storage.resize_(0)
            case 1:
                storage.resize_(choose.choice((4, 4096, 1 << 21)))
            case 2:
                one.data = one.data.half() if one.dtype is torch.float32 and storage.nbytes() >= one.nbytes else one
            case _:
                one.data = torch.ones(shapes[number])


def walk(*steps: object) -> Iterator[object]:
    """What a generator of the user's gives; an exception is raised."""
    for step in steps:
        if isinstance(step, BaseException):
            raise step
        yield step


SURROGATE = os.fsdecode(b"caf\xe9")
NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, 2**31, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63, 2**64, 2**70, -(2**63), 10**400, True, False),
    *(0.0, -0.0, 0.01, 1.5, -1.5, 5e-324, 1e9, 1e10, 1e308, math.nan, math.inf, -math.inf, 1j),
    *(np.int64(3), np.uint64(2**64 - 1), np.float32(0.25), np.float64("nan"), np.bool_(True), np.complex64(1)),
    *(torch.tensor(3), torch.tensor(0.25), torch.tensor(True), torch.tensor([1, 2]), np.array([1, 2]), np.array([0.1])),
    torch.empty((), device="meta", dtype=torch.int64),
]
TEXTS: list[Any] = ["", "x", "a/b", "\n", "\0", "é€", SURROGATE, "y" * 300, "y" * 2_000_000, np.str_("policy"), b"x"]
THINGS: list[Any] = [None, [], (), {}, set(), [1], {"a": 1}, {1: 2}, object(), int, print, Raising(), Silent(), ...]
JUNK = [*NUMBERS, *TEXTS, *THINGS]

ONE = torch.ones(1)
TENSORS: list[Any] = [
    *(
        torch.ones(2),
        torch.ones(2, 3),
        torch.ones(0),
        torch.tensor(1.0),
        torch.ones(2).double(),
        torch.ones(2).to(torch.int8),
    ),
    *(ONE.expand(3), torch.ones(4).as_strided((3, 2), (1, 1)), torch.ones(6).view(2, 3).t(), torch.ones(4)[::2]),
    *(torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag, torch.ones(2, requires_grad=True)),
    *(
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2).bool(),
    ),
    *(torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Odd), torch.nn.UninitializedParameter()),
    torch.nested.nested_tensor([ONE, torch.ones(2)], layout=torch.jagged),
    *(resized(0), resized(4), fake(), Wrapper(), torch.ones(2).as_subclass(Deaf)),
    torch._to_functional_tensor(torch.ones(2)),
    torch.zeros(2, dtype=torch.cfloat).conj(),
    *MOVING,
]
LISTS = [
    *([one] for one in TENSORS),
    *([torch.ones(2), one] for one in TENSORS),
    [torch.ones(2)] * 2,
    [torch.ones(1)] * 3,
    [1],
    [torch.ones(2), None],
    Raising(),
    "ab",
]
WEIGHTS: list[Callable[[], Any]] = [
    lambda: torch.nn.Linear(2, 2),
    lambda: torch.nn.LazyLinear(2),
    lambda: {SURROGATE: torch.ones(2)},
    lambda: {np.str_("w"): torch.ones(2)},
    lambda: {"n" * 100_000: torch.ones(2)},
    lambda: {1: torch.ones(2)},
    lambda: {"__metadata__": torch.ones(2)},
    dict,
    lambda: walk(("w", torch.ones(2)), ("w", torch.ones(2))),
    lambda: walk(("w", torch.ones(2)), Drawn("y" * 2_000_000)),
    lambda: walk(("w", torch.ones(2)), Drawn(SURROGATE)),
    lambda: walk(("w", torch.ones(2)), Silent()),
    lambda: walk(Silent()),
    lambda: walk(1, ("w",), None),
    lambda: walk(("w", None), (None, torch.ones(2))),
    lambda: walk(),
    lambda: {f"t{number}": one for number, one in enumerate(MOVING)},
    lambda: dict(zip(("v", "w"), [torch.zeros(3)[:2], *MOVING], strict=False)),
    lambda: [("w", replicas.Shard(torch.ones(2), (0,), (4,)))],
    *(lambda one=one: {"w": one, "v": torch.ones(2)} for one in TENSORS),
    *(lambda one=one: walk(("v", torch.ones(2)), ("w", one)) for one in TENSORS),
]
META: list[Any] = [
    {"seed": 2**70},
    {"a": SURROGATE},
    {SURROGATE: 1},
    {"a": np.float32(1)},
    {"a": torch.tensor(3)},
    {"a": [1, "b", None]},
    {"a": {"b": 1}},
    {"a": {"b": {}}},
    {"a": "y" * 2_000_000},
    {"a": math.nan},
    {"a": Raising()},
    {np.str_("a"): np.str_("b")},
    [("a", 1)],
    {"a": b"x"},
    lambda: {"a": 1},
    lambda: {"a": SURROGATE},
    lambda: 3,
    lambda: list(walk(Drawn("y" * 2_000_000))),
]
ERRORS = [Drawn("y" * 2_000_000), Drawn(SURROGATE), Silent(), KeyboardInterrupt(), errors.PeersLost("x", version=2**70)]
PEERS = [
    "peer/1",
    "peer/1/0",
    "peer/0",
    "peer/9",
    "peer/1/7",
    "peer/00001",
    "peer/٣",
    f"{SURROGATE}/1",
    "peer/1\n",
    "a/b/c/d",
]
CHANNELS = [
    {"c": {"sources": ["a"], "slots": 1}},
    {"c": {"sources": ["a"], "deadline": 1e10}},
    {"c": {"peers": ["a"], "slots": 10**30}},
    {"c": {"sources": ["a"], "min_targets": "x"}},
    {"c": {"sources": [1]}},
    {SURROGATE: {"peers": ["a"]}},
    {"c": Raising()},
    {"c": {}},
]

Pool = list[Any]
_VERSIONS = [1, 2, "current", "previous", "best"]
POOLS: dict[str, dict[str, Pool]] = {
    "join": {
        "channel": ["outer"],
        "endpoint": ["127.0.0.1:1", "127.0.0.1", "::1:80", "[::1", "h:٨٠"],
        "token": ["wrong", "geh€im"],
        "run": ["other"],
        "group": ["nobody"],
        "replica": [1, 2],
        "rank": [0, 1],
        "world_size": [1, 2],
        "observe": [True],
        "info": [{"url": "x"}, {"url": 1}, {1: "x"}, {"url": "y" * 5000}, {"url": SURROGATE}],
        "timeout": [0.2, 5],
    },
    "Channel.publish": {
        "weights": [*WEIGHTS, *TENSORS],
        "version": [3, 10**6],
        "dtype": [torch.bfloat16, torch.int8, torch.float8_e4m3fn, float],
        "meta": META,
        "new_manifest": [True],
        "adapter": ["a"],
        "deadline": [0.2],
        "hold": [False],
        "check_finite": [True],
    },
    "follow": {
        "archive": ["memory://", "file:///nowhere", "s3://user:secret@bucket", "x"],
        "channel": ["policy", "..", ""],
        "key": [None, "ed25519:", f"ed25519:{'0' * 64}"],
        "at_least": [1, ("step", 3)],
        "version": [1, "current", ""],
        "timeout": [0.1],
    },
    "Channel.fence": {"stream": []},
    "Channel.reserve": {"weights": [*WEIGHTS, *TENSORS], "dtype": [torch.bfloat16, float], "slots": [1, 2, 99]},
    "Channel.arena_like": {
        "weights": [*WEIGHTS, *TENSORS],
        "dtype": [torch.bfloat16, torch.int8, float],
        "deadline": [0.2],
    },
    "Channel.receive": {
        "deadline": [0.2],
        "at_least": [("step", 3), ("step", math.nan), (1, 2), ("step",), (SURROGATE, 1)],
    },
    "Channel.committed": {"after": [], "deadline": [0.01]},
    "Channel.loaded": {"version": [], "deadline": [0.01]},
    "Channel.progress": {"step": []},
    "Channel.close": {"wait": [True, False]},
    **{
        f"Channel.{kind}": {
            name: {
                "tensors": [*TENSORS, *LISTS],
                "out": [*LISTS, *TENSORS],
                "op": ["min", "mean", "product"],
                "src": PEERS,
                "dst": PEERS,
            }.get(name, [])
            for name in (*names, "step", "deadline")
        }
        for kind, names in {
            "all_reduce": ("tensors", "op"),
            "broadcast": ("tensors", "src"),
            "reduce": ("tensors", "dst", "op"),
            "all_gather": ("tensors", "out"),
            "gather": ("tensors", "dst", "out"),
            "scatter": ("tensors", "src", "out"),
            "reduce_scatter": ("tensors", "op", "out"),
            "send": ("tensors", "dst"),
            "recv": ("tensors", "src"),
            "barrier": (),
        }.items()
    },
    "Pending.wait": {"timeout": [0.001]},
    "Pending.done": {},
    "Receipt.metrics": {"prefix": []},
    "Update.load_into": {"model": [*WEIGHTS, *({"w": one} for one in TENSORS)], "changed_only": [False, True]},
    "Update.report": {"scores": [1.0, -2, float("nan"), "high", None]},
    "Update.adopt": {"whole": [False, True]},
    "Update.changes": {},
    "Update.failed": {"error": ERRORS},
    "Update.refuse": {"error": ERRORS},
    "Update.loaded": {},
    "Update.tensors": {},
    "Update.unadopted": {},
    "Shard": {
        "tensor": TENSORS,
        "offsets": [(0,), (0, 0), (-1,), (9,), (0.5,), (2**70,)],
        "shape": [(4,), (2, 3), (0.5,), (2**70,)],
    },
    "Coordinator": {
        "channels": CHANNELS,
        "groups": [{"rollout": 2}, {"rollout": GroupShape(heartbeat_timeout_s=math.nan)}, {1: 1}],
        "run": [],
        "host": ["::1", "localhost"],
        "port": [65536],
        "any_port": [True],
        "store_bind": ["::1"],
        "store_port": [-1],
        "carry_port": [65536, 7100],
        "token": ["geh€im"],
        "tls": ["on", "off", "tls"],
        "certificate": ["no such file", "a\0b"],
        "key": ["no such file"],
        "state_dir": ["a\0b"],
        "epochs": [{"policy": 3}, {"policy": -1}],
        "routes": [[1]],
        "live": [7],
    },
    "Supervisor": {"config": [*CHANNELS, "no such file", "a\0b", {"schema_version": 1}], "report": []},
    "Versions.promote": {"version": _VERSIONS, "deadline": [0.01]},
    "Versions.label": {
        "label": ["mine", "current", ""],
        "version": ["", *_VERSIONS],
        "move": [True],
        "deadline": [0.01],
    },
    "Versions.score": {"version": _VERSIONS, "scores": [{"a": 1.0}, {"a": float("nan")}, {}], "deadline": [0.01]},
    "Versions.reject": {"version": _VERSIONS, "why": ["", "it is bad"], "deadline": [0.01]},
    "Versions.rollback": {"to": _VERSIONS, "deadline": [0.01]},
    "Versions.hold": {"version": _VERSIONS, "seconds": [0.01, 60], "name": ["", "mine"], "deadline": [0.01]},
    "Versions.release": {"name": ["mine", "lease-1"], "deadline": [0.01]},
    "Versions.read": {"version": _VERSIONS},
    "Supervisor.steer": {"order": [Promote(channel="policy"), Label(channel="policy", label="best", version="1")]},
    "Supervisor.scale": {"group": ["idle"], "replicas": [1, 2]},
    "Supervisor.restart": {"target": ["idle/0", "idle/7", "idle/" + "9" * 5000], "rolling": [True]},
    "Supervisor.drain": {"target": ["idle/7", "idle/x"], "hurry": [True]},
    "Supervisor.drain_node": {"node": ["nowhere", "x" * 5000], "undo": [True]},
    "Supervisor.read_logs": {"selection": [Selection(), Selection(target="idle/7")]},
    "Supervisor.reset_failed": {"target": ["idle", "idle/0"]},
    "Supervisor.stacks": {"target": ["idle/7"]},
    "Supervisor.doctor": {"node": ["nowhere", "x" * 5000]},
    "Supervisor.tokens": {"role": ["member", "nobody"], "rotate": [True], "revoke_old": [True], "force": [True]},
    "Supervisor.wait_ready": {"group": ["idle"], "timeout": [0.01]},
    "Supervisor.reload": {"config": [*CHANNELS, "no such file", "a\0b", {"schema_version": 1}]},
    "Supervisor.events": {"after": [0]},
}
"""What may be drawn for each parameter of each public method, beside :data:`JUNK`.
Functions make a value anew."""

NOT_CALLED = {
    "Receipt.of": "makes one of a message",
    "Update.withdraw": "for the receiver",
    "Channel": "join makes it",
    "Pending": "a call makes it",
    "Update": "a receive makes it",
    "Versions": "a channel has them",
    "Lease": "an order makes it",
    "Lease.wait": "as Pending.wait",
    "Receipt": "a publish makes it",
    "Change": "an update makes it",
    "Member": "a value, like a tuple",
    **dict.fromkeys(
        (
            f"Supervisor.{name}"
            for name in (
                "check_plan",
                "emit",
                "environment",
                "live",
                "metrics_text",
                "save",
                "say",
                "scrape",
                "spawn",
                "status",
                "told",
            )
        ),
        "takes nothing, or is for the supervisor's own parts",
    ),
    **dict.fromkeys(("Supervisor.detach", "Supervisor.preempt", "Supervisor.run_until_done"), "ends the run"),
    **dict.fromkeys((f"Coordinator.{name}" for name in ("in_thread", "start", "close")), "takes nothing"),
    **dict.fromkeys(
        (
            f"Coordinator.{name}"
            for name in (
                "busy",
                "waits",
                "channel_statuses",
                "expect",
                "forget",
                "joined",
                "progress",
                "readiness",
                "refused",
                "replica_ended",
                "set_draining",
                "set_group",
                "sidecar_replacements",
                "store_started",
                "store_status",
                "subscribe",
            )
        ),
        "for the supervisor",
    ),
}
"""What is public by its name, and not drawn: why."""
SLOW = ("Supervisor.", "join", "follow", "Coordinator", "Channel.close", "Channel.arena_like")
"""Drawn a tenth as often: they take longer than all others."""


def unknown() -> set[str]:
    """Public methods, and their parameters, for which nothing is said here; and what is
    said of none."""
    found: set[str] = set()
    for name in replicas.__all__:
        thing = getattr(replicas, name)
        if inspect.isfunction(thing) or (inspect.isclass(thing) and name not in NOT_CALLED):
            found |= _named(name, thing)
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, inspect.isroutine):
                full = f"{name}.{method}"
                if not method.startswith("_") and full not in NOT_CALLED:
                    found |= _named(full, function)
    said = {f"{name}({parameter})" for name, pools in POOLS.items() for parameter in pools} | set(POOLS)
    return found ^ said


def _named(name: str, function: Callable[..., Any]) -> set[str]:
    return {name} | {f"{name}({one})" for one in inspect.signature(function).parameters if one != "self"}
