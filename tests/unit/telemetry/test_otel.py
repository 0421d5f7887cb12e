"""Syncs as OpenTelemetry spans: what they say, whose children they are, and where they
go by OpenTelemetry's own variables.

Covers: telemetry/otel.py.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from replicas.core.base.effects import CaughtUp, ReplicaLoaded
from replicas.messages.arguments import with_trace
from replicas.messages.carried import Meta
from replicas.messages.identity import Member
from replicas.telemetry import otel
from replicas.telemetry.events import Event, Record, RunStarted
from replicas.telemetry.otel import Traces, exporters
from tests.support.showing.otlp import collecting
from tests.unit.telemetry.test_spans import sync

TRACE, CALLER = 0xABC, 0xDEF
TRACEPARENT = f"00-{TRACE:032x}-{CALLER:016x}-01"
PHASES = {"pack": 0.5, "transfer": 1.0, "commit": 0.5}


def exported(*happened: Event) -> dict[str, ReadableSpan]:
    """The spans of these events, one a second, by name."""
    memory = InMemorySpanExporter()
    traces = Traces("grpo", {"OTEL_TRACES_EXPORTER": "memory"})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(otel, "entry_points", lambda **_: [SimpleNamespace(load=lambda: lambda: memory)])
        traces.put(Record(1, 100.0, RunStarted(run="grpo", pid=1, version="0")))
        for number, event in enumerate(happened, 2):
            traces.put(Record(number, 99.0 + number, event))
        traces.close()
    return {span.name: span for span in memory.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_a_sync_is_a_child_of_its_trainers_span() -> None:
    pulled = {"rollout/0/0": {"trainer/0/0": 7}}
    more = {
        "trace": TRACEPARENT,
        "phases": PHASES,
        "pulled": pulled,
        "held": {"rollout/0": 1.25},
        "slowest": "rollout/0/0",
    }
    found = exported(sync(1, **more, step=4), ReplicaLoaded("policy", "rollout", 0, 1, 0.25))
    publish = found["publish policy"]
    context = publish.get_span_context()
    assert context is not None
    assert (context.trace_id, parent(publish)) == (TRACE, CALLER)
    assert (publish.start_time, publish.end_time) == (99_000_000_000, 101_000_000_000)
    assert publish.status.is_ok or publish.status.is_unset
    told = attributes(publish)
    assert (told["replicas.version"], told["replicas.step"], told["replicas.slowest"]) == (1, 4, "rollout/0/0")
    assert publish.resource.attributes["service.name"] == "replicas"
    assert publish.resource.attributes["replicas.run"] == "grpo"
    children = {name: span for name, span in found.items() if span is not publish}
    assert set(children) == {"pack", "transfer", "commit", "pull", "load"}
    assert {parent(span) for span in children.values()} == {context.span_id}
    assert attributes(found["pull"])["replicas.nbytes"] == 7
    load = found["load"]
    assert (load.start_time, load.end_time) == (101_750_000_000, 102_000_000_000)
    assert attributes(load)["replicas.replica"] == "rollout/0"


def test_a_failed_sync_is_an_error_without_a_parent() -> None:
    lost = exported(sync(1, outcome="peers_lost", error="rollout/0/0 was lost"))["publish policy"]
    assert lost.parent is None
    assert (lost.status.status_code, lost.status.description) == (trace.StatusCode.ERROR, "rollout/0/0 was lost")
    assert attributes(lost)["error.type"] == "peers_lost"


def test_catch_ups_and_loads_of_unknown_syncs() -> None:
    found = exported(
        CaughtUp("policy", 3, (Member("rollout", 0, 0, "n"),), 5, seconds=0.5),
        ReplicaLoaded("policy", "rollout", 0, 3, 0.1),
    )
    assert set(found) == {"catch_up policy"}
    assert attributes(found["catch_up policy"])["replicas.members"] == ("rollout/0/0",)


def test_a_publish_takes_the_callers_span_with_it() -> None:
    with TracerProvider().get_tracer("trainer").start_as_current_span("step") as span:
        caller = span.get_span_context()
        said = f"00-{caller.trace_id:032x}-{caller.span_id:016x}-{caller.trace_flags:02x}"
        assert with_trace("publish", {"step": 3}) == {"step": 3, "traceparent": said}
        assert with_trace("publish", {"traceparent": "mine"}) == {"traceparent": "mine"}
        late = with_trace("publish", lambda: {"norm": 1.5})
        wrong = with_trace("publish", lambda: None)  # type: ignore[arg-type,return-value]  # as a program may
    assert callable(late)
    assert late() == {"norm": 1.5, "traceparent": said}
    assert callable(wrong)
    assert wrong() is None  # refused where all meta is checked
    given: Meta = {"step": 4}
    assert with_trace("publish", given) is given


def test_without_opentelemetry_there_is_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    given: Meta = {"step": 4}
    assert with_trace("publish", given) is given


@pytest.mark.slow
def test_a_supervisor_imports_it_only_where_it_is_wanted() -> None:
    code = "import replicas.supervisor.operator, replicas.cli.main, sys; print([m for m in sys.modules if 'telemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "replicas.telemetry.otel" in done.stdout
    assert "opentelemetry" not in done.stdout


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c", "OTEL_SDK_DISABLED": "True"}, []),
    ],
)
def test_the_variables_of_opentelemetry_say_where(environ: dict[str, str], names: list[str]) -> None:
    assert exporters(environ) == names


@pytest.mark.slow
def test_a_collector_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_RESOURCE_ATTRIBUTES": "team=rl"}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        traces = Traces("grpo", environ)
        traces.put(Record(1, 100.0, sync(1, trace=TRACEPARENT, phases=PHASES)))
        traces.close(10.0)
    assert {"service.name": "replicas", "replicas.run": "grpo", "team": "rl"}.items() <= collector.about().items()
    spans = {span.name: span for span in collector.spans()}
    assert set(spans) == {"publish policy", "pack", "transfer", "commit"}
    assert spans["publish policy"].trace_id == TRACE.to_bytes(16, "big")
    assert spans["publish policy"].parent_span_id == CALLER.to_bytes(8, "big")


@pytest.mark.slow
def test_a_collector_that_never_answers_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", where)
        traces = Traces("grpo", {"OTEL_EXPORTER_OTLP_ENDPOINT": where})
        traces.put(Record(1, 100.0, sync(1)))
        began = time.monotonic()
        with caplog.at_level(logging.WARNING):
            traces.close(1.5)
        assert 1.0 < time.monotonic() - began < 5.0
    assert "ending without exporting the last spans, which took more than 1.5 s" in caplog.text


def test_without_the_packages_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    traces = Traces("grpo", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            traces.put(Record(number, 100.0, sync(number)))
        traces.close()
    assert caplog.text.count("pip install torch-replicas[otel]") == 1


def test_an_exporter_that_nobody_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    traces = Traces("grpo", {"OTEL_TRACES_EXPORTER": "nonsense"})
    with caplog.at_level(logging.WARNING):
        traces.put(Record(1, 100.0, sync(1)))
        traces.close()
    assert "no package here has the exporter nonsense" in caplog.text
