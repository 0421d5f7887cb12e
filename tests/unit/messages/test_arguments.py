"""Arguments in their wire form: what is taken as what, and what is refused by its
name.

Covers: messages/arguments.py.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import replicas
from replicas import errors
from replicas.coordinator.limits import size_problem
from replicas.messages import MemberFrame, PublishBegin, WireError, arguments, decode_member_frame, encode
from replicas.messages.bounds import META_NBYTES, TEXT_LENGTH, VERSION_MAX, text_of


class Raising:
    """Somebody else's object, of which everything raises."""

    def _raise(self, *_: object) -> Any:
        raise ZeroDivisionError("mine")

    __index__ = __float__ = __repr__ = __str__ = __iter__ = __len__ = _raise


def repr_of(value: object) -> str:
    return type(value).__name__


def refused(what: str, function: Any, *given: Any, **more: Any) -> None:
    with pytest.raises(errors.UsageError, match=what):
        function(what, *given, **more)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3], dtype=torch.int8)])
def test_whole_numbers_of_every_library(value: object) -> None:
    found = arguments.integer("step", value)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        *(3.0, True, np.bool_(True), torch.tensor(True), "3", None, 2**62 + 1, np.float32(3), Raising(), [3]),
        *(10**5000, torch.empty((), device="meta", dtype=torch.int64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_whole_number(value: object) -> None:
    refused("step", arguments.integer, value)


def test_a_range_is_named() -> None:
    refused("version", arguments.integer, 0, least=1, most=VERSION_MAX)
    refused("version", arguments.integer, VERSION_MAX + 1, least=1, most=VERSION_MAX)
    assert arguments.integer("version", VERSION_MAX, least=1, most=VERSION_MAX) == VERSION_MAX


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int16(2), torch.tensor(2.0)])
def test_seconds_of_every_library(value: object) -> None:
    assert arguments.seconds("deadline", value) == 2.0
    assert arguments.patience("timeout", value) == 2.0


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 1e10, 10**400, "2", True, 1j, np.complex64(1), [2.0], np.array([2.0]), Raising()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_finite_time(value: object) -> None:
    refused("deadline", arguments.seconds, value)
    refused("timeout", arguments.patience, value)


def test_deadlines_are_to_come_and_waits_may_be_over() -> None:
    for value in (0, -1.0):
        refused("deadline", arguments.seconds, value)
        assert arguments.patience("timeout", value) == 0.0
    assert arguments.patience("timeout", None) is None
    assert arguments.seconds("timeout", 0, zero=True) == 0.0


def test_bounds_are_numbers_or_keys_with_numbers() -> None:
    assert arguments.bound("at_least", None) == (0, "")
    assert arguments.bound("at_least", np.int64(3)) == (3, "")
    assert arguments.bound("at_least", ("step", torch.tensor(3))) == (3, "step")
    assert arguments.bound("at_least", ["loss", np.float32(-0.5)]) == (-0.5, "loss")


@pytest.mark.parametrize(
    "value",
    [
        *(
            -1,
            1.5,
            "step",
            True,
            VERSION_MAX + 1,
            (),
            ("step",),
            ("step", 1, 2),
            ("", 1),
            (3, 1),
            ("step", "1"),
            Raising(),
        ),
        *(("step", True), ("step", None), ("step", math.nan), ("step", math.inf), ("step", Raising()), ("\ud800", 1)),
    ],
    ids=repr_of,
)
def test_what_is_no_bound(value: object) -> None:
    refused("at_least", arguments.bound, value)


def test_flags() -> None:
    assert arguments.flag("hold", np.bool_(True)) is arguments.flag("hold", 1) is True
    assert arguments.flag("hold", torch.tensor(False)) is False
    for value in ("no", 2, None, Raising(), np.array([True, False]), 1.0):
        refused("hold", arguments.flag, value)


def test_meta_is_what_any_process_can_have() -> None:
    given = {
        "step": np.int64(7),
        "loss": np.float32(0.5),
        "lr": torch.tensor(0.25),
        "seen": torch.tensor(9),
        "ok": np.bool_(True),
        np.str_("tag"): np.str_("a"),
        "none": None,
        "list": (1, np.float64(2.0), "x"),
        "dict": {"a": 2**64 - 1},
    }
    found = arguments.meta("meta", given)
    wanted = {"step": 7, "loss": 0.5, "lr": 0.25, "seen": 9, "ok": True, "tag": "a", "none": None}
    assert found == {**wanted, "list": [1, 2.0, "x"], "dict": {"a": 2**64 - 1}}
    message = PublishBegin(1, None, 1.0, meta=found)
    assert decode_member_frame(encode(MemberFrame(1, 0, message))).body == message
    assert arguments.meta("meta", None) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"name": os.fsdecode(b"caf\xe9")},
        {"list": [os.fsdecode(b"caf\xe9")]},
        {os.fsdecode(b"caf\xe9"): 1},
        {1: 2},
        {"deep": {"deeper": {"deepest": 1}}},
        {"tensor": torch.ones(3)},
        {"bytes": b"x"},
        {"odd": Raising()},
        {"complex": 1j},
        {"list": [[1]]},
        {"date": np.datetime64("2026-01-01")},
        {"big": "x" * (META_NBYTES - 5)},
        {"many": list(range(400_000))},
        [1, 2],
        "text",
        7,
        Raising(),
    ],
    ids=lambda value: str(next(iter(value), "")) if isinstance(value, dict) else type(value).__name__,
)
def test_what_cannot_travel_is_refused_by_its_name(value: object) -> None:
    refused("meta", arguments.meta, value)


