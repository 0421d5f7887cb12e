"""Check compatibility at join, so that a mismatch is an error and not a hang.

Theory of operation
===================

:func:`check_join` compares the newcomer's Hello with the Hello of every other process
of the channel: torch's release, and, where NCCL would be used, its version, the
variables that must agree, and the GPUs. NCCL would be used with ``backend = "nccl"``,
or with ``"auto"`` if both processes have a GPU. Only members that carry bytes ever meet
in a process group, so NCCL is compared for those alone. Observers are not checked, and
neither is an earlier incarnation of the same identity, which the newcomer replaces.

With ``staging = "device"`` every member that carries bytes must have a GPU. Members
with the same GPU share its memory, and need no NCCL between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicas import errors
from replicas.config.structs import ChannelConfig
from replicas.messages import Hello

__all__ = ["MULTI_RANK_VERSION", "NCCL_AGREED", "carries_bytes", "check_join", "nccl_works"]

NCCL_AGREED = frozenset(
    (
        # how data is sent: both ends of a connection choose for themselves, and must
        # choose alike
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_NET",
        "NCCL_NET_PLUGIN",
        "NCCL_SOCKET_FAMILY",
        "NCCL_IB_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_DIRECT_DISABLE",
        "NCCL_CUMEM_ENABLE",
        "NCCL_CUMEM_HOST_ENABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_MNNVL_ENABLE",
        "NCCL_COLLNET_ENABLE",
        "NCCL_PXN_DISABLE",
        "NCCL_RUNTIME_CONNECT",
        "NCCL_MULTI_RANK_GPU_ENABLE",
        # piece sizes and numbers of channels
        "NCCL_BUFFSIZE",
        "NCCL_LL_BUFFSIZE",
        "NCCL_LL128_BUFFSIZE",
        "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_P2P_PCI_CHUNKSIZE",
        "NCCL_P2P_NVL_CHUNKSIZE",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
        "NCCL_MIN_P2P_NCHANNELS",
        "NCCL_MAX_P2P_NCHANNELS",
        "NCCL_NCHANNELS_PER_NET_PEER",
        "NCCL_NTHREADS",
        "NCCL_SOCKET_NTHREADS",
        "NCCL_NSOCKS_PERTHREAD",
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_IB_SPLIT_DATA_ON_QPS",
    )
)
"""NCCL's variables that must have the same value, or none, in all processes of a group.

All others may differ: those that describe one host (NCCL_SOCKET_IFNAME, NCCL_IB_HCA,
NCCL_TOPO_FILE, NCCL_HOSTID, ...), those that only log (NCCL_DEBUG...), and timeouts of
one side (NCCL_IB_TIMEOUT, ...).
"""

_UNSET = "unset"
MULTI_RANK_VERSION = (2, 30)
"""The first NCCL that allows several ranks on one GPU.

