"""Check compatibility at join, so that a mismatch gives an error instead of a hang.

:func:`check_join` compares the newcomer's Hello with that of each other process of the
channel: torch's release, and, if they may form an NCCL group, NCCL's version, the
variables that must agree, and the GPUs. They may if the channel forms process groups,
both carry bytes, and ``backend`` is ``"nccl"``, or ``"auto"`` and both have a GPU.
Observers, and an earlier incarnation that the newcomer replaces, are not compared.

With ``staging = "device"`` every member that carries bytes must have a GPU. Members
with the same GPU share its memory and do not use NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from replicas import errors
from replicas.config.structs import ChannelConfig, ChannelRole
from replicas.core.members.member_state import MemberState
from replicas.messages import ChannelSettings, Hello

_HOW_SENT = """
NCCL_ALGO NCCL_PROTO NCCL_NET NCCL_NET_PLUGIN NCCL_SOCKET_FAMILY NCCL_IB_DISABLE NCCL_SHM_DISABLE NCCL_P2P_DISABLE
NCCL_P2P_LEVEL NCCL_P2P_DIRECT_DISABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_NVLS_ENABLE NCCL_MNNVL_ENABLE
NCCL_COLLNET_ENABLE NCCL_PXN_DISABLE NCCL_RUNTIME_CONNECT NCCL_MULTI_RANK_GPU_ENABLE
"""
"""Each end of a connection chooses by itself, so both need equal values."""
_SIZES = """
NCCL_BUFFSIZE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE
NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS
NCCL_NCHANNELS_PER_NET_PEER NCCL_NTHREADS NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_IB_QPS_PER_CONNECTION
NCCL_IB_SPLIT_DATA_ON_QPS
"""
"""Sizes of pieces and numbers of channels."""
NCCL_AGREED = frozenset((_HOW_SENT + _SIZES).split())
"""NCCL's variables that must have the same value, or none, in all processes of a group.

All others may differ: those that describe one host (NCCL_SOCKET_IFNAME, NCCL_IB_HCA,
NCCL_TOPO_FILE, NCCL_HOSTID, ...), those that only log (NCCL_DEBUG...), and timeouts of
one side (NCCL_IB_TIMEOUT, ...).
"""

MULTI_RANK_VERSION = (2, 30)
"""The first NCCL that allows several ranks on one GPU.

``NCCL_MULTI_RANK_GPU_ENABLE=1`` enables that.
"""


def sends_by_group(config: ChannelConfig) -> bool:
    """Return True if the channel sends versions by a process group, and not by pulls.

    :param config: of the channel.
    """
    on_device = config.transport == "auto" and config.staging == "device"
    return not config.encrypt and (config.transport == "group" or on_device)


def settings_of(hello: Hello, config: ChannelConfig, heartbeat_interval_s: float) -> ChannelSettings:
    """Return the settings of the channel for a process that joins, for its Welcome.

    :param hello: its first message.
    :param heartbeat_interval_s: seconds between its heartbeats.
    :raises errors.UnknownChannel: its group has no role, and it is not an observer.
    """
    parties = {"source": config.sources, "target": config.targets, "peer": config.peers}
    roles = [role for role, known in parties.items() if any(party.group == hello.group for party in known)]
    if not roles and not hello.observe:
        groups = sorted({party.group for known in parties.values() for party in known})
        raise errors.UnknownChannel(
            f'group "{hello.group}" has no part in channel "{config.name}"',
            channel=config.name,
            hint=f"its groups are {', '.join(groups)}; join with observe=True to only watch it",
        )
    role = "observer" if hello.observe else "both" if roles == ["source", "target"] else roles[-1]
    return ChannelSettings(
        role=role,  # type: ignore[arg-type]  # one of the literals
        deadline_s=config.deadline_s,
        slots=config.slots,
        staging=config.staging,
        pulls=not sends_by_group(config),
        encrypt=config.encrypt,
        adopt_together=config.adopt_together,
        source_ranks="all" if any(party.ranks == "all" for party in config.sources) else "leader",
        peer_ranks=config.peers[0].ranks if config.peers else "leader",
        heartbeat_interval_s=heartbeat_interval_s,
    )


def check_identity(hello: Hello, replica: Iterable[MemberState], config: ChannelConfig) -> None:
    """Raise an error if a newcomer's rank, world size and replica index are not
    possible.

    :param hello: the newcomer's first message.
    :param replica: the present members of its replica.
    :raises replicas.errors.ReplicasError: they are out of range, or do not agree.
    """
    where = hello.member.name
    if hello.observe and min(hello.rank, hello.replica) >= 0:
        return  # an observer takes no identity, whatever its name
    if hello.world_size < 1 or not 0 <= hello.rank < hello.world_size:
        raise errors.UsageError(
            f"{where}: rank {hello.rank} is not in a world of {hello.world_size}",
            channel=config.name,
            hint="pass rank from 0 to world_size - 1",
        )
    if hello.replica < 0:
        raise errors.UsageError(f"{where}: replica must be 0 or more", channel=config.name)
    # its former incarnation may have had another size
    others = {state.hello.world_size for state in replica if state.member.name != where}
    if others and others != {hello.world_size}:
        text = f"{where}: world_size {hello.world_size}, but its replica joined with {others.pop()}"
        raise errors.RanksDisagree(text, channel=config.name)


def check_join(hello: Hello, others: Sequence[Hello], config: ChannelConfig) -> None:
    """Raise an error if a newcomer's torch, NCCL and GPUs do not fit those of the
    members.

    :param hello: the newcomer's first message.
    :param others: the first messages of present members, one of each kind.
    :raises replicas.errors.Preflight: it is not compatible with the channel or with one
        of them; names the mismatch and the remedy.
    """
    if hello.observe:
        return
    me = hello.member.name
    if config.staging == "device" and _in_groups(hello, config) and not hello.cuda_devices:
        raise errors.Preflight(
            f'{me} sees no GPU, and the slots of channel "{config.name}" are in GPU memory (staging = "device")',
            channel=config.name,
            phase="join",
            members=(me,),
            hint='give it a GPU (CUDA_VISIBLE_DEVICES, a build of torch with CUDA), or set staging = "host" on the channel',
        )
    for other in others:
        if other.observe or other.member.name == me:
            continue
        for mine, theirs, remedy in _mismatches(hello, other, config):
            raise errors.Preflight(
                f"{me} has {mine}, {other.member.name} has {theirs}: they cannot work together",
                channel=config.name,
                phase="join",
                members=(me, other.member.name),
                hint=remedy,
            )


def _mismatches(hello: Hello, other: Hello, config: ChannelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each difference of two members as (value of ``hello``, of ``other``,
    remedy).

    Only what matters on this channel counts.
    """
    mine, theirs = hello.torch_version, other.torch_version
    if mine and theirs and _release(mine) != _release(theirs):  # an unknown release is not judged
        remedy = f"install torch {_release(theirs)} for both, or {_release(mine)}, and start them again"
        yield f"torch {mine}", f"torch {theirs}", remedy
    both = bool(hello.cuda_devices and other.cuda_devices)
    groups = config.peers or sends_by_group(config)
    uses_nccl = groups and (config.backend == "nccl" or (config.backend == "auto" and both))
    if not (uses_nccl and _in_groups(hello, config) and _in_groups(other, config)):
        return
    mine, theirs = hello.nccl_version, other.nccl_version
    if mine and theirs and mine != theirs:
        remedy = "install the same build of torch (and of nvidia-nccl) for both"
        yield f"NCCL {mine}", f"NCCL {theirs}", remedy
    for name in sorted(NCCL_AGREED & (hello.nccl_env.keys() | other.nccl_env.keys())):
        mine, theirs = (f"= {one.nccl_env[name]!r}" if name in one.nccl_env else "unset" for one in (hello, other))
        if mine != theirs:
            remedy = f"set {name} to the same value in the environment of both groups, or unset it in both"
            yield f"{name} {mine}", f"{name} {theirs}", remedy
    if config.transport == "auto" and not config.peers:
        return  # members with one GPU share its memory, and are not joined by NCCL
    shared = sorted(set(hello.cuda_devices) & set(other.cuda_devices))
    if config.backend == "nccl" and shared and not (_shares_gpu(hello) and _shares_gpu(other)):
        remedy = (
            'give each its own GPU (CUDA_VISIBLE_DEVICES), use backend = "gloo" or "auto", or, for a test, set '
            "NCCL_MULTI_RANK_GPU_ENABLE=1 in both"
        )
        yield f"GPU {shared[0]}", "the same one", remedy


