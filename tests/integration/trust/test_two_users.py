"""What another user of the machine sees and reaches of a run. Everything that a run has
must have its entry here.

A new listener, file, argument or variable without an entry fails these tests: say in
the table who can do what with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from replicas.linux.sockets import SocketAddress
from tests.support.machine.exposure import Listener, Process, files_of, listeners, processes_of
from tests.support.machine.users import ATTACKER, VICTIM, as_user, folder_of, needs_users, python_environment
from tests.support.programs import SERVES, group
from tests.support.runs import MARK, Run
from tests.support.waits import eventually

LOOPBACK = "0100007F"
ABSTRACT = re.compile(r"replicas-[0-9a-f]{32}|replicas-door-[0-9a-f]{16}")

LISTENERS: dict[tuple[str, str], str] = {
    ("supervisor", "tcp"): "pages that tell no secret for everybody, all else for the token",
    ("supervisor", "path"): "the same user: mode 0600 in a folder of mode 0700, and peer credentials",
    ("forkserver", "abstract"): "the same user who knows the secret: peer credentials",
    ("agent", "abstract"): "the forkserver's: the agent holds it between two of them",
    ("store", "tcp"): "open: torch's store knows no users. Values of process groups are signed",
    ("launcher", "tcp"): "open: torch's store of the user's own job (MASTER_PORT)",
    ("sidecar", "tcp"): "open: Gloo, which knows no users",
    ("rank", "tcp"): "open: the user's own process groups",
    ("rank", "abstract"): "the same user who knows the secret: both ends prove it, and peer credentials",
    ("supervisor", "abstract"): "the same",
}
"""Who can do what, by who listens and how."""

ARGUMENTS: dict[str, str] = {
    "supervisor": r"-m replicas\.supervisor \S+/run\.toml",
    "store": r"-P -m replicas\.coordinator\.store_process --bind 127\.0\.0\.1 --port \d+ --control \d+ --parent \d+",
    "agent": r"-P -m replicas\.supervisor\.agent\.local --parent \d+ --run \S+ --node \S+"
    r" --socket \S+/control\.sock --state-dir \S+ --lock \d+( --limited)?( --cgroup \S+)?",
    "shim": r"-P -m replicas\.supervisor\.shim\.shim --control \d+ --parent \d+ --lock \d+( --tee \d+)?",
    "launcher": r"-P -m replicas\.supervisor\.shim\.launcher --control \d+ --parent \d+",
    "forkserver": r"-P -m replicas\.sidecar\.forkserver --listener \d+ --parent \d+",
    "sidecar": r"-P -m replicas\.sidecar\.forkserver --listener \d+ --parent \d+",
    "pump": r"replicas log pump of [a-z]+/\d+",
    "rank": r".*",
}
"""Everybody reads them (``/proc/PID/cmdline``): descriptors, pids and paths. ``rank``:
the user's own."""

VARIABLES: dict[str, str] = {
    "REPLICAS_ENDPOINT": "plain",
    "REPLICAS_TOKEN_FILE": "a path: the token is in the file",
    "REPLICAS_RUN": "plain",
    "REPLICAS_STATE_ID": "plain: what it is known by, not a key to anything",
    "REPLICAS_LOG_DIR": "a path",
    "REPLICAS_SHIM": "SECRET",
    "REPLICAS_NONE": "plain: zeros, in whose place the forkserver's children get a mark",
    "REPLICAS_FORKSERVER": "SECRET",
    "REPLICAS_GROUP": "plain",
    "REPLICA_ID": "plain",
    "REPLICA_NUM": "plain",
    "REPLICAS_GENERATION": "plain",
}
"""Of ours in the environment of a run's processes: only its user reads them
(``/proc/PID/environ``)."""

