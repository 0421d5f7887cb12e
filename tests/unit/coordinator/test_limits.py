"""What a connection may do: sizes, values, the share of the loop; and any bytes
whatever as a frame.

Covers: common/decoding.py, coordinator/channel_status.py, coordinator/limits.py,
messages/bounds.py, messages/from_member.py, messages/hello.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from replicas import messages as wire
from replicas.coordinator import channel_status, limits
from replicas.coordinator.limits import RateLimit, hello_problem, size_problem
from replicas.errors import SyncError
from replicas.messages.bounds import HELLO_NBYTES, OPERATION_NBYTES, VERSION_MAX
from replicas.messages.identity import ProcessIdentity
from tests.support.channel.hostile import any_hello, any_message
from tests.support.channel_world import World

HELLO = wire.Hello(
    protocol=wire.PROTOCOL,
    run="run",
    channel="policy",
    group="rollout",
    replica=0,
    rank=0,
    world_size=1,
    incarnation="nonce",
    generation=1,
    process=ProcessIdentity(1, 1, "boot", 1),
)


def frame(body: wire.FromMember, seq: int = 1) -> bytes:
    return wire.encode(wire.MemberFrame(seq, 0, body))


def problem_of(body: wire.FromMember) -> str | None:
    """Why it is refused as it is decoded, without the place of its field."""
    try:
        assert wire.decode_member_frame(frame(body)).body == body
    except msgspec.DecodeError as error:
        return str(error).replace("$[2].", "")
    return None


# ------------------------------------------------------------ sizes


def test_only_the_shapes_of_an_operation_may_be_large() -> None:
    many = wire.OperationPost(1, "all_reduce", (wire.Segment("float32", (1,)),) * 50_000, 1.0)
    assert 2**20 < len(frame(many)) < OPERATION_NBYTES
    assert size_problem(frame(many)) is None
    assert size_problem(frame(wire.Bye("x" * 2**21))) == "message: 2,097,177 bytes exceed the limit of 1,048,576"
    assert size_problem(frame(wire.Bye("x" * 2**21 + "\xa4type\xadOperationPost"))) is not None
    huge = msgspec.structs.replace(many, segments=many.segments * 5)
    assert str(size_problem(frame(huge))).startswith("OperationPost: ")


def test_a_hello_is_small() -> None:
    assert size_problem(frame(HELLO), first=True) is None
    long = msgspec.structs.replace(HELLO, info={"a": "x" * HELLO_NBYTES})
    assert size_problem(frame(long), first=True) == f"message: {len(frame(long)):,} bytes exceed the limit of 262,144"


# ------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"rank": -1}, None),  # the roster says what is wrong with it
        ({"group": "a/b"}, "'a/b' is not a valid group name"),
        ({"channel": ""}, "'' is not a valid channel name"),
        ({"incarnation": "a\nb"}, "'a\\nb' is not a valid incarnation name"),
        ({"incarnation": "x" * 1000}, f"'{'x' * 128}' is not a valid incarnation name"),
        ({"world_size": 10**9}, "Hello: Expected `int` <= 1000000 - at `world_size`"),
        ({"received": -1}, "Hello: Expected `int` >= 0 - at `received`"),
        ({"process": ProcessIdentity(2**40, 1, "boot", 1)}, "Hello: Expected `int` <= 2147483647 - at `process.pid`"),
        (
            {"process": ProcessIdentity(1, 1, "x" * 129, 1)},
            "Hello: Expected `str` of length <= 128 - at `process.boot_id`",
        ),
        ({"info": {str(i): "" for i in range(1000)}}, "Hello: Expected `object` of length <= 512 - at `info`"),
        ({"proof": "x" * 1000}, "Hello: Expected `str` of length <= 128 - at `proof`"),
        ({"info": {"url": "x" * 5000}}, "Hello: Expected `str` of length <= 4096 - at `info[...]`"),
        ({"info": {"url": "é" * 4000}}, None),
        ({"info": {"url": "é" * 4096}}, "its info: 8,200 bytes exceed the limit of 8,192"),
        ({"info": {str(i): "x" * 40 for i in range(200)}}, "its info: 9,093 bytes exceed the limit of 8,192"),
        (
            {"nccl_env": {f"NCCL_{i}": "x" * 4000 for i in range(20)}},
            "its NCCL variables: 80,213 bytes exceed the limit of 65,536",
        ),
        ({"cuda_devices": ("GPU",) * 65}, "Hello: Expected `array` of length <= 64 - at `cuda_devices`"),
        ({"torch_version": "x" * 20_000}, "Hello: Expected `str` of length <= 4096 - at `torch_version`"),
        ({"latest_digest": "x" * 129}, "Hello: Expected `str` of length <= 128 - at `latest_digest`"),
        ({"held": (wire.HeldVersion(1, "x" * 129),)}, "Hello: Expected `str` of length <= 128 - at `held[0].digest`"),
        ({"held": (wire.HeldVersion(-1, ""),)}, "Hello: Expected `int` >= 0 - at `held[0].version`"),
        ({"held": (wire.HeldVersion(1, ""),) * 257}, "Hello: Expected `array` of length <= 256 - at `held`"),
        ({"lent": (-1,)}, "Hello: Expected `int` >= 0 - at `lent[0]`"),
        ({"beacon": wire.Beacon(1, 1, "", 1, "x" * 129)}, "Hello: Expected `str` of length <= 128 - at `beacon.door`"),
    ],
)
def test_what_a_hello_may_say(change: dict[str, object], problem: str | None) -> None:
    hello = msgspec.structs.replace(HELLO, **change)
    assert (problem_of(hello) or hello_problem(hello)) == problem


NO_SHA256 = r"CarrierUp: Expected `str` matching regex '\\A([0-9a-f]{64})?\\Z' - at `certificate_hash`"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (wire.PublishBegin(1, None, 30.0), None),
        (wire.PublishBegin(1, -3, -0.5), None),  # the user's number, and a deadline that has passed
        (wire.PublishBegin(1, VERSION_MAX, 1.0), None),
        (wire.PublishBegin(1, VERSION_MAX + 1, 1.0, resumed=True), None),  # the library counted on
        (wire.PublishBegin(1, 2**62, 1.0), f"PublishBegin: Expected `int` <= {2**54} - at `version`"),
        (wire.PublishBegin(1, None, math.nan), "PublishBegin: Expected `float` >= -1000000000.0 - at `deadline_s`"),
        (wire.PublishBegin(1, None, math.inf), "PublishBegin: Expected `float` <= 1000000000.0 - at `deadline_s`"),
        (wire.PublishBegin(-1, None, 1.0), "PublishBegin: Expected `int` >= 0 - at `publish`"),
        (wire.Loaded(2**63, 0.0), f"Loaded: Expected `int` <= {2**62} - at `version`"),
        (wire.Loaded(1, -1.0), "Loaded: Expected `float` >= 0.0 - at `load_s`"),
        (wire.CanLoad(2**63), f"CanLoad: Expected `int` <= {2**62} - at `version`"),
        (wire.CanLoad(1, whole=True), None),
        (
            wire.Filled(1, 0.0, "d", 0.0, wire.SlotPlace(1, 1, 1, -5, 1)),
            "Filled: Expected `int` >= 0 - at `place.nbytes`",
        ),
        (wire.OperationPost(1, "all_reduce", (), 1.0, step=-1), None),
        (
            wire.OperationPost(1, "all_reduce", (wire.Segment("float32", (-2,)),), 1.0),
            "OperationPost: Expected `int` >= 0 - at `segments[0].shape[0]`",
        ),
        (
            wire.OperationPost(1, "all_reduce", (wire.Segment("float32", (1,) * 65),), 1.0),
            "OperationPost: Expected `array` of length <= 64 - at `segments[0].shape`",
        ),
        (
            wire.OperationPost(1, "all_reduce", (wire.Segment("x" * 200, (1,)),), 1.0),
            "OperationPost: Expected `str` of length <= 128 - at `segments[0].dtype`",
        ),
        (wire.Heartbeat(), None),
        (wire.CarrierUp(65_535, "0f" * 32), None),
        (wire.CarrierUp(0), None),
        (wire.TransferDone(1, "d", 1.0, 1.0, None, {"trainer/0/0": 5}), None),
        (
            wire.TransferDone(1, "d", 1.0, 1.0, None, {"trainer/0/0": -5}),
            "TransferDone: Expected `int` >= 0 - at `received[...]`",
        ),
        (
            wire.TransferFailed(1, wire.WireError("SyncError", ""), {str(one): "" for one in range(65)}),
            "TransferFailed: Expected `object` of length <= 64 - at `holders`",
        ),
        (
            wire.TransferDone(1, "d", 1.0, 1.0, wrong={"trainer/0/0": "x" * 5000}),
            "TransferDone: Expected `str` of length <= 4096 - at `wrong[...]`",
        ),
        (
            wire.TransferFailed(1, wire.WireError("SyncError", ""), {"trainer/0/0": "x" * 5000}),
            "TransferFailed: Expected `str` of length <= 4096 - at `holders[...]`",
        ),
        (wire.CarrierUp(65_536), "CarrierUp: Expected `int` <= 65535 - at `port`"),
        (wire.CarrierUp(-1), "CarrierUp: Expected `int` >= 0 - at `port`"),
        (wire.CarrierUp(1, "0F" * 32), NO_SHA256),
        (wire.CarrierUp(1, "0f" * 31), NO_SHA256),
        (wire.CarrierUp(1, "0f" * 32 + "\n"), NO_SHA256),
        (wire.Packed(1, "h", "cpu", 0.0, 0.0, "x" * 200), "Packed: Expected `str` of length <= 128 - at `digest`"),
        (
            wire.Described(1, "d", "h" * 200, {}, "cpu"),
            "Described: Expected `str` of length <= 128 - at `manifest_hash`",
        ),
        (wire.PackFailed(1, wire.WireError.of(SyncError("\x00" * 10**6, members=["x" * 10**5] * 1000))), None),
        (
            wire.PackFailed(1, wire.WireError("SyncError", "x" * 70_000)),
            "PackFailed: Expected `str` of length <= 65792 - at `error.message`",
        ),
        (
            wire.LaneMoved("1.1", 0.0, 0.0, ("a",) * 5000),
            "LaneMoved: Expected `array` of length <= 4096 - at `held_up`",
        ),
        (
            wire.LaneFailed("1.1", wire.WireError("SyncError", ""), (("a", "x" * 20_000),)),
            "LaneFailed: Expected `str` of length <= 4096 - at `links[0][1]`",
        ),
        (
            wire.OperationPost(1, "barrier", (), 1.0, root="x" * 20_000),
            "OperationPost: Expected `str` of length <= 4096 - at `root`",
        ),
    ],
)
def test_what_a_message_may_say(message: wire.FromMember, problem: str | None) -> None:
    assert problem_of(message) == problem


def test_no_time_that_a_member_reports_is_anything_but_a_time() -> None:
    checked = 0
    for kind in get_args(wire.FromMember):
        fields = msgspec.structs.fields(kind)
        # what a version must reach is a number of any size
        times = [one.name for one in fields if "Annotated[float" in str(one.type) and one.name != "at_least"]
        needed = [field.name for field in fields if times and field.required and field.name not in times]
        plain = {name: _SAMPLES[name] for name in needed}
        for name in times:
            for value in (math.nan, math.inf, -math.inf, 2e9):
                message = kind(**plain, **dict.fromkeys(times, 1.0) | {name: value})
                assert re.fullmatch(
                    rf"{kind.__name__}: Expected `float` [<>]= .+ - at `{name}`", problem_of(message) or ""
                )
                checked += 1
    assert checked > 40


_SAMPLES: dict[str, object] = {
    "post": 1,
    "publish": 1,
    "transfer": 1,
    "operation": 1,
    "version": 1,
    "nbytes": 1,
    "sent": 1,
    "received": 1,
    "kind": "barrier",
    "lane": "1.1",
    "manifest_hash": "h",
    "digest": "d",
    "image_digest": "d",
    "device": "cpu",
    "segments": (),
    "place": wire.SlotPlace(1, 1, 1, 1, 1),
}


# ------------------------------------------------------------ the share of the loop


def test_a_session_that_floods_is_slowed_down_and_no_other_is() -> None:
    pace, now, waited = RateLimit(0.0), 0.0, 0.0
    for _ in range(100_000):
        wait_s = pace.after_message(100e-6, now)
        now += 150e-6 + (wait_s or 0.0)
        waited += wait_s or 0.0
    assert pace.flooded
    assert 100_000 * 150e-6 / now == pytest.approx(limits.LOOP_SHARE, rel=0.1)
    calm = RateLimit(0.0)
    assert not any(calm.after_message(100e-6, i / 1000) for i in range(10_000))  # a thousand a second, for ever
    assert not calm.flooded


def test_one_dear_message_is_not_punished() -> None:
    pace = RateLimit(0.0)
    assert pace.after_message(0.4, 0.4) == 0.0
    assert not pace.flooded
    waits = [pace.after_message(30.0, 0.4) for _ in range(2)]
    assert waits[0] == pytest.approx((limits.CHARGE_MAX_S - 0.1) / limits.LOOP_SHARE, rel=0.1)
    assert pace.flooded


def test_the_others_have_a_turn_after_a_few_messages() -> None:
    pace = RateLimit(0.0)
    turns = [pace.after_message(1e-6, 0.0) for _ in range(16)]
    assert turns == ([None] * 7 + [0.0]) * 2
    assert pace.after_message(0.003, 0.0) == 0.0


# ------------------------------------------------------------ any bytes


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_decode_error(data: bytes) -> None:
    size_problem(data)
    try:
        body = wire.decode_member_frame(data).body
    except msgspec.DecodeError:
        return
    assert isinstance(body, get_args(wire.FromMember))


@settings(max_examples=30)
@given(any_message() | any_hello(), st.data())
def test_a_damaged_frame_is_a_frame_or_a_decode_error(message: wire.FromMember, data: st.DataObject) -> None:
    whole = frame(message)
    assert wire.decode_member_frame(whole).body == message
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for broken in (bytes(damaged), whole[:cut]):
        try:
            body = wire.decode_member_frame(broken).body
        except msgspec.DecodeError:
            continue
        if isinstance(body, wire.Hello):
            hello_problem(body)


@given(any_message(wild=True))
def test_what_passes_is_finite(message: wire.FromMember) -> None:
    if problem_of(message) is None:
        floats = [value for value in msgspec.structs.astuple(message) if isinstance(value, float)]
        assert all(math.isfinite(value) for value in floats)


@pytest.mark.parametrize("bound", [math.inf, -math.inf, math.nan])
def test_a_bound_that_no_version_can_meet_is_refused(bound: float) -> None:
    """MessagePack has these numbers, and no version would ever be enough."""
    assert problem_of(wire.ReceiveAsk(1, 0, bound, "step")) is not None


@pytest.mark.parametrize("bound", [2**64 - 1, -(2**63), 1.7e308, -0.5])
def test_any_number_of_meta_is_a_bound(bound: float) -> None:
    assert problem_of(wire.ReceiveAsk(1, 0, bound, "step")) is None


def unbounded(kind: Any, path: str) -> Iterator[str]:
    """Paths below a type to texts, numbers and maps without a limit of their own."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, path)
        case inspect.Metadata():
            yield from unbounded(kind.type, path)
        case inspect.VarTupleType() | inspect.ListType():
            yield from (path,) if kind.max_length is None else ()
            yield from unbounded(kind.item_type, path)
        case inspect.TupleType():
            for one in kind.item_types:
                yield from unbounded(one, path)
        case inspect.DictType():
            yield from (path,) if kind.max_length is None else ()
            yield from unbounded(kind.key_type, path)
            yield from unbounded(kind.value_type, path)
        case inspect.StrType():
            yield from (path,) if kind.max_length is None and kind.pattern is None else ()
        case inspect.IntType() | inspect.FloatType():
            yield from (path,) if kind.ge is None or kind.le is None else ()