def nccl_works(hellos: Sequence[Hello]) -> bool:
    """Return True if NCCL can form one group of these processes, by their GPUs.

    It needs one GPU for each process, all different, unless a process enables several
    ranks on one (``NCCL_MULTI_RANK_GPU_ENABLE``). NCCL takes one GPU for two if the
    processes' NCCL_HOSTID differ (correct, but slow).

    :param hellos: first messages of the processes, with their GPUs and NCCL settings.
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
    """Return True if several ranks on one GPU are enabled in this process's NCCL.

    Its version must know that, and its environment ask for it.
    """
    numbers = [int(part) for part in hello.nccl_version.split(".") if part.isdigit()]
    return hello.nccl_env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and tuple(numbers) >= MULTI_RANK_VERSION


def _shares_gpu(hello: Hello) -> bool:
    """Return True if the process's environment lets two ranks share its GPU in NCCL."""
    return hello.nccl_env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or bool(hello.nccl_env.get("NCCL_HOSTID"))


def _release(version: str) -> str:
    """Return major and minor number of a torch version such as "2.9.1+cu128": "2.9"."""
    return ".".join(version.partition("+")[0].split(".")[:2])  # 2.9.1+cu128 works with 2.9.0


def carries_bytes(hello: Hello, parties: Iterable[ChannelRole]) -> bool:
    """Return True if a rank moves bytes itself, in any of these roles of its group.

    In a role with ``ranks = "leader"`` only rank 0 does.

    :param hello: the rank's first message.
    :param parties: roles on the channel; those of other groups are ignored.
    """
    return any(party.group == hello.group and (party.ranks != "leader" or hello.rank == 0) for party in parties)


def _in_groups(hello: Hello, config: ChannelConfig) -> bool:
    """Return True if this rank may ever be a member of a process group on the
    channel."""
    return carries_bytes(hello, (*config.sources, *config.targets, *config.peers))


def kind(hello: Hello, config: ChannelConfig) -> object:
    """Return a key of all that :func:`check_join` compares of a member.

    A newcomer is compared with only one of several members with equal keys. The key
    has the GPUs if the channel always uses NCCL, else only whether there are any.
    """
    return (
        hello.torch_version,
        hello.nccl_version,
        frozenset(hello.nccl_env.items()),
        hello.cuda_devices if config.backend == "nccl" else bool(hello.cuda_devices),
        _in_groups(hello, config),
    )
