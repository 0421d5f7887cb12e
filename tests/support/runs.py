"""A real run in a folder of its own: ``python -m replicas.supervisor`` as a child, and
what shows of it outside."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from replicas import environ
from replicas.control.client import Client
from replicas.linux.cgroups import find_own
from replicas.linux.processes import start_time
from replicas.linux.sockets import SocketAddress
from replicas.status import RunStatus
from replicas.supervisor.state.run_state import decode
from tests.support.root import ROOT
from tests.support.waits import eventually

__all__ = ["MARK", "ROOT", "WITHOUT_CGROUPS", "Run", "alive", "processes_marked", "running", "shared_memory"]

TORCH_SEGMENT = re.compile(r"torch_(\d+)_")
"""What torch's shared memory is called; the number is the pid of the process that made
it."""
MARK = "TEST_RUN_MARK"
WITHOUT_CGROUPS = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    "for m in $(awk '$3 == \"cgroup2\" { print $2 }' /proc/mounts); do mount --bind $m $m && mount -o remount,bind,ro $m"
    ' || exit 9; done; exec "$0" "$@"',
    sys.executable,
    "-m",
    "replicas.supervisor",
)
"""A supervisor that sees the control groups, and cannot make any."""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return start_time(pid) is not None


def processes_marked(mark: str) -> dict[int, str]:
    """Command lines, by pid, of the living processes that inherited
    ``TEST_RUN_MARK=mark``."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        pid = int(folder.name)
        try:
            if _marked(pid, f"{MARK}={mark}") and alive(pid):
                found[pid] = os.fsdecode((folder / "cmdline").read_bytes().replace(b"\0", b" ")).strip()
        except OSError:
            continue  # it ended meanwhile
    return found


