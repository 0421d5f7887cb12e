"""torchrun replicas: several nodes, the ranks' own process group, exit reports,
logs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher_api

from replicas.control.exit_codes import CUT
from tests.support.runs import running
from tests.support.waits import eventually

MEETS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(value)
print("sum", value.item(), "of", dist.get_world_size(), os.environ["MASTER_ADDR"], os.environ["LOCAL_RANK"], flush=True)
dist.destroy_process_group()
"""

FAILS = """
import os, time, sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        print("so it goes")
        raise RuntimeError("rank one is unwell")
    time.sleep(600)
main()
"""


def test_a_replica_of_two_nodes_has_its_own_default_group(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    text = '[groups.a]\nreplicas = 1\nnnodes = 2\nnproc_per_node = 1\ncommand = ["meets.py"]\n'
    with running(tmp_path, text) as run:
        assert run.wait(timeout_s=60) == 0, run.lines
        run.assert_nothing_left()
        for rank in range(2):
            assert (
                run.log("a/0", rank=rank).read_text().splitlines()[-1] == "sum 3.0 of 2 127.0.0.1 0"
            )  # Gloo may have a line


UNPICKLES = """
import os, pickle
from replicas.supervisor.shim.launcher import forbid_pickles
class Evil:
    def __reduce__(self):
        return os._exit, (3,)
plain, evil = pickle.dumps({"a": [1, 2.0, b"x", None]}), pickle.dumps(Evil())
forbid_pickles()
assert pickle.loads(plain) == {"a": [1, 2.0, b"x", None]}
for load in (pickle.loads, pickle._loads):
    try:
        load(evil)
    except PermissionError as error:
        print(error)
"""


def test_no_pickle_names_a_function_in_the_launcher() -> None:
    done = subprocess.run([sys.executable, "-c", UNPICKLES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "a pickle names posix._exit: torchrun may load none here\n" * 2


def test_torch_has_what_the_launcher_replaces() -> None:
    """Without it replicas start and end all the same, but later, and nodes look their
    ranks up in the store."""
    assert hasattr(launcher_api, "LocalElasticAgent")
    assert hasattr(LocalElasticAgent, "_assign_worker_ranks")


def test_the_rank_that_failed_first_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    text = '[groups.a]\nnnodes = 2\nnproc_per_node = 1\ncommand = ["fails.py"]\nrestart = { policy = "never" }\n'
    with running(tmp_path, text) as run:
        assert run.wait(timeout_s=60) == 1
        run.assert_nothing_left()
    assert any(
        "a/0: failed: rank 1 exited with code 1: RuntimeError: rank one is unwell; restart policy is never" in one
        for one in run.lines
    ), run.lines
    # its log, and the error that torchelastic has too, but once
    told = [one for one in run.lines if one.startswith("    | ")]
    assert told[-1] == "    | RuntimeError: rank one is unwell"
    assert (told.count(told[-1]), told.count("    | so it goes")) == (1, 1)
    names = sorted(path.name for path in (run.state_dir / "logs/a/0/gen-1").iterdir() if path.suffix != ".times")
    assert names == [*("rank-0.log", "rank-1.log"), *("shim-0.log", "shim-1.log", "torchrun-0.log", "torchrun-1.log")]


def test_workers_that_ignore_sigterm_do_not_hold_up_a_drain(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    text = '[groups.a]\nnproc_per_node = 2\ncommand = ["deaf.py"]\nstop_timeout = "1s"\n'
    with running(tmp_path, text) as run:
        logs = [run.log("a/0", rank=rank) for rank in range(2)]
        eventually(lambda: all(log.exists() and log.read_text() for log in logs), "both ranks")
        # torchrun's stores listen on the local address, never on all
        listening = Path("/proc/net/tcp6").read_text().splitlines()[1:]
        inodes = {line.split()[9] for line in listening if line.split()[3] == "0A"}
        launcher = run.find("supervisor.shim.launcher")
        held = {path.readlink().name for path in Path(f"/proc/{launcher}/fd").iterdir()}
        assert not any(f"socket:[{inode}]" in held for inode in inodes)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=10) == CUT
        assert any("a/0: stopped: killed 1 s after SIGTERM" in line for line in run.lines)
        run.assert_nothing_left()


SAVES = """
import os, signal, time
def save(*_):
    time.sleep(5.4)
    print("saved", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(1)
"""


def test_ranks_have_the_whole_time_that_was_promised(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    text = '[groups.a]\nnproc_per_node = 2\ncommand = ["saves.py"]\nstop_timeout = "6s"\n'
    with running(tmp_path, text) as run:
        logs = [run.log("a/0", rank=rank) for rank in range(2)]
        eventually(lambda: all(log.exists() and log.read_text() for log in logs), "both ranks", timeout_s=60.0)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=60) == 0, run.lines
        assert [run.log("a/0", rank=rank).read_text() for rank in range(2)] == ["up\nsaved\n"] * 2
        run.assert_nothing_left()
