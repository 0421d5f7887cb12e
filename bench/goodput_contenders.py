"""The contenders of ``bench_goodput.py``: how each is started and kept running, what
cannot run here and why.

This library's runs and torchrun restart their processes on their own. torchft leaves
that to its user: :class:`Kept` starts each of its processes again as soon as it has
ended.

Whether a released library can run here is asked of the library (``PROBES``): of TRL's
client, with a stub of its server; of verl's checkpoint engines and platforms.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import replicas
from bench.goodput_plan import Plan
from bench.peers import HOW, python_with
from bench.support import ROOT
from bench.trees import Tree, supervised, until

__all__ = ["CONTENDERS", "Running", "left_out", "make_field", "releases"]

PROGRAM = str(ROOT / "bench" / "goodput_rank.py")
ENGINES = ROOT / ".venv-engines" / "bin" / "python"
ENGINES_HOW = "python tests/engines/install.py .venv-engines"
PROBE_S = 300.0
LIGHTHOUSE_MS = {"heartbeat_timeout_ms": 1000, "join_timeout_ms": 10000, "quorum_tick_ms": 50}
"""torchft finds a dead replica by its heartbeats: after 5 s by default."""
APART = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
RESTART = '{ initial_delay = "1ms", max_delay = "1ms", max_restarts = 1000, no_progress_cycles = 0 }'

TRL = """
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from trl.generation.vllm_client import VLLMClient
ANSWER = {"data": [{"id": "stub"}], "world_size": 1, "vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}
class Stub(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())
    def log_message(self, *about):
        pass
server = HTTPServer(("127.0.0.1", 0), Stub)
threading.Thread(target=server.serve_forever, daemon=True).start()
try:
    VLLMClient(base_url=f"http://127.0.0.1:{server.server_port}").init_communicator(device="cpu")
except NotImplementedError as error:
    print(f"answer: {error}")
"""
VERL = """
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry
own = ", ".join(sorted({*CheckpointEngineRegistry._registry} - {"replicas"}))
platforms = ", ".join(PlatformRegistry.registered_names())
if not get_platform().is_available():
    print(f"answer: none of its platforms ({platforms}) is available, and without one its engines are: {own}")
"""
PROBES = {"trl": TRL, "verl": VERL}
"""Programs that print why the released package cannot run here; nothing, if it can."""


@dataclass
class Running:
    """A contender at work. ``look`` is called often: it starts again what has ended."""

    tree: Tree
    look: Callable[[], None] = lambda: None


def make_field(folder: Path, plan: Plan) -> None:
    """What :class:`bench.goodput_rank.Field` reads."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({**asdict(plan), "batch": plan.batch}))
    (folder / "gate").write_bytes(bytes(8))


def _replicas(folder: Path, plan: Plan, preload: str) -> AbstractContextManager[Running]:
    """A run of this library, all keys at their defaults but those of restarts."""

    def group(role: str) -> str:
        return f'[groups.{role}]\ncommand = ["{PROGRAM}", "replicas", "{folder}", "{role}"]\nrestart = {RESTART}\n'

    text = group("trainer") + group("rollout") + f"replicas = {plan.rollouts}\n{preload}"
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'

    @contextmanager
    def running() -> Iterator[Running]:
        with supervised(folder / "run", text) as run:
            yield Running(run)

    return running()


def warm(folder: Path, plan: Plan) -> AbstractContextManager[Running]:
    return _replicas(folder, plan, 'preload = ["torch"]\n')


def cold(folder: Path, plan: Plan) -> AbstractContextManager[Running]:
    return _replicas(folder, plan, "")


@contextmanager
def _tree(command: Sequence[str], folder: Path) -> Iterator[Tree]:
    """Ended with the block, whatever happened in it."""
    (folder / "run").mkdir()
    tree = Tree(command, folder / "run")
    try:
        yield tree
    finally:
        tree.close()


@contextmanager
def torchrun(folder: Path, plan: Plan) -> Iterator[Running]:
    """One job of all processes, which torchrun restarts together.

    By default torch 2.13 keeps one store for all attempts: ranks that start again find
    addresses of the last attempt there, and mostly fail. ``APART`` gives each attempt a
    store of its own.
    """
    launcher = ["env", APART, sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
    size = f"--nproc-per-node={plan.rollouts + 1}"
    with _tree([*launcher, size, PROGRAM, "torchrun", str(folder)], folder) as tree:
        yield Running(tree)


class Kept:
    """Programs that are started again whenever they have ended."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._programs: list[tuple[Sequence[str], dict[str, str], subprocess.Popen[bytes]]] = []

    def start(self, command: Sequence[str], **environment: str) -> None:
        self._programs.append((command, environment, self._tree.start(command, **environment)))

    def look(self) -> None:
        for number, (command, environment, program) in enumerate(self._programs):
            if program.poll() is not None:
                self._programs[number] = (command, environment, self._tree.start(command, **environment))


@contextmanager
def torchft(folder: Path, plan: Plan) -> Iterator[Running]:
    """A lighthouse, and a replica group for the trainer and for each rollout."""
    python = python_with("torchft") or sys.executable
    code = "import json, sys, time; from torchft.coordination import LighthouseServer\n"
    code += 'server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **json.loads(sys.argv[1]))\n'
    code += 'open("address", "w").write(server.address()); time.sleep(1e6)'
    with _tree([python, "-c", code, json.dumps(LIGHTHOUSE_MS)], folder) as tree:
        address = folder / "run" / "address"
        until(lambda: address.exists() and address.read_text(), "the lighthouse is up")
        kept = Kept(tree)
        program, where = [python, PROGRAM, "torchft", str(folder)], {"TORCHFT_LIGHTHOUSE": address.read_text()}
        kept.start([*program, "trainer"], **where)
        until(lambda: any((folder / "gate").read_bytes()), "the trainer is up")
        for number in range(plan.rollouts):
            kept.start([*program, "rollout"], GOODPUT_ROLLOUT=str(number), **where)
        yield Running(tree, kept.look)


CONTENDERS: dict[str, Callable[[Path, Plan], AbstractContextManager[Running]]] = {
    "warm": warm,
    "cold": cold,
    "torchrun": torchrun,
    "torchft": torchft,
}


def left_out(ask: bool) -> dict[str, str]:
    """Why some of the contenders do not run here, by name; with ``ask``, which takes
    half a minute, also the released libraries that never do."""
    found = {} if python_with("torchft") else {"torchft": f"not installed: {HOW}"}
    return found | ({name: why_not(name) for name in PROBES} if ask else {})


def releases() -> dict[str, str]:
    """Of what runs here."""
    found = {"replicas": replicas.__version__, "torch": release("torch")}
    python = python_with("torchft")
    return found if python is None else {**found, "torchft": release("torchft", python)}


def release(package: str, python: str = sys.executable) -> str:
    """The release of a package in the environment of ``python``."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def why_not(package: str) -> str:
    """Why the released ``package`` cannot take part here, in its own words."""
    if not ENGINES.exists():
        return f"not installed: {ENGINES_HOW}"
    done = subprocess.run(
        [ENGINES, "-W", "ignore", "-c", PROBES[package]], cwd=ROOT, capture_output=True, text=True, timeout=PROBE_S
    )
    found = [line.removeprefix("answer: ") for line in done.stdout.splitlines() if line.startswith("answer: ")]
    if done.returncode:
        raise RuntimeError(f"asking {package} failed:\n{done.stderr}")
    reason = found[0] if found else "it could run here, with a GPU; this benchmark has no program for that"
    return f"{package} {release(package, str(ENGINES))}: {reason}"