@pytest.mark.parametrize("number", [math.nan, math.inf, np.float32("-inf"), torch.tensor(math.nan)], ids=str)
def test_a_number_that_json_lacks_is_refused_with_its_key(number: object) -> None:
    for value, key in (
        ({"loss": number}, "['loss']"),
        ({"a": [1, number]}, "['a'][1]"),
        ({"a": {"b": number}}, "['a']['b']"),
    ):
        with pytest.raises(errors.UsageError) as caught:
            arguments.meta("meta", value)
        assert caught.value.message == f"meta{key} is {float(number)}, which JSON has no number for"  # type: ignore[arg-type]  # each has one
        assert 'pass None or a text such as "nan"' in caught.value.hint


def test_the_largest_meta_is_taken_at_the_other_side() -> None:
    message = PublishBegin(2**62, 2**53, 1e9, meta=arguments.meta("meta", {"m": "x" * (META_NBYTES - 16)}))
    data = encode(MemberFrame(2**62, 2**62, message))
    assert size_problem(data) is None
    assert decode_member_frame(data).body == message


def test_names_endpoints_and_tokens() -> None:
    assert arguments.name("group", np.str_("rollout")) == "rollout"
    for value in ("", "a/b", "a\n", "x" * 129, os.fsdecode(b"\xe9"), 3, None):
        refused("group", arguments.name, value)
    for good in ("127.0.0.1:9477", "[::1]:80", "my_host.local:1"):
        assert arguments.endpoint("endpoint", good) == good
    for bad in (
        "host",
        "host:",
        "host:0",
        "host:65536",
        ":80",
        "a b:80",
        "h\n:80",
        "::1:80",
        "a/b:80",
        "h:٨٠",
        80,
        "u@h:1",
    ):
        refused("endpoint", arguments.endpoint, bad)
    assert arguments.token("token", "s3cret") == "s3cret"
    for secret in ("", "geh€im", "a\nb", "x" * 5000, " geheim", 7):
        with pytest.raises(errors.UsageError) as caught:
            arguments.token("token", secret)
        assert not str(secret).strip() or str(secret) not in str(caught.value) or secret == 7
    assert arguments.texts("info", {"url": np.str_("http://h")}) == {"url": "http://h"}
    for info in (
        {"url": 1},
        {1: "x"},
        {"url": os.fsdecode(b"\xe9")},
        {"url": "x" * 5000},
        7,
        dict.fromkeys(map(str, range(999)), ""),
    ):
        refused("info", arguments.texts, info)


# ------------------------------------------------------------ errors of others


class Mine(errors.PeersLost):
    """A program's own kind of error, which has its own ways."""

    def __init__(self) -> None:
        Exception.__init__(self, "mine")
        self.message = Raising()  # type: ignore[assignment]
        self.channel, self.phase, self.hint = os.fsdecode(b"caf\xe9"), "y" * 10_000, "z" * 10**6
        self.version = np.int64(3)  # type: ignore[assignment]
        self.members = tuple("m" * 10_000 for _ in range(10_000))
        self.unanimous = "yes"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error",
    [
        errors.SyncError("y" * 2_000_000),
        errors.SyncError(os.fsdecode(b"caf\xe9")),
        errors.SyncError(7, version=2**70),  # type: ignore[arg-type]
        Mine(),
    ],
    ids=["long", "odd", "no text", "odd kind"],
)
def test_any_error_travels(error: errors.ReplicasError) -> None:
    wire = WireError.of(error)
    assert len(msgspec.msgpack.encode(wire)) < 2**20 - 2**12
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WireError) == wire
    assert type(wire.exception()) is (errors.PeersLost if isinstance(error, Mine) else errors.SyncError)


def test_a_text_is_cut_and_clean() -> None:
    assert text_of("x") == "x"
    assert text_of("x" * (TEXT_LENGTH + 7)).endswith("x ... and 7 characters more")
    assert text_of(os.fsdecode(b"caf\xe9")) == r"caf\udce9"
    assert "ZeroDivisionError" in text_of(Raising())


@pytest.mark.parametrize(
    ("method", "given", "hint"),
    [
        (replicas.Channel.receive, {"timeout": 5}, "it takes: deadline, at_least"),
        (replicas.Channel.barrier, {"timeout": 5}, "it takes: .*deadline"),
        (replicas.Pending.wait, {"deadline": 5}, "it takes: timeout"),
    ],
)
def test_a_keyword_of_another_method_is_refused_with_those_that_there_are(method: Any, given: Any, hint: str) -> None:
    (wrong,) = given
    with pytest.raises(errors.UsageError, match=f"^{method.__qualname__} takes no {wrong} ") as caught:
        method(None, **given)
    assert re.fullmatch(hint, caught.value.hint or "")