def _marked(pid: int, entry: str) -> bool:
    """Whether an entry of its environment begins so; False of one that has ended, or is
    somebody else's."""
    try:
        return any(one.startswith(entry.encode()) for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def shared_memory() -> set[str]:
    """Names in /dev/shm that a run under test could have left: ours, and torch's of a
    process that is dead or marked.

    Other people's programs make entries while a test runs. The library itself makes
    none with a name.
    """

    def ours(name: str) -> bool:
        made = TORCH_SEGMENT.match(name)
        if made is None:
            return "replicas" in name
        pid = int(made[1])
        return not alive(pid) or _marked(pid, f"{MARK}=")

    return {path.name for path in Path("/dev/shm").iterdir() if ours(path.name)}


def control_groups(agents: Iterable[int]) -> list[Path]:
    """Those that the agents with these pids have made."""
    try:
        return [path for pid in agents for path in find_own().glob(f"replicas-*-{pid}-*")]
    except OSError:
        return []


class Run:
    """One supervised run. ``text`` is its TOML without ``schema_version``, ``[run]``
    and ``[control]``."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        stop_when: str = "[]",
        name: str = "test",
        head: str = "",
        command: Sequence[str] = (sys.executable, "-m", "replicas.supervisor"),
        pass_fds: Sequence[int] = (),
    ) -> None:
        """``command``: what supervises in place of the real thing, and the descriptors
        that it gets."""
        self.folder = folder
        self._command = [*command]
        self._pass_fds = tuple(pass_fds)
        self.name = name
        self.mark = secrets.token_hex(8)
        self.config = folder / "run.toml"
        control = "" if "[control]" in head else '[control]\nlisten = "127.0.0.1:0"\n'
        first = f'schema_version = 1\n[run]\nname = "{name}"\nstop_when = {stop_when}\n'
        self.config.write_text(first + control + head + text)
        self.state_dir = folder / ".replicas" / name
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._popen: subprocess.Popen[str] | None = None
        self._before = shared_memory()
        self._agents: set[int] = set()
        """Pids of the run's own agents, as far as its state was looked at."""
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)

    def start(self) -> Run:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, MARK: self.mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        env["TMPDIR"] = str(self.scratch)
        self._popen = subprocess.Popen(
            [*self._command, str(self.config)],
            pass_fds=self._pass_fds,
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._queue = queue.Queue()  # what a killed one has left open may still write to the earlier one
        self._reader = threading.Thread(target=self._read, args=(self._popen, self._queue), daemon=True)
        self._reader.start()
        return self

    @staticmethod
    def _read(popen: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert popen.stderr is not None
        with popen.stderr as stream:
            for line in stream:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    def _note_agents(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has not begun, or is over
            saved = decode((self.state_dir / "state.json").read_bytes())
            self._agents |= {one.process.pid for one in saved.agents if one.process is not None}

    def kill(self) -> None:
        """Kill the supervisor alone; what it has started may go on, and write."""
        assert self._popen is not None
        self._note_agents()
        self._popen.kill()
        self._popen.wait(30)

    def left(self) -> int:
        """The exit code of a supervisor that has left the run; what it has started may
        still write."""
        assert self._popen is not None
        self._note_agents()
        return self._popen.wait(30)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def wait_line(self, text: str, *, timeout_s: float = 30.0) -> str:
        """The next line of its stderr with ``text`` in it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r} within {timeout_s} s; lines: {self.lines}") from None
            assert line is not None, f"the supervisor ended without a line with {text!r}; lines: {self.lines}"
            self.lines.append(line)
            if text in line:
                return line

    def said(self) -> list[str]:
        """All lines of its stderr so far, also those that nobody has waited for."""
        with contextlib.suppress(queue.Empty):
            while (line := self._queue.get_nowait()) is not None:
                self.lines.append(line)
            self._queue.put(None)
        return self.lines

    def wait(self, *, timeout_s: float = 30.0) -> int:
        """Its exit code. If it does not end in time, the error says what its processes
        do."""
        assert self._popen is not None
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            asked = [self._look("status"), self._look("stacks")]
            logs = [path.read_text(errors="replace")[-2000:] for path in self.state_dir.glob("logs/*/*/gen-*/*.log")]
            what = "\n".join([*self.said(), *asked, *logs])
            raise AssertionError(f"the run has not ended within {timeout_s:g} s:\n{what}") from None
        while (line := self._queue.get(timeout=5)) is not None:
            self.lines.append(line)
        return code

    def _look(self, command: str) -> str:
        """What a command of ``python -m replicas`` prints about this run."""
        words = [sys.executable, "-m", "replicas", command, "--config", str(self.config)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        try:
            asked = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired as error:
            return f"{error}"
        return asked.stdout + asked.stderr

    def signal(self, signum: int) -> None:
        assert self._popen is not None
        self._note_agents()
        self._popen.send_signal(signum)

    def end(self, *, timeout_s: float = 30.0) -> None:
        """SIGTERM, on which it drains, ends with 0 and leaves nothing."""
        self.signal(signal.SIGTERM)
        assert self.wait(timeout_s=timeout_s) == 0, self.lines
        self.assert_nothing_left()

    def endpoint(self) -> str:
        """``host:port`` of its control port, once it is there."""
        path = self.state_dir / "endpoint.json"
        eventually(path.exists, "the endpoint file")
        self._note_agents()
        return str(msgspec.json.decode(path.read_bytes())["endpoint"])

    def status(self) -> RunStatus:
        token = self.state_dir / "operator-token"
        return Client(self.endpoint(), token=token.read_text().strip() if token.exists() else "").status()

    def processes(self) -> dict[int, str]:
        """Every living process of the run but the supervisor."""
        return {pid: line for pid, line in processes_marked(self.mark).items() if pid != self.pid}

    def find(self, text: str, *, besides: int = 0, timeout_s: float = 30.0) -> int:
        """Pid of a process of the run (but ``besides``) with ``text`` in its command
        line, once there is one."""

        def look() -> int:
            return next((pid for pid, line in self.processes().items() if text in line and pid != besides), 0)

        return int(eventually(look, f"a process with {text!r} in its command line", timeout_s=timeout_s))

    @contextmanager
    def asking_for_sidecars(self, rank: int) -> Iterator[None]:
        """A connection to the forkserver of a rank, as one makes that needs a
        sidecar."""
        variables = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
        (address,) = [one.partition(b"=")[2] for one in variables if one.startswith(environ.FORKSERVER.encode())]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(f"\0{SocketAddress.parse(address.decode()).name}")
            yield

    def assert_nothing_left(self, *ports: int, timeout_s: float = 10.0) -> None:
        """No process, port, socket, control group or shared memory of the run is there
        after at most 10 s."""
        deadline = time.monotonic() + timeout_s
        eventually(
            lambda: not processes_marked(self.mark), f"the end of {processes_marked(self.mark)}", timeout_s=timeout_s
        )
        remaining_s = max(0.5, deadline - time.monotonic())
        eventually(lambda: shared_memory() <= self._before, "no new entry in /dev/shm", timeout_s=remaining_s)
        eventually(lambda: not control_groups(self._agents), "no control group of the run", timeout_s=remaining_s)
        # torch's own cache is every run's, and stays
        assert not [path for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")]
        assert os.fsencode(self.folder) not in Path("/proc/net/unix").read_bytes()
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"

    def log(self, replica: str, generation: int = 1, rank: int = 0) -> Path:
        return self.state_dir / "logs" / replica / f"gen-{generation}" / f"rank-{rank}.log"

    def clean_up(self) -> None:
        """End what is left of it, whatever happened."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(10)
        for pid in processes_marked(self.mark):
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if pid in processes_marked(self.mark):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                os.close(pidfd)
        if self._popen is not None:
            self._reader.join(10)


@contextmanager
def running(folder: Path, text: str, **options: Any) -> Iterator[Run]:
    """A started run, ended at the end of the block whatever happened in it."""
    run = Run(folder, text, **options)
    try:
        yield run.start()
    finally:
        run.clean_up()
