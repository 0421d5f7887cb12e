"""Which code the processes of a run have: that of their supervisor, or a word about
it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from replicas import __version__
from replicas.common import own_code
from tests.support.runs import ROOT
from tests.support.shims import shim


def test_a_shim_that_does_not_know_its_orders_says_that_its_code_was_replaced(tmp_path: Path) -> None:
    with shim(tmp_path, "raise AssertionError", pipes="of another release", release="0.0.7") as run:
        report = run.report()
        assert run.gone() == 0
    assert report.outcome == "failed"
    assert "cannot be started: the code of replicas was replaced under the running supervisor" in report.text
    assert f"which is of release 0.0.7, by code of release {__version__}: restart the supervisor" in report.text


def test_a_shim_says_of_which_release_it_is(tmp_path: Path) -> None:
    with shim(tmp_path, "") as run:
        run.started()
        assert run.state.release == __version__


PARTS = {"supervisor/shim/shim.py": "shim-0.log", "supervisor/shim/launcher.py": "torchrun-0.log"}
SHOWS = "from __future__ import annotations\n\nprint('of the checkout', flush=True)\n"
CONFIG = """
schema_version = 1
[run]
name = "r"
[control]
listen = "127.0.0.1:0"
[store]
port = 0
[groups.a]
command = ["rank.py"]
[channels.c]
peers = ["a"]
"""


def test_a_checkout_that_is_not_installed_runs_its_own_code(tmp_path: Path) -> None:
    """The working folder is left out of the path of what is started; an installed
    package may be another one."""
    shutil.copytree(ROOT / "replicas", tmp_path / "replicas", ignore=shutil.ignore_patterns("__pycache__"))
    for part in (*PARTS, "sidecar/forkserver.py"):
        path = tmp_path / "replicas" / part
        path.write_text(path.read_text().replace("from __future__ import annotations\n", SHOWS))
    (tmp_path / "rank.py").write_text("import os, time\nprint('path', os.environ.get('PYTHONPATH'))\ntime.sleep(0.5)\n")
    (tmp_path / "r.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "replicas.supervisor", "r.toml"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    logs = tmp_path / ".replicas" / "r" / "logs" / "a" / "0" / "gen-1"
    assert {name: "of the checkout" in (logs / name).read_text() for name in PARTS.values()} == dict.fromkeys(
        PARTS.values(), True
    )
    assert "of the checkout" in done.stderr, "the forkserver's output is that of the agent"
    assert (logs / "rank-0.log").read_text() == "path None\n", "programs of users get the path that they had"


def test_the_code_of_an_installation_is_found_anyway() -> None:
    assert own_code.findable({"PYTHONPATH": "/x"})["PYTHONPATH"] == f"{ROOT}{os.pathsep}/x"
    environment = own_code.findable({})
    own_code.restore_path(environment, {})
    assert environment == {}
    own_code.restore_path(environment, {"PYTHONPATH": "/x"})
    assert environment == {"PYTHONPATH": "/x"}
