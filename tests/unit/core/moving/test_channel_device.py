"""``staging = "device"``: members with one GPU copy from each other, others form lanes,
and a copy counts by its digest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replicas import errors
from replicas import messages as wire
from replicas.core.members.preflight import check_join, nccl_works, settings_of
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World, channel_config, peer_config
from tests.unit.core.members.test_preflight import hello, on_gpu

BUSY = wire.WireError("Busy", "no free slot")


def device_world(**config: object) -> World:
    return World(channel_config(staging="device", **config), machine="a")


def join(world: World, name: str, gpu: str, machine: str = "a") -> SimMember:
    return world.join(name, machine=machine, cuda_devices=(gpu,))


def publish(world: World, trainer: SimMember, *, hold_s: float = 0.0) -> wire.PublishEnd | None:
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    if hold_s:
        packed = trainer.outbox.pop()
        assert isinstance(packed, wire.Packed)
        trainer.outbox.append(wire.Packed(number, packed.manifest_hash, "cuda", 0.0, 0.1, "digest", hold_s=hold_s))
    world.run()
    return trainer.verdicts.get(number)


def offers(sim: SimMember) -> list[wire.TransferOffer]:
    return [message for message in sim.seen if isinstance(message, wire.TransferOffer)]


def lanes(sim: SimMember) -> list[wire.LaneForm]:
    return [message for message in sim.seen if isinstance(message, wire.LaneForm)]


def test_who_shares_a_gpu_copies_there_and_other_gpus_get_every_byte_once() -> None:
    world = device_world()
    trainer, near = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-0")
    far = [join(world, f"rollout/{number}/0", "GPU-1") for number in (1, 2)]
    end = publish(world, trainer, hold_s=0.25)
    assert end is not None
    assert end.receipt is not None
    assert end.receipt.staging == "device"
    assert end.receipt.phases["hold"] == 0.25
    assert len(end.receipt.members) == 3
    assert [offer.role for offer in offers(near)] == ["map"]
    assert sorted(offer.role for sim in far for offer in offers(sim)) == ["map", "receive"]
    assert [lane.group.backend for lane in lanes(trainer)] == ["nccl"]
    assert lanes(trainer)[0].group.size == 2
    assert near.member in {state.member for state in world.state.roster if state.lent}, "it has a copy of its own"


def test_the_phases_still_add_up_beside_a_hold() -> None:
    world = device_world()
    trainer, _ = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-0")
    end = publish(world, trainer, hold_s=0.25)
    assert end is not None
    assert end.receipt is not None
    phases = dict(end.receipt.phases)
    del phases["hold"]
    without = publish(world, trainer)
    assert without is not None
    assert without.receipt is not None
    assert without.receipt.phases.keys() == phases.keys()


def test_a_gpu_of_the_same_name_elsewhere_is_another_one() -> None:
    world = device_world()
    trainer, target = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-0", machine="b")
    assert publish(world, trainer) is not None
    assert [offer.role for offer in offers(target)] == ["receive"]
    assert lanes(trainer)[0].group.backend == "gloo", "NCCL takes no two of one GPU, and for it they have the same"


@pytest.mark.parametrize(
    ("staging", "transport", "forms"),
    [
        ("host", "auto", False),
        ("host", "tcp", False),
        ("host", "group", True),
        ("device", "auto", True),
        ("device", "tcp", False),
        ("device", "group", True),
    ],
)
def test_a_process_group_is_formed_as_the_channel_says(staging: str, transport: str, *, forms: bool) -> None:
    """For a publish, whatever memory the tensors are in; a catch-up always pulls."""
    world = World(channel_config(staging=staging, transport=transport), machine="a")
    trainer, target = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-1", machine="b")
    settings = settings_of(on_gpu(), channel_config(staging=staging, transport=transport), 1.0)
    assert settings.pulls != forms, "a rank is told for which of them to get ready"
    end = publish(world, trainer, hold_s=0.25)
    late = join(world, "rollout/1/0", "GPU-2", machine="c")
    world.advance(10.0)
    assert end is not None
    assert end.error is None
    assert 1 in target.held & late.held
    assert bool(lanes(target)) == forms
    assert {offer.role for offer in offers(target)} - {"serve"} == ({"receive"} if forms else {"pull"})
    assert (lanes(late), [offer.role for offer in offers(late)]) == ([], ["pull"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("staging", ["host", "device"])
def test_encrypted_bytes_never_go_over_a_lane(staging: str, device: str) -> None:
    """Neither in a publish nor in a catch-up."""
    world = World(channel_config(staging=staging, encrypt=True), machine="a")
    trainer, target = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-1", machine="b")
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    packed = trainer.outbox.pop()
    assert isinstance(packed, wire.Packed)
    trainer.outbox.append(msgspec.structs.replace(packed, device=device))
    world.run()
    tell_certificates(world)
    late = join(world, "rollout/1/0", "GPU-2", machine="c")
    world.run()
    tell_certificates(world)
    world.advance(10.0)
    assert trainer.verdicts[number].error is None
    assert 1 in target.held & late.held
    assert {offer.role for sim in (target, late) for offer in offers(sim)} <= {"pull", "serve"}
    assert not any(lanes(sim) for sim in world.members.values())


def tell_certificates(world: World) -> None:
    """Nothing is pulled from one that has not told its own."""
    for sim in world.members.values():
        sim.outbox.append(wire.CarrierUp(sim.port, "0f" * 32))
    world.run()


def test_a_wrong_copy_is_not_believed_and_its_member_gets_the_bytes_sent() -> None:
    world = device_world()
    trainer, target = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-0")
    world.run()
    target.bad_digest = True
    number = trainer.publish()
    trainer.pack(number)
    while not lanes(target):
        world.run((target,))
        world.down(target)
        world.up(target)
    target.bad_digest = False
    world.run()
    end = trainer.verdicts[number]
    assert end.receipt is not None
    assert [offer.role for offer in offers(target)] == ["map", "receive"]


@pytest.mark.parametrize("error", [BUSY, wire.WireError("NoCapacity", "GPU-0 has no memory left")])
def test_nobody_has_room_for_a_copy(error: wire.WireError) -> None:
    world = device_world()
    trainer, target = join(world, "trainer/0/0", "GPU-0"), join(world, "rollout/0/0", "GPU-0")
    target.refuse = error
    end = publish(world, trainer)
    assert end is not None
    assert end.receipt is None, (
        "what is only on the publisher's GPU is no version that anybody could get after its death"
    )
    assert end.error is not None
    assert end.error.kind == error.kind
    target.refuse = None
    end = publish(world, trainer)
    assert end is not None
    assert end.receipt is not None


def test_one_that_waits_for_a_slot_is_left_behind_at_half_of_the_deadline() -> None:
    world = device_world()
    trainer = join(world, "trainer/0/0", "GPU-0")
    join(world, "rollout/0/0", "GPU-0")
    late = join(world, "rollout/1/0", "GPU-0")
    world.run()
    late.stuck = True
    assert publish(world, trainer) is None
    world.advance(31.0)
    receipt = trainer.verdicts[1].receipt
    assert receipt is not None
    assert receipt.lost == ("rollout/1/0",)
    assert "not ready" in receipt.reasons["rollout/1/0"]
    late.stuck = False
    world.advance(100.0)
    assert 1 in late.held, "it is caught up"


def test_a_receipt_says_where_the_slots_are_in_host_staging_too() -> None:
    world = World()
    trainer, _ = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    end = publish(world, trainer)
    assert end is not None
    assert end.receipt is not None
    assert end.receipt.staging == "host"
    assert "hold" not in end.receipt.phases


def test_who_carries_bytes_needs_a_gpu() -> None:
    config = channel_config(staging="device")
    for group in ("trainer", "rollout"):
        with pytest.raises(errors.Preflight) as caught:
            check_join(hello(group), [], config)
        assert f"{group}/0/0 sees no GPU" in caught.value.message
        assert 'staging = "host"' in caught.value.hint
        check_join(on_gpu(group), [], config)
    check_join(hello("trainer", rank=1), [], config)  # the leader publishes
    check_join(hello("watcher", observe=True), [], config)


def test_nccl_may_be_demanded_though_a_gpu_is_shared_in_its_memory() -> None:
    trainer, rollout = on_gpu(), on_gpu("rollout")
    check_join(rollout, [trainer], channel_config(staging="device", backend="nccl"))
    for config in (
        channel_config(backend="nccl", transport="group"),
        channel_config(staging="device", backend="nccl", transport="group"),
    ):
        with pytest.raises(errors.Preflight, match="the same one"):
            check_join(rollout, [trainer], config)
    peers = peer_config(staging="device", backend="nccl")
    with pytest.raises(errors.Preflight, match="the same one"):
        check_join(on_gpu("peer", 1), [on_gpu("peer")], peers)


MULTI = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("first", "second", "works"),
    [
        ({}, {"uuid": "GPU-b"}, True),
        ({}, {}, False),
        ({"env": {"NCCL_HOSTID": "x"}}, {"env": {"NCCL_HOSTID": "y"}}, True),
        ({"env": {"NCCL_HOSTID": "x"}}, {"env": {"NCCL_HOSTID": "x"}}, False),
        ({"env": MULTI, "nccl_version": "2.30.3"}, {"env": MULTI, "nccl_version": "2.30.3"}, True),
        ({"env": MULTI}, {"env": MULTI}, False),  # 2.28.9 does not know it
    ],
)
def test_when_nccl_takes_two_members(first: dict[str, Any], second: dict[str, Any], works: bool) -> None:
    assert nccl_works([on_gpu(**first), on_gpu("rollout", **second)]) == works
    assert not nccl_works([on_gpu(**first), hello("rollout")])


def test_a_version_dies_with_its_publisher_when_nobody_has_copied_it() -> None:
    """In host memory the coordinator would keep it; it has no GPU."""
    world = device_world()
    trainer = join(world, "trainer/0/0", "GPU-0")
    assert publish(world, trainer) is not None
    assert not world.kept
    world.lose(trainer)
    target = join(world, "rollout/0/0", "GPU-0")
    world.advance(5.0)
    assert not target.held
    again = join(world, "trainer/0/0", "GPU-0")
    end = publish(world, again)
    assert end is not None
    assert end.receipt is not None
    assert end.receipt.members == (Member("rollout", 0, 0, target.member.incarnation),)
