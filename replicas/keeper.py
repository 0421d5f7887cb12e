"""A keeper: the process that keeps the newest version of a channel alive on its host. ``python -m replicas.keeper``

Theory of operation
===================

What a keeper is for, and where there is one, is in :mod:`replicas.core.keepers`; what it does, in
:mod:`replicas.channel.keeper`. It gets its :class:`Job` as JSON on its standard input (the token must not show in ``ps``).

One that a source starts (:func:`start`) must outlive it: it is in a session of its own, has no descriptor, no terminal and
no folder of anybody, and is forked once more, so that it is nobody's child. It lives by its session: it ends when the
coordinator says so, or cannot be reached for a lease. (Under a supervisor it belongs to the replica all the same, whose shim
leaves nothing behind. But there sources are on the coordinator's host, where no keeper is needed.)

One that the coordinator starts beside itself is its child, and dies with it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

import replicas
from replicas import environ
from replicas.sidecar import lifeline

__all__ = ["COMMAND", "Job", "environment", "main", "start"]

COMMAND = (sys.executable, "-P", "-m", "replicas.keeper")
START_TIMEOUT_S = 20.0


class Job(msgspec.Struct, frozen=True):
    """What a keeper must know.

    :param parent: the coordinator's process, which it dies with; 0: it is nobody's child.
    :param lease_s: how long it may be without a session; as long as members by default.
    """

    endpoint: str
    token: str
    run: str
    channel: str
    parent: int = 0
    lease_s: float = 30.0


def environment() -> dict[str, str]:
    """Of a keeper: it takes no GPU, and nothing that belongs to the rank that starts it."""
    home = str(Path(replicas.__file__).parent.parent)
    own = {
        name: value
        for name, value in environ.without_torchrun(os.environ).items()
        if name not in (environ.FORKSERVER, environ.LOG_DIR)
    }
    others = [str(Path(entry).absolute()) for entry in own.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = os.pathsep.join((home, *others))  # it runs in another folder
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**own, **threads, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def start(job: Job) -> None:
    """Start one that outlives this process; it has not loaded anything yet when this returns.

    :raises OSError: it cannot be started. :raises subprocess.SubprocessError: it did not start.
    """
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=null,
        stderr=null,
        cwd="/",
        env=environment(),
        start_new_session=True,
    )
    with process:
        try:
            process.communicate(msgspec.json.encode(job), START_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise subprocess.SubprocessError(f"it ended with exit code {process.returncode}")


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if job.parent:
        lifeline.die_with_parent(job.parent)
    elif os.fork():
        os._exit(0)
    lifeline.name_process("replica-keeper")
    gc.disable()  # a tenth of the time that torch takes to load
    from replicas.channel import keeper

    gc.enable()
    return keeper.run(job)


if __name__ == "__main__":
    sys.exit(main())
