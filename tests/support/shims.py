"""A shim of its own, without a supervisor: what it starts, says and logs."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from replicas.linux.processes import MARK, signal_marked
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, PartState
from tests.support.runs import ROOT
from tests.support.waits import eventually

__all__ = ["ShimUnderTest", "pump_of", "shim"]

T = TypeVar("T")


def pump_of(pid: int) -> int:
    """Pid of the log pump of a shim; 0 while there is none."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            if b"log pump" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        except OSError:
            continue  # it ended meanwhile
    return 0


class ShimUnderTest:
    """:func:`shim` makes one. ``state``: the last that it sent of its part."""

    def __init__(self, control: socket.socket, popen: subprocess.Popen[bytes], folder: Path) -> None:
        self.popen = popen
        self.folder = folder
        self.state = UNKNOWN
        self._control = control

    def send(self, message: orders.Message) -> None:
        assert orders.send(self._control, message)

    def wait_for(self, kind: str, timeout_s: float = 60.0) -> orders.Message:
        """The next message of this kind."""
        self._control.settimeout(timeout_s)
        while True:
            message = orders.receive(self._control)
            assert message is not None, f"the shim ended without {kind!r}: {self.state}"
            if message["type"] == "state":
                self.state = orders.read(PartState, message["state"])
            if message["type"] == kind:
                return message

    def wait_until(self, true: Callable[[PartState], T]) -> T:
        """What this says of the first state of which it says anything."""
        while not (found := true(self.state)):
            self.wait_for("state")
        return found

    def started(self) -> int:
        """Pid of the main process, once it is started."""
        return self.wait_until(lambda state: state.main_pid) or 0

    def report(self) -> ExitReport:
        report = self.wait_until(lambda state: state.report)
        assert report is not None
        return report

    def pump(self, *, besides: int = 0) -> int:
        """Its log pump, once there is one (another one than ``besides``)."""
        return int(
            eventually(
                lambda: (pid := pump_of(self.popen.pid)) != besides and pid, "the process that writes their logs"
            )
        )

    def log(self, rank: int = 0) -> bytes:
        """A rank's log, with its older parts."""
        path = self.folder / f"rank-{rank}.log"
        older = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdigit()]
        older.sort(key=lambda part: -int(part.suffix[1:]))
        return b"".join(part.read_bytes() for part in (*older, path))

    def gone(self) -> int:
        """Its exit code, once it is gone."""
        self.wait_until(lambda state: state.gone)
        return self.popen.wait(30)


@contextmanager
def shim(
    folder: Path,
    code: str,
    *,
    tee: int | None = None,
    program: Sequence[str] = ("-m", "replicas.supervisor.shim.shim"),
    pass_fds: Sequence[int] = (),
    **fields: Any,
) -> Iterator[ShimUnderTest]:
    """A shim that runs Python source as rank 0, or what ``fields`` of the spec say;
    ended at the end of the block.

    :param tee: descriptor that is the supervisor's stderr to it.
    :param program: Python's arguments that start it, and descriptors that it gets
        besides.
    """
    nonce = secrets.token_hex(8)
    spec = PartSpec(
        **{
            "run": "test",
            "group": "a",
            "replica": 0,
            "generation": 1,
            "node": 0,
            "nnodes": 1,
            "nproc_per_node": 1,
            "launcher": "exec",
            "command": (sys.executable, "-u", "-c", code),
            "env": {**os.environ, MARK: nonce, "PYTHONPATH": str(ROOT)},
            "cwd": str(folder),
            "log_dir": str(folder / "logs"),
            "stop_timeout_s": 5.0,
            "nonce": nonce,
            "tee": tee is not None,
            **fields,
        }
    )
    logs = Path(spec.log_dir)
    logs.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, *program, "--control", str(theirs.fileno())]
    command += ["--parent", str(os.getpid())]
    command += [] if tee is None else ["--tee", str(tee)]
    with ours, (logs / "shim-0.log").open("ab") as log:  # on their disk, as the supervisor has it
        popen = subprocess.Popen(
            command,
            env=spec.env,
            pass_fds=[theirs.fileno(), *pass_fds, *([] if tee is None else [tee])],
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        theirs.close()
        try:
            orders.send(ours, {"type": "start", "spec": orders.plain(spec)})
            yield ShimUnderTest(ours, popen, logs)
        finally:
            ours.close()
            try:
                popen.wait(15)  # without its supervisor it ends by itself
            finally:
                signal_marked(nonce, 9)
                popen.wait(15)
