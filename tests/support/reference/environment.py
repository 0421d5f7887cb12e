"""The page of environment variables: ours by their constants, others' by a table
here."""

from __future__ import annotations

import re

from tests.support.reference.source import constants, modules, strings
from tests.support.reference.text import markdown

__all__ = ["OTHERS", "body", "ours", "used"]

OURS = re.compile(r"REPLICAS?_[A-Z_]+")
_OTHERS = re.compile(
    r"RANK|WORLD_SIZE|PYTHON[A-Z]+"
    r"|(CUDA|NCCL|TORCH|OMP|OPENBLAS|MKL|NOTIFY|WATCHDOG|RES|LOCAL|MASTER|GLOO|XDG)(_[A-Z0-9]+)+"
)

OTHERS = {
    "RANK": "Read: the rank of this process in its replica. torchrun sets it; for a program "
    'of ``launcher = "exec"`` the supervisor removes torchrun\'s variables.',
    "WORLD_SIZE": "Read: the number of ranks of this replica. torchrun sets it.",
    "LOCAL_RANK": "Read by the guard of a rank, to find its log.",
    "CUDA_VISIBLE_DEVICES": "Read: the GPUs that a supervisor may give out, and those of a rank. "
    "Set for a rank whose group has ``resources.gpus``.",
    "CUDA_DEVICE_ORDER": "Set beside ``CUDA_VISIBLE_DEVICES``, where its numbers need an order.",
    "OMP_NUM_THREADS": "Set for a rank whose group has ``resources.cpu_threads``; 1 in sidecars and in the store.",
    "OPENBLAS_NUM_THREADS": "Set to 1 in sidecars.",
    "MKL_NUM_THREADS": "Set to 1 in sidecars.",
    "PYTHONFAULTHANDLER": "Set to 1 for a rank, so that one that crashes shows its stacks. The group's ``env`` wins.",
    "PYTHONPATH": "Set for our own processes, so that they run the same code as their parent. A "
    "user's program gets what its config says.",
    "NOTIFY_SOCKET": "Read and removed by the supervisor: systemd's socket for READY and STATUS.",
    "WATCHDOG_USEC": "Read and removed by the supervisor: the period of systemd's watchdog.",
    "WATCHDOG_PID": "Read and removed by the supervisor: whom systemd's watchdog is for.",
    "RES_OPTIONS": "Set in the store, so that a name server that does not answer costs a second.",
    "TORCH_CPP_LOG_LEVEL": "Set to ERROR in sidecars, unless it is set.",
    "TORCH_ELASTIC_WORKER_IDENTICAL": "Set for a moment by the launcher: torchrun then derives the "
    "ranks and needs no store for it.",
    "NCCL_SOCKET_IFNAME": "Set in sidecars to the interface by which the rank joined, unless the rank sets it.",
    "NCCL_HOSTID": "Set in sidecars of several members on one GPU, with ``NCCL_IB_DISABLE``.",
    "NCCL_MULTI_RANK_GPU_ENABLE": "Read: 1 lets several members on one GPU use NCCL, from NCCL 2.30 on.",
}
"""The sentence of each variable that other programs know, too, and that this package
names."""

_FAMILIES = {
    "NCCL_*": "Read: sidecars run NCCL with the variables of their rank. Those that decide what "
    "is sent in which way must be the same on all members: ``join`` compares them.",
    "TORCH_NCCL_*, TORCH_FR_*": "Set in sidecars: torch's watchdog and its dumps are off there.",
    "LOCAL_*, MASTER_*, TORCHELASTIC_*, GROUP_*, ROLE_*": "Removed before a replica is started: "
    "they belong to another torchrun.",
    "REPLICAS_*, REPLICA_*": "Removed from a replica's environment, if the supervisor itself runs "
    "in a replica, except ``REPLICAS_ACCELERATOR``.",
}
_INTERNAL = "Internal: "
"""With which the sentence of a variable begins that nobody sets by hand."""
_IN_FAMILIES = re.compile(r"TORCH_NCCL_.*|TORCH_FR_.*|NCCL_.*|(LOCAL|MASTER)_")


def ours() -> dict[str, str]:
    """Name and sentence of each variable of this package, from the constants that hold
    their names."""
    found = (constant for path in modules() for constant in constants(path))
    return {
        value: " ".join(text.split()) for _, value, text in found if isinstance(value, str) and OURS.fullmatch(value)
    }


def used() -> tuple[set[str], set[str]]:
    """The names of variables in the source: ours, and others' that have no family."""
    found = {text for path in modules() for text in strings(path)}
    others = {text for text in found if _OTHERS.fullmatch(text)}
    return (
        {text for text in found if OURS.fullmatch(text)},
        {text for text in others if text in OTHERS or not _IN_FAMILIES.fullmatch(text)},
    )


def body() -> str:
    own = markdown(
        """The supervisor sets these for a rank, and ``replicas.join`` reads them. A
        framework that places its own processes may set them, or pass the values to ``join``
        as arguments, which win."""
    )
    others = markdown("These belong to other programs.")
    return "\n\n".join(
        [
            "## Of this package",
            own,
            *_entries({name: text for name, text in ours().items() if not text.startswith(_INTERNAL)}),
            "## Internal ones",
            markdown("You may see these in the environment of a process. Do not set them."),
            *_entries(
                {
                    name: text.removeprefix(_INTERNAL)[0].upper() + text.removeprefix(_INTERNAL)[1:]
                    for name, text in ours().items()
                    if text.startswith(_INTERNAL)
                }
            ),
            "## Of others",
            others,
            *_entries(OTHERS | _FAMILIES),
        ]
    )


def _entries(table: dict[str, str]) -> list[str]:
    return [f"### `{name}`\n\n{markdown(text)}" for name, text in sorted(table.items())]
