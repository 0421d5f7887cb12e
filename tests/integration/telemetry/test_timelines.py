"""What a real run leaves to look at: a timeline in which a killed replica shows, and
OpenTelemetry spans that continue the trainer's own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from replicas.cli.main import main
from replicas.telemetry.event_log import read as read_events
from replicas.telemetry.spans import read
from replicas.telemetry.tracks import parts
from tests.support.programs import SERVES, group
from tests.support.runs import running
from tests.support.showing.otlp import collecting
from tests.support.showing.trace_rules import check_trace
from tests.support.waits import eventually

TRAINS = """
import os, time
import torch, replicas
from opentelemetry.sdk.trace import TracerProvider

tracer = TracerProvider().get_tracer("trainer")
step = 0
with replicas.join("policy") as channel:
    while not os.path.exists("stop"):
        step += 1
        with tracer.start_as_current_span("step") as span:
            print(f"step {step} {span.get_span_context().span_id:016x}", flush=True)
            receipt = channel.publish({"a": torch.full((1000,), step)}, meta={"step": step}).wait()
        time.sleep(0.2)
"""
STARTS_S = 150.0
"""Programs import torch, beside other tests."""
CHANNEL = """
[[channels.policy.sources]]
group = "trainer"
[[channels.policy.targets]]
group = "rollout"
"""


@pytest.mark.timeout(400)
def test_a_run_with_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = group("trainer", TRAINS) + group("rollout", SERVES, "replicas = 2") + CHANNEL
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with running(tmp_path, text, stop_when='["trainer"]') as run:
            rollout = eventually(
                lambda: next((one for one in run.status().groups[1].replicas if one.state == "ready"), None),
                "a ready rollout",
                timeout_s=STARTS_S,
            )
            assert rollout.pid is not None
            os.kill(rollout.pid, signal.SIGKILL)
            run.wait_line(f"{rollout.name}: ready", timeout_s=STARTS_S)
            eventually(
                lambda: {one.versions.get("policy", 0) > 3 for one in run.status().groups[1].replicas} == {True},
                "versions on both rollouts",
                timeout_s=STARTS_S,
            )
            eventually(lambda: (last := run.status().channels[0].last_sync) and last.members == 2, "a version for both")
            (tmp_path / "stop").touch()
            assert run.wait() == 0
            run.assert_nothing_left()

        spans = collector.spans()
        assert {"publish policy", "pack", "commit", "load"} <= {span.name for span in spans}
        callers = {line.split()[2] for line in run.log("trainer/0").read_text().splitlines() if line.startswith("step")}
        published = [span for span in spans if span.name == "publish policy"]
        assert {span.parent_span_id.hex() for span in published} <= callers
        assert len(published) > 3
        ids = {span.span_id for span in published}
        assert all(span.parent_span_id in ids for span in spans if span.name in ("pack", "commit", "load"))
        assert collector.about()["replicas.run"] == "test"

    found = read(read_events(run.state_dir / "events.jsonl"))
    track = f"replica {rollout.name}"
    first, second = [span for span in found.spans() if (span.track, span.kind) == (track, "generation")][:2]
    assert first.attributes["exit_codes"] == {"0": -9}
    (node,) = first.attributes["nodes"]
    assert second.attributes["nodes"] == (node,)
    syncs = [span for span in found.spans() if span.kind == "sync"]
    assert {span.attributes["publisher"] for span in syncs} == {"trainer/0"}
    steps = [int(span.attributes["step"]) for span in syncs]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    whole = next(span for span in syncs if span.attributes.get("members") == 2)
    assert set(whole.attributes["held"]) == {"rollout/0", "rollout/1"}
    assert max(whole.attributes["held"].values()) <= whole.attributes["seconds"] + 1e-6
    assert "pack" in {part.name for part in parts(whole)}
    assert main(["report", str(run.state_dir), "--trace", "run.json"]) == 0
    events = check_trace(tmp_path / "run.json")
    assert {one["args"]["name"] for one in events if one["name"] == "process_name"} == {
        "run",
        "channel policy",
        f"node {node}",
        "replica rollout/0",
        "replica rollout/1",
        "replica trainer/0",
    }
    assert sum(one["ph"] == "s" for one in events) == sum(one["ph"] == "f" for one in events) > 3
