"""What a connection may do: sizes, values, the share of the loop; and any bytes
whatever as a frame.

Covers: common/decoding.py, coordinator/channel_status.py, coordinator/limits.py,
messages/bounds.py, messages/from_member.py.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas import messages as wire
from replicas.coordinator import channel_status, limits
from replicas.coordinator.limits import RateLimit, hello_problem, message_problem, size_problem
from replicas.errors import SyncError
from replicas.messages.bounds import HELLO_NBYTES, OPERATION_NBYTES, VERSION_MAX
from replicas.messages.identity import ProcessIdentity
from tests.support.channel.hostile import any_message
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
        ({"world_size": 10**9}, "its replica, rank or world size is out of range"),
        ({"received": -1}, "Hello with received = -1"),
        ({"process": ProcessIdentity(2**40, 1, "boot", 1)}, "its process identity is invalid"),
        ({"info": {str(i): "" for i in range(1000)}}, "it has too many info entries, NCCL variables or versions"),
        ({"proof": "x" * 1000}, "its proof is too long"),
        ({"info": {"url": "x" * 5000}}, "one of its texts is too long"),
        ({"info": {"url": "é" * 4000}}, None),
        ({"info": {"url": "é" * 4096}}, "its info: 8,200 bytes exceed the limit of 8,192"),
        ({"info": {str(i): "x" * 40 for i in range(200)}}, "its info: 9,093 bytes exceed the limit of 8,192"),
        (
            {"nccl_env": {f"NCCL_{i}": "x" * 4000 for i in range(20)}},
            "its NCCL variables: 80,213 bytes exceed the limit of 65,536",
        ),
        ({"cuda_devices": ("GPU",) * 65}, "it has too many GPUs"),
        ({"torch_version": "x" * 20_000}, "Hello: torch_version: 20,000 bytes exceed the limit of 16,384"),
        ({"latest_digest": "x" * 129}, "Hello: latest_digest: 129 bytes exceed the limit of 128"),
        ({"held": (wire.HeldVersion(1, "é" * 65),)}, "HeldVersion: digest: 130 bytes exceed the limit of 128"),
        ({"held": (wire.HeldVersion(-1, ""),)}, "HeldVersion with version = -1"),
    ],
)
def test_what_a_hello_may_say(change: dict[str, object], problem: str | None) -> None:
    assert hello_problem(msgspec.structs.replace(HELLO, **change)) == problem


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (wire.PublishBegin(1, None, 30.0), None),
        (wire.PublishBegin(1, -3, -0.5), None),  # the user's number, and a deadline that has passed
        (wire.PublishBegin(1, VERSION_MAX, 1.0), None),
        (wire.PublishBegin(1, VERSION_MAX + 1, 1.0), f"PublishBegin with version = {VERSION_MAX + 1}"),
        (wire.PublishBegin(1, VERSION_MAX + 1, 1.0, resumed=True), None),  # the library counted on
        (wire.PublishBegin(1, 2**62, 1.0, resumed=True), f"PublishBegin with version = {2**62}"),
        (wire.PublishBegin(1, None, math.nan), "PublishBegin with deadline_s = nan"),
        (wire.PublishBegin(1, None, math.inf), "PublishBegin with deadline_s = inf"),
        (wire.PublishBegin(-1, None, 1.0), "PublishBegin with publish = -1"),
        (wire.Loaded(2**63, 0.0), f"Loaded with version = {2**63}"),
        (wire.Loaded(1, -1.0), "Loaded with load_s = -1.0"),
        (wire.CanLoad(2**63), f"CanLoad with version = {2**63}"),
        (wire.CanLoad(1, whole=True), None),
        (wire.Packed(1, "h", -5, "cpu", 0.0, 0.0), "Packed with nbytes = -5"),
        (wire.Filled(1, 0.0, "d", 0.0, wire.SlotPlace(1, 1, 1, -5, 1)), "Filled: SlotPlace with nbytes = -5"),
        (wire.OperationPost(1, "all_reduce", (), 1.0, step=-1), None),
        (wire.OperationPost(1, "all_reduce", (wire.Segment("float32", (-2,)),), 1.0), "a tensor of shape (-2,)"),
        (wire.Heartbeat(), None),
        (wire.CarrierUp(65_535, "0f" * 32), None),
        (wire.CarrierUp(0), None),
        (wire.TransferDone(1, "d", {}, 1.0, 1.0, None, {"trainer/0/0": 5}), None),
        (
            wire.TransferDone(1, "d", {}, 1.0, 1.0, None, {"trainer/0/0": -5}),
            "TransferDone with a number of bytes that is out of range",
        ),
        (
            wire.TransferFailed(1, wire.WireError("SyncError", ""), {str(one): "" for one in range(65)}),
            "TransferFailed with too many holders, or a text that is too long",
        ),
        (
            wire.TransferDone(1, "d", {}, 1.0, 1.0, wrong={"trainer/0/0": "x" * 5000}),
            "TransferDone with too many holders, or a text that is too long",
        ),
        (
            wire.TransferFailed(1, wire.WireError("SyncError", ""), {"trainer/0/0": "x" * 5000}),
            "TransferFailed with too many holders, or a text that is too long",
        ),
        (wire.CarrierUp(65_536), "CarrierUp with port = 65536"),
        (wire.CarrierUp(-1), "CarrierUp with port = -1"),
        (wire.CarrierUp(1, "0F" * 32), "CarrierUp with a certificate_hash that is not a SHA-256"),
        (wire.CarrierUp(1, "0f" * 31), "CarrierUp with a certificate_hash that is not a SHA-256"),
        (wire.CarrierUp(1, "0f" * 99), "CarrierUp: certificate_hash: 198 bytes exceed the limit of 128"),
        (
            wire.Packed(1, "h", 5, "cpu", 0.0, 0.0, "x" * 200),
            "Packed: digest: 200 bytes exceed the limit of 128",
        ),
        (
            wire.Described(1, "d", "h" * 200, {}, "cpu"),
            "Described: manifest_hash: 200 bytes exceed the limit of 128",
        ),
        (wire.PackFailed(1, wire.WireError.of(SyncError("é" * 10**6, members=["x" * 10**5] * 1000))), None),
        (
            wire.PackFailed(1, wire.WireError("SyncError", "x" * 70_000)),
            "WireError: message: 70,000 bytes exceed the limit of 65,792",
        ),
        (wire.LaneMoved("1.1", 0, 0, 0.0, 0.0, ("a",) * 5000), "LaneMoved with 5,000 held_up"),
        (
            wire.LaneFailed("1.1", wire.WireError("SyncError", ""), (("a", "x" * 20_000),)),
            "LaneFailed: links: 20,000 bytes exceed the limit of 16,384",
        ),
        (
            wire.OperationPost(1, "barrier", (), 1.0, root="x" * 20_000),
            "OperationPost: root: 20,000 bytes exceed the limit of 16,384",
        ),
        (
            wire.OperationPost(1, "all_reduce", (wire.Segment("x" * 200, (1,)),), 1.0),
            "a tensor of 1 dimensions, and a dtype of 200 characters",
        ),
    ],
)
def test_what_a_message_may_say(message: wire.FromMember, problem: str | None) -> None:
    assert message_problem(message) == problem


def test_no_time_that_a_member_reports_is_anything_but_a_time() -> None:
    checked = 0
    for kind in get_args(wire.FromMember):
        fields = msgspec.structs.fields(kind)
        times = [field.name for field in fields if float in (get_args(field.type) or (field.type,))]
        times = [name for name in times if name != "at_least"]  # any number of a user's
        needed = [field.name for field in fields if times and field.required and field.name not in times]
        plain = {name: _SAMPLES[name] for name in needed}
        for name in times:
            for value in (math.nan, math.inf, -math.inf, 2e9):
                message = kind(**plain, **dict.fromkeys(times, 1.0) | {name: value})
                assert message_problem(message) == f"{kind.__name__} with {name} = {value}"
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
    "part_digests": {},
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
@given(any_message(wild=True), st.data())
def test_a_damaged_frame_is_a_frame_or_a_decode_error(message: wire.FromMember, data: st.DataObject) -> None:
    whole = frame(message)
    assert wire.decode_member_frame(whole).body == message or math.nan in numbers(message)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for broken in (bytes(damaged), whole[:cut]):
        try:
            body = wire.decode_member_frame(broken).body
        except msgspec.DecodeError:
            continue
        message_problem(body)
        if isinstance(body, wire.Hello):
            hello_problem(body)


def numbers(message: wire.FromMember) -> list[object]:
    """Numbers of the message; nan is not equal to itself."""
    return [math.nan if value != value else value for value in msgspec.structs.astuple(message)]


@given(any_message(wild=True))
def test_what_passes_is_finite(message: wire.FromMember) -> None:
    if message_problem(message) is None:
        floats = [value for value in msgspec.structs.astuple(message) if isinstance(value, float)]
        assert all(math.isfinite(value) for value in floats)


def test_no_text_of_a_message_is_without_a_bound() -> None:
    """Of maps of texts, the user's ``meta`` and tensors there are other bounds."""
    for kind in (*get_args(wire.FromMember), wire.HeldVersion, wire.WireError):
        texts = {field.name for field in msgspec.structs.fields(kind) if "str" in str(field.type)}
        others = {"info", "nccl_env", "meta", "part_digests", "kind", "reduce_op", "error"}
        others |= {"received", "given_up", "wrong", "holders"}
        assert texts - others == set(limits._TEXTS[kind]) - others, kind


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