def test_no_value_of_a_message_is_without_a_bound() -> None:
    """Of the user's data and of tensors there is one for the whole message."""
    found = {path for kind in get_args(wire.FromMember) for path in unbounded(inspect.type_info(kind), "")}
    assert found == {
        "PublishBegin.meta",
        "Packed.meta",
        "Described.meta",
        "OperationPost.segments",
        "ReceiveAsk.at_least",
    }


def test_a_page_shows_no_more_of_what_members_say_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    long, short = {"text": "x" * 2000}, {"url": ""}  # of no server
    world.join("rollout/0/0", info=long)
    for index in range(1, 4):
        world.join(f"rollout/{index}/0", info=short)
    state = world.state.roster.holder_of("rollout/1/0")
    assert state is not None
    state.note = "y" * 10**5

    def shown() -> list[dict[str, str]]:
        status = channel_status.channel_status(world.state, world.now)
        assert max(len(member.note) for member in status.members) < 600
        return [member.info for member in status.members]

    assert shown() == [long, short, short, short]
    monkeypatch.setattr(channel_status, "INFOS_NBYTES", 4000)
    assert shown() == [{}, short, short, short]


def test_a_status_says_what_a_publish_waits_for() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    target = world.join("rollout/0/0", machine="a")
    world.run()

    def waits() -> list[tuple[str, str, tuple[str, ...], int]]:
        found = channel_status.channel_status(world.state, world.now).under_way
        return [(one.publisher, one.state, one.waits_for, one.waiting) for one in found]

    number = trainer.publish()
    world.run()
    assert waits() == [("trainer/0", "packing", ("trainer/0/0",), 1)]
    trainer.pack(number)
    world.run(frozen=(target,))
    assert waits() == [("trainer/0", "moving", ("rollout/0/0",), 1)]
    world.run()
    assert waits() == []