``NCCL_MULTI_RANK_GPU_ENABLE=1`` enables that.
"""


def check_join(hello: Hello, others: Sequence[Hello], config: ChannelConfig) -> None:
    """Compare a newcomer with the present members.

    :raises replicas.errors.Preflight: it cannot work here, or with one of them; names
        the mismatch and the remedy.
    """
    if hello.observe:
        return
    _check_staging(hello, config)
    me = _name(hello)
    for other in others:
        if other.observe or _name(other) == me:
            continue
        _check_torch(hello, other, config)
        if carries_bytes(hello, config) and carries_bytes(other, config) and _uses_nccl(hello, other, config):
            _check_nccl(hello, other, config)
            _check_devices(hello, other, config)


def nccl_works(hellos: Sequence[Hello]) -> bool:
    """Return whether NCCL accepts these as one group.

    Each must have a GPU, and no two the same one, unless NCCL is set to allow that.
    NCCL takes processes with one GPU for ones with two when their NCCL_HOSTID differ
    (correct, but slow).
    """
    seen: set[tuple[str, str]] = set()
    for hello in hellos:
        if not hello.cuda_devices:
            return False
        identity = hello.cuda_devices[0], hello.nccl_env.get("NCCL_HOSTID", "")
        if identity in seen and not _multi_rank(hello):
            return False
        seen.add(identity)
    return True


def _multi_rank(hello: Hello) -> bool:
    numbers = [int(part) for part in hello.nccl_version.split(".") if part.isdigit()]
    return hello.nccl_env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and tuple(numbers) >= MULTI_RANK_VERSION


def _check_staging(hello: Hello, config: ChannelConfig) -> None:
    if config.staging == "device" and carries_bytes(hello, config) and not hello.cuda_devices:
        raise errors.Preflight(
            f'{_name(hello)} sees no GPU, and the slots of channel "{config.name}" are in GPU memory (staging = "device")',
            channel=config.name,
            phase="join",
            members=(_name(hello),),
            hint='give it a GPU (CUDA_VISIBLE_DEVICES, a build of torch with CUDA), or set staging = "host" on the channel',
        )


def _check_torch(hello: Hello, other: Hello, config: ChannelConfig) -> None:
    mine, theirs = hello.torch_version, other.torch_version
    if mine and theirs and _release(mine) != _release(theirs):
        raise _refusal(
            hello,
            other,
            config,
            f"torch {mine}",
            f"torch {theirs}",
            f"install torch {_release(theirs)} for both, or {_release(mine)}, and start them again",
        )


def _check_nccl(hello: Hello, other: Hello, config: ChannelConfig) -> None:
    mine, theirs = hello.nccl_version, other.nccl_version
    if mine and theirs and mine != theirs:
        raise _refusal(
            hello,
            other,
            config,
            f"NCCL {mine}",
            f"NCCL {theirs}",
            "install the same build of torch (and of nvidia-nccl) for both",
        )
    for name in sorted(NCCL_AGREED & (hello.nccl_env.keys() | other.nccl_env.keys())):
        value, there = hello.nccl_env.get(name, _UNSET), other.nccl_env.get(name, _UNSET)
        if value != there:
            raise _refusal(
                hello,
                other,
                config,
                f"{name} {_shown(value)}",
                f"{name} {_shown(there)}",
                f"set {name} to the same value in the environment of both groups, or unset it in both",
            )


def _check_devices(hello: Hello, other: Hello, config: ChannelConfig) -> None:
    """Refuse shared GPUs where NCCL is required.

    ``backend = "auto"`` uses gloo for members that share a GPU. Members that share the
    GPU's memory, too, are not joined by NCCL.
    """
    if config.staging == "device" and config.transport == "auto" and not config.peers:
        return
    shared = sorted(set(hello.cuda_devices) & set(other.cuda_devices))
    if config.backend == "nccl" and shared and not (_shares_gpu(hello) and _shares_gpu(other)):
        raise _refusal(
            hello,
            other,
            config,
            f"GPU {shared[0]}",
            "the same one",
            'give each its own GPU (CUDA_VISIBLE_DEVICES), use backend = "gloo" or "auto", or, for a test, set '
            "NCCL_MULTI_RANK_GPU_ENABLE=1 in both",
        )


def _refusal(
    hello: Hello, other: Hello, config: ChannelConfig, mine: str, theirs: str, remedy: str
) -> errors.Preflight:
    return errors.Preflight(
        f"{_name(hello)} has {mine}, {_name(other)} has {theirs}: they cannot work together",
        channel=config.name,
        phase="join",
        members=(_name(hello), _name(other)),
        hint=remedy,
    )


def _name(hello: Hello) -> str:
    return f"{hello.group}/{hello.replica}/{hello.rank}"


def _release(version: str) -> str:
    """Return ``2.13`` of ``2.13.0+cu130``."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def _shown(value: str) -> str:
    return value if value == _UNSET else f"= {value!r}"


def _shares_gpu(hello: Hello) -> bool:
    return hello.nccl_env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or bool(hello.nccl_env.get("NCCL_HOSTID"))


def _uses_nccl(hello: Hello, other: Hello, config: ChannelConfig) -> bool:
    both = bool(hello.cuda_devices and other.cuda_devices)
    return config.backend == "nccl" or (config.backend == "auto" and both)


def carries_bytes(hello: Hello, config: ChannelConfig) -> bool:
    """Return whether this rank is ever part of a process group."""
    parties = (*config.sources, *config.targets, *config.peers)
    return any(party.group == hello.group and (party.ranks != "leader" or hello.rank == 0) for party in parties)