SYNCS = """
import time, torch, replicas
with replicas.join("all") as channel:
    while True:
        channel.all_reduce(torch.ones(4))
        time.sleep(0.05)
"""
TRAINS = """
import time, torch, torch.distributed as dist, replicas
dist.init_process_group("gloo")
with replicas.join("policy") as channel:
    while True:
        channel.publish({"w": torch.ones(1000)}).wait()
        time.sleep(0.2)
"""
MEETS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
time.sleep(600)
"""
TEXT = (
    group("syncs", SYNCS, "replicas = 2\n")
    + group("serves", SERVES, "")
    + '[groups.trains]\nnnodes = 1\nnproc_per_node = 2\ncommand = ["trains.py"]\n'
    + '[groups.meets]\nnnodes = 2\nnproc_per_node = 1\ncommand = ["meets.py"]\n'
    + '[channels.all]\npeers = ["syncs"]\n[channels.policy]\nsources = ["trains"]\ntargets = ["serves"]\n'
)


class Scene(NamedTuple):
    """A run of the victim's with everything that a run can have. ``home``: its folder,
    which everybody may look into."""

    run: Run
    home: Path
    processes: list[Process]
    listeners: list[Listener]

    def secrets(self) -> set[str]:
        """What only the victim may know."""
        found = {(self.run.state_dir / name).read_text().strip() for name in ("token", "operator-token")}
        for process in self.processes:
            if "REPLICAS_FORKSERVER" in process.environment:
                found.add(SocketAddress.parse(process.environment["REPLICAS_FORKSERVER"]).secret)
            if "REPLICAS_GENERATION" in process.environment:
                found.add(process.environment["REPLICAS_SHIM"])
        assert len(found) > 2
        assert all(len(secret) >= 16 for secret in found)
        return found


@contextmanager
def control_group(delegated: bool) -> Iterator[str]:
    """Shell commands that put the victim into a control group of its own, which it may
    divide."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    root = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    if not delegated:
        yield f"mount -o bind,ro {root} {root}" if root is not None else ""
        return
    if root is None:
        pytest.skip("this machine has control groups cannot be made of version 2")
    folder = root / f"replicas-two-users-{os.getpid()}"  # several workers may run these tests
    folder.mkdir()
    (folder / "victim").mkdir()
    try:
        for path in (folder, folder / "victim"):
            for name in (".", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
                shutil.chown(path / name, VICTIM, VICTIM)
        yield f"echo $$ > {folder}/victim/cgroup.procs"
    finally:
        eventually(lambda: _removed(folder), "the end of the victim's control group")


def _removed(folder: Path) -> bool:
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@pytest.fixture(scope="module", params=[False, True], ids=["control groups cannot be made", "control groups"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with folder_of(VICTIM) as home, control_group(request.param) as before:
        home.chmod(0o755)
        command = as_user(VICTIM, [sys.executable, "-m", "replicas.supervisor"], before=before)
        run = Run(home, TEXT, command=command)
        (home / "trains.py").write_text(TRAINS)
        (home / "meets.py").write_text(MEETS)
        for path in (home, *home.rglob("*")):
            shutil.chown(path, VICTIM, VICTIM)
        try:
            run.start()
            run.wait_line("control at", timeout_s=60)
            _until_whole(run)
            processes = of_run(run)
            yield Scene(run, home, processes, list(listeners(processes)))
        finally:
            run.clean_up()


def of_run(run: Run) -> list[Process]:
    return [process for process in processes_of(VICTIM) if process.environment.get(MARK) == run.mark]


def _until_whole(run: Run) -> None:
    """Until every process of the run is there; what was missing is told."""
    deadline = time.monotonic() + 120
    while True:
        kinds = Counter(process.kind for process in of_run(run))
        assert run.running, run.said()
        status = run.status() if "supervisor" in kinds else None
        if kinds.keys() >= ARGUMENTS.keys() and kinds["sidecar"] == 2 and status is not None and status.ready:
            return
        assert time.monotonic() < deadline, f"{kinds}\n{status}\n{run.said()}"
        time.sleep(0.1)


def as_attacker(program: str, *arguments: str) -> str:
    """What a program of the attacker's prints."""
    command = as_user(ATTACKER, [sys.executable, "-c", program, *arguments])
    found = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


pytestmark = [needs_users, pytest.mark.timeout(240)]


def test_every_listener_has_its_entry(scene: Scene) -> None:
    found = {(kind, one.family) for one in scene.listeners for kind in one.kinds}
    assert found == LISTENERS.keys()
    for one in scene.listeners:
        if one.family == "tcp":
            assert one.address == LOOPBACK, one
        elif one.family == "abstract":
            assert ABSTRACT.fullmatch(one.name), one
        else:
            assert one.name == str(scene.run.state_dir / "control.sock")


KNOCKS = """
import json, socket, sys
found = {}
for family, name in json.loads(sys.argv[1]):
    kind = socket.SOCK_SEQPACKET if family == "abstract" else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.settimeout(20)
        try:
            sock.connect(("\\0" if family == "abstract" else "") + name)
            try:
                sock.send(b"\\x81\\xa4type\\xa6Attach")
            except BrokenPipeError:
                pass
            found[name] = sock.recv(4096).decode("latin1")
        except ConnectionResetError:
            found[name] = ""
        except PermissionError:
            found[name] = "denied"
print(json.dumps(found))
"""


def test_sockets_of_the_machine_serve_their_user_alone(scene: Scene) -> None:
    doors = sorted({(one.family, one.name) for one in scene.listeners if one.family != "tcp"})
    answers = json.loads(as_attacker(KNOCKS, json.dumps(doors)))
    assert answers == {name: "denied" if family == "path" else "" for family, name in doors}


def test_the_control_port_gives_away_no_secret(scene: Scene) -> None:
    base = f"http://{scene.run.endpoint()}"
    for page in ("/status", "/metrics", "/events?after=0&follow=false", "/livez", "/readyz"):
        with urllib.request.urlopen(base + page, timeout=20) as answer:
            text = answer.read().decode()
        assert not [secret for secret in scene.secrets() if secret in text], page
        stores = [str(one.port) for one in scene.listeners if "store" in one.kinds]
        assert not [port for port in stores if re.search(rf"\\b{port}\\b", text)], (page, "it says where the store is")
    for method, page in (
        ("GET", "/logs"),
        ("GET", "/stacks"),
        ("POST", "/drain"),
        ("POST", "/scale"),
        ("POST", "/reload"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(base + page, method=method), timeout=20)
        assert refused.value.code in (401, 404, 405), page
        refused.value.close()


def test_every_file_is_closed_to_others(scene: Scene) -> None:
    """What a run makes, also in a folder that everybody may look into, with the usual
    umask."""
    roots = [scene.home / ".replicas", Path("/dev/shm")]
    for path, found in files_of(VICTIM, roots):
        inside = any((above.stat().st_mode & 0o077) == 0 for above in path.parents if scene.home in above.parents)
        assert inside or not found.st_mode & 0o077, (path, oct(found.st_mode))
    others = {path for process in scene.processes for path in process.written if scene.home not in path.parents}
    assert not {path for path in others if not str(path).startswith(("/dev/", "/memfd:", "/proc/"))}, others


READS = """
import json, os, sys
found = []
for path in json.loads(sys.argv[1]):
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        found.append(path)
    except OSError:
        pass
print(json.dumps(found))
"""


def test_another_user_reads_nothing(scene: Scene) -> None:
    files = [str(path) for path, _ in files_of(VICTIM, [scene.home / ".replicas"])]
    inner = ("environ", "maps", "mem", "fd", "stack", "syscall", "map_files", "cwd/.", "root/.")
    processes = [f"/proc/{process.pid}/{name}" for process in scene.processes for name in inner]
    assert len(files) > 30
    readable = json.loads(as_attacker(READS, json.dumps(files + processes)))
    # the kernel lets everybody open these two, and read nothing of another user's in
    # them
    assert [path for path in readable if not path.endswith(("/maps", "/syscall", "/stack", "/map_files"))] == []
    for path in readable:
        assert as_attacker("import sys\ntry: print(open(sys.argv[1]).read())\nexcept OSError: pass", path).strip() == ""


def test_arguments_tell_no_secret(scene: Scene) -> None:
    for process in scene.processes:
        line = " ".join(process.arguments)
        rest = line.partition(" ")[2] if process.kind != "pump" else line
        assert re.fullmatch(ARGUMENTS[process.kind], rest, re.DOTALL), (process.kind, rest)
        assert not [secret for secret in scene.secrets() if secret in line], line


def test_every_variable_has_its_entry(scene: Scene) -> None:
    found = {name for one in scene.processes for name in one.environment if name.startswith("REPLICA")}
    assert found == VARIABLES.keys()
    for process in scene.processes:
        for name, value in process.environment.items():
            if VARIABLES.get(name) != "SECRET":
                assert not [secret for secret in scene.secrets() if secret in value], (process.kind, name)


SIGNALS = """
import os, sys
for pid in map(int, sys.argv[1:]):
    try:
        os.kill(pid, 0)
        print(pid)
    except PermissionError:
        pass
"""


def test_another_user_signals_nobody(scene: Scene) -> None:
    assert as_attacker(SIGNALS, *[str(process.pid) for process in scene.processes]) == ""
