"""Arbitrary messages of a member that holds the token and follows no rule."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from replicas import messages as wire
from replicas.messages.identity import ProcessIdentity
from replicas.messages.version_orders import VersionOrder
from tests.support.channel_world import MANIFEST

__all__ = ["any_hello", "any_message"]

_TEXTS = st.sampled_from(
    [
        "",
        "1",
        "candidate",
        "previous",
        "0f" * 32,
        "trainer/0",
        "rollout/0/0",
        "peer/1/0",
        "1.1",
        "2.1",
        "3.2",
        MANIFEST.hash,
        "digest-1",
        "cpu",
    ]
)
_ERRORS = st.builds(wire.WireError, kind=st.sampled_from(["SyncError", "Fenced", "no such"]), message=_TEXTS)
_SEGMENTS = st.builds(wire.Segment, dtype=_TEXTS, shape=st.tuples(st.integers(0, 4)))
_TAME_FLOATS = st.floats(0.0, 100.0)
_TAME_INTEGERS = st.integers(0, 5)
_WILD_INTEGERS = st.integers(-(2**63), 2**64 - 1)


def _places(integers: st.SearchStrategy[int]) -> st.SearchStrategy[wire.SlotPlace]:
    return st.builds(wire.SlotPlace, pid=integers, fd=integers, inode=integers, nbytes=integers, serial=integers)


def _field(name: str, wild: bool) -> st.SearchStrategy[Any]:
    """Values for a field, by its name: the same names mean the same in all messages."""
    integers = _WILD_INTEGERS if wild else _TAME_INTEGERS
    known: dict[str, st.SearchStrategy[Any]] = {
        "process": st.just(ProcessIdentity(1, 1, "elsewhere", 1)),
        "held": st.just(()),
        "lent": st.lists(integers, max_size=3).map(tuple),
        "beacon": st.builds(wire.Beacon, pid=integers, fd=integers, nonce=_TEXTS, uid=integers),
        "place": _places(integers),
        "info": st.just({}),
        "nccl_env": st.just({}),
        "cuda_devices": st.just(()),
        "observe": st.booleans(),
        "error": _ERRORS,
        "meta": st.dictionaries(_TEXTS, st.none() | st.booleans() | st.integers(0, 9)),
        "data": st.sampled_from([b"", b"nonsense", MANIFEST.encode(), MANIFEST.encode()[:-3]]),
        **dict.fromkeys(("given_up", "wrong", "holders"), st.dictionaries(_TEXTS, _TEXTS, max_size=3)),
        "segments": st.lists(_SEGMENTS, max_size=3).map(tuple),
        "links": st.lists(st.tuples(_TEXTS, _TEXTS), max_size=2).map(tuple),
        "held_up": st.lists(_TEXTS, max_size=2).map(tuple),
        "kind": st.sampled_from(get_args(wire.OperationKind)),
        "reduce_op": st.sampled_from(get_args(wire.ReduceOp)),
        "applied": st.lists(_TEXTS, max_size=2).map(tuple),
        "unsettled": st.lists(_TEXTS, max_size=2).map(tuple),
        "outcome": st.sampled_from(["applied", "ready", "failed"]),
        "scores": st.dictionaries(_TEXTS, st.floats(-9.0, 9.0), min_size=1, max_size=3),
        "step": st.none() | integers if name == "step" else integers,
    }
    return known.get(name, integers)


def _types(found: Any) -> tuple[Any, ...]:
    """The types of a union, or that type, without their limits."""
    parts = get_args(found) if isinstance(found, UnionType) or get_origin(found) is Union else (found,)
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in parts)


def _strategy(kind: type[msgspec.Struct], wild: bool) -> st.SearchStrategy[Any]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(kind):
        types = _types(field.type)
        if field.name == "order":
            fields["order"] = st.one_of([_strategy(order, wild=False) for order in get_args(VersionOrder)])
        elif float in types:
            fields[field.name] = st.floats() if wild else _TAME_FLOATS
        elif bool in types:
            fields[field.name] = st.booleans()
        elif str in types and len(types) == 1:
            fields[field.name] = _TEXTS
        elif field.name == "received" and get_origin(types[0]) is dict:
            fields[field.name] = st.dictionaries(_TEXTS, _WILD_INTEGERS if wild else _TAME_INTEGERS, max_size=3)
        elif type(None) in types:
            fields[field.name] = st.none() | _field(field.name, wild)
        else:
            fields[field.name] = _field(field.name, wild)
    if kind is wire.CarrierUp:
        fields["certificate_hash"] = st.sampled_from(["", "0f" * 32])
    if kind is wire.Progress:
        fields["step"] = _WILD_INTEGERS if wild else _TAME_INTEGERS
    return st.builds(kind, **fields)


def any_message(*, wild: bool = False) -> st.SearchStrategy[Any]:
    """Well-formed messages of every kind. ``wild``: with any number that can be
    encoded; else with small ones."""
    kinds = [kind for kind in get_args(wire.FromMember) if wild or kind not in (wire.Hello, wire.Heartbeat, wire.Bye)]
    return st.one_of([_strategy(kind, wild) for kind in kinds])


def any_hello() -> st.SearchStrategy[wire.Hello]:
    """Hellos of members of a channel, which may lie about everything else."""
    names = {
        "group": st.sampled_from(["trainer", "rollout", "stranger"]),
        "channel": st.just("policy"),
        "run": st.just("run"),
        "protocol": st.just(wire.PROTOCOL),
        "incarnation": st.sampled_from(["a", "b", "c"]),
        "held": st.lists(st.builds(wire.HeldVersion, version=_TAME_INTEGERS, digest=_TEXTS), max_size=3).map(tuple),
        "latest_digest": _TEXTS,
        **dict.fromkeys(("replica", "rank", "world_size"), st.integers(-1, 3)),
        **dict.fromkeys(("generation", "resume_term", "received", "loaded"), _TAME_INTEGERS),
        **dict.fromkeys(("epoch", "latest", "assigned", "publishes"), _TAME_INTEGERS),
        "process": st.just(ProcessIdentity(1, 1, "elsewhere", 1)),
        "observe": st.booleans(),
        "torch_version": _TEXTS,
        "nccl_version": _TEXTS,
        "nccl_env": st.dictionaries(_TEXTS, _TEXTS, max_size=2),
        "cuda_devices": st.lists(_TEXTS, max_size=2).map(tuple),
    }
    return st.builds(wire.Hello, **names)
