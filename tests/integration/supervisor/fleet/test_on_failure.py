"""What a replica that has failed for good takes with it, with real processes."""

from __future__ import annotations

from pathlib import Path

from replicas.control.client import Client
from replicas.control.commands import ResetFailed
from tests.support.programs import SLEEPS, group
from tests.support.runs import alive, running

FAILS = "import os, sys; sys.exit(0 if os.path.exists('mended') else 'no engine')"
CHANNEL = '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
RULES = 'restart = { initial_delay = "10ms", max_restarts = 30 }\n'


def test_a_rollout_that_keeps_failing_does_not_end_the_trainer(tmp_path: Path) -> None:
    optional = group("rollout", FAILS, f"{RULES}min_ready = 0")
    with running(tmp_path, group("trainer", SLEEPS) + optional + CHANNEL) as run:
        line = run.wait_line("rollout/0: failed: ", timeout_s=90.0)
        assert "rank 0 exited with code 1: no engine; 3 generations in a row without a new step or version" in line
        trainer, rollout = run.status().groups
        assert (rollout.replicas[0].state, rollout.on_failure) == ("failed", "replica")
        assert (rollout.replicas[0].cycles, rollout.no_progress_cycles) == (3, 3)
        assert (rollout.no_progress_remaining_ratio, rollout.restart_budget_remaining_ratio > 0.9) == (0.0, True)
        assert (trainer.on_failure, alive(trainer.replicas[0].pid or 0)) == ("run", True)
        (tmp_path / "mended").touch()
        client = Client(f"unix:{run.state_dir}/control.sock", timeout_s=60.0)
        assert client.order(ResetFailed()).result == ["rollout/0"]
        run.wait_line(
            "by order (reset-failed): starting rollout/0 again; restart budget of group rollout is full again",
            timeout_s=90.0,
        )
        run.wait_line("rollout/0: finished", timeout_s=90.0)
        assert run.status().groups[1].no_progress_remaining_ratio == 1.0
        run.end()


def test_a_run_whose_only_rollout_has_failed_for_good_ends(tmp_path: Path) -> None:
    text = group("trainer", SLEEPS) + group("rollout", FAILS, RULES) + CHANNEL
    with running(tmp_path, text) as run:
        assert run.wait(timeout_s=60.0) == 1
        run.assert_nothing_left()
    assert any("group rollout failed (0 of 1 replicas are left) with replica rollout/0: " in line for line in run.lines)
