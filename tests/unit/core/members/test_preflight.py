"""Who may join whom: decided from two Hellos and the config, without any machine.

Covers: core/members/preflight.py, messages/identity.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replicas.config.structs import ChannelConfig, ChannelRole
from replicas.core.members.preflight import NCCL_AGREED, check_join
from replicas.errors import Preflight, RanksDisagree
from replicas.messages import PROTOCOL, Hello
from replicas.messages.identity import ProcessIdentity
from tests.support.channel_world import World, channel_config

PROCESS = ProcessIdentity(1, 2, "boot", 3)


def hello(group: str = "trainer", replica: int = 0, rank: int = 0, **more: Any) -> Hello:
    base = Hello(PROTOCOL, "run", "policy", group, replica, rank, 2, "abc", 1, PROCESS, torch_version="2.13.0+cu130")
    return msgspec.structs.replace(base, **more)


def on_gpu(group: str = "trainer", replica: int = 0, uuid: str = "GPU-a", **more: Any) -> Hello:
    env = more.pop("env", {})
    return hello(group, replica, cuda_devices=(uuid,), nccl_env=env, **{"nccl_version": "2.28.9", **more})


def config(backend: Any = "auto", target_ranks: Any = "all", transport: Any = "group") -> ChannelConfig:
    return ChannelConfig(
        name="policy",
        sources=(ChannelRole("trainer", "leader"),),
        targets=(ChannelRole("rollout", target_ranks),),
        backend=backend,
        transport=transport,
    )


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.1", "2.13.0.dev20260101+cpu", "2.13", ""])
def test_one_release_of_torch_works_together(version: str) -> None:
    check_join(hello("rollout", torch_version=version), [hello()], config())


@pytest.mark.parametrize("version", ["2.12.1+cu130", "2.14.0", "3.13.0"])
def test_releases_of_torch_that_differ(version: str) -> None:
    with pytest.raises(Preflight) as caught:
        check_join(hello("rollout", 1, torch_version=version), [hello(), hello("rollout", 0)], config())
    error = caught.value
    assert error.message == (
        f"rollout/1/0 has torch {version}, trainer/0/0 has torch 2.13.0+cu130: they cannot work together"
    )
    assert error.members == ("rollout/1/0", "trainer/0/0")
    assert (error.channel, error.phase) == ("policy", "join")
    assert "install torch 2.13 for both" in error.hint


def test_observers_and_the_earlier_self_are_not_compared() -> None:
    old = "2.9.0"
    check_join(hello("watcher", observe=True, torch_version=old), [hello()], config())
    check_join(hello("rollout"), [hello("watcher", observe=True, torch_version=old)], config())
    check_join(hello("rollout", incarnation="new"), [hello("rollout", torch_version=old)], config())
    with pytest.raises(Preflight):
        check_join(hello("rollout"), [hello("rollout", 1, torch_version=old)], config())


@pytest.mark.parametrize(
    ("backend", "both", "refused"),
    [("nccl", False, True), ("auto", True, True), ("auto", False, False), ("gloo", True, False)],
)
def test_nccl_is_compared_where_it_would_be_used(backend: str, both: bool, refused: bool) -> None:
    newcomer = on_gpu("rollout", uuid="GPU-b", nccl_version="2.27.1")
    other = on_gpu() if both else hello(nccl_version="2.28.9")
    if not refused:
        check_join(newcomer, [other], config(backend))
        return
    with pytest.raises(Preflight, match=r"rollout/0/0 has NCCL 2\.27\.1, trainer/0/0 has NCCL 2\.28\.9"):
        check_join(newcomer, [other], config(backend))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_channel_that_forms_no_group_compares_nothing_of_nccl(transport: str) -> None:
    newcomer = on_gpu("rollout", nccl_version="2.27.1", env={"NCCL_P2P_DISABLE": "1"})
    check_join(newcomer, [on_gpu()], config("nccl", transport=transport))


@pytest.mark.parametrize("name", sorted(NCCL_AGREED))
def test_variables_that_must_agree(name: str) -> None:
    with pytest.raises(Preflight) as caught:
        check_join(on_gpu("rollout", uuid="GPU-b", env={name: "0"}), [on_gpu()], config())
    assert f"rollout/0/0 has {name} = '0', trainer/0/0 has {name} unset" in caught.value.message
    assert name in caught.value.hint
    with pytest.raises(Preflight, match=f"has {name} = '0', trainer/0/0 has {name} = '1'"):
        check_join(on_gpu("rollout", uuid="GPU-b", env={name: "0"}), [on_gpu(env={name: "1"})], config())
    check_join(on_gpu("rollout", uuid="GPU-b", env={name: "0"}), [on_gpu(env={name: "0"})], config())


@pytest.mark.parametrize(
    "name",
    ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_TOPO_FILE", "NCCL_NEW"],
)
def test_variables_of_one_host_may_differ(name: str) -> None:
    check_join(
        on_gpu("rollout", uuid="GPU-b", env={name: "x"}),
        [on_gpu(env={name: "y"}), on_gpu("rollout", 1, "GPU-c")],
        config(),
    )


def test_one_gpu_for_two_members() -> None:
    with pytest.raises(Preflight) as caught:
        check_join(on_gpu("rollout"), [on_gpu()], config("nccl"))
    assert "rollout/0/0 has GPU GPU-a, trainer/0/0 has the same one" in caught.value.message
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    check_join(on_gpu("rollout"), [on_gpu()], config("auto"))  # gloo is taken then
    check_join(on_gpu("rollout"), [on_gpu()], config("gloo"))


def test_one_gpu_on_purpose() -> None:
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    check_join(on_gpu("rollout", env=shared), [on_gpu(env=shared)], config("nccl"))
    check_join(on_gpu("rollout", env={"NCCL_HOSTID": "a"}), [on_gpu(env={"NCCL_HOSTID": "b"})], config("nccl"))
    with pytest.raises(Preflight, match="the same one"):
        check_join(on_gpu("rollout", env={"NCCL_HOSTID": "a"}), [on_gpu()], config("nccl"))


def test_ranks_without_bytes_never_meet_in_a_group() -> None:
    check_join(on_gpu("trainer", rank=1, nccl_version="1"), [on_gpu("rollout")], config("nccl"))
    check_join(on_gpu("rollout", rank=1), [on_gpu()], config("nccl", target_ranks="leader"))
    with pytest.raises(Preflight):
        check_join(on_gpu("rollout", rank=1), [on_gpu()], config("nccl"))
    peers = ChannelConfig(name="outer", peers=(ChannelRole("trainer", "each"),), backend="nccl")
    with pytest.raises(Preflight):
        check_join(on_gpu(rank=1), [on_gpu()], peers)


def test_ranks_of_a_replica_that_join_worlds_of_different_sizes() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)))
    world.join("trainer/0/0", world_size=2)
    with pytest.raises(RanksDisagree, match=r"^trainer/0/1: world_size 4, but its replica joined with 2 "):
        world.join("trainer/0/1", world_size=4)
    world.join("trainer/1/0", world_size=4)
