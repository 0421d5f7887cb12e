"""Export syncs as OpenTelemetry spans, made from the run's events.

A publish is a span, and a child of the span in which its trainer called ``publish``
(``meta["traceparent"]``, :func:`replicas.messages.arguments.with_trace`). Its phases,
the bytes between two members, and the load of each replica are its children.

OpenTelemetry's own variables (``OTEL_*``) say which spans go where; without an endpoint
or exporter in them nothing is exported or imported. All work runs on a thread of its
own, which imports the SDK, as a collector may be slow or away; spans that do not fit
its queue are dropped and counted. The extra ``otel`` has the packages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import replicas
from replicas.common.background_queue import BackgroundQueue
from replicas.common.logs import Log
from replicas.telemetry.events import Record
from replicas.telemetry.spans import Spans
from replicas.telemetry.tracks import Span, parts, replica_of

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

log = Log("replicas.telemetry.otel")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_QUEUE = 10_000
_SYNCS = 256
"""Syncs whose loads are still exported: as many as a replica may be behind."""
_TOLD = ("channel", "version", "outcome", "publisher", "nbytes", "moved_nbytes", "members", "lost", "step", "seconds")


def exporters(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the exporters that the ``OTEL_*`` variables ask for; an empty
    list if spans are not to be exported."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    named = environ.get(_EXPORTER, "").strip() or ("otlp" if any(environ.get(one) for one in _ENDPOINTS) else "none")
    protocol = next((environ[one] for one in _PROTOCOLS if environ.get(one)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    found = [one.strip() for one in named.split(",")]
    return [otlp if one == "otlp" else one for one in found if one not in ("", "none")]


class Traces:
    """Exports a run's syncs (publishes with their transfers) to OpenTelemetry.

    :param run: its name. :param environ: where the ``OTEL_*`` variables are read.
    """

    def __init__(self, run: str, environ: Mapping[str, str]) -> None:
        """Prepare only: the first event starts the thread, which imports the SDK.

        :param run: name of the run.
        :param environ: the environment, with OpenTelemetry's variables.
        """
        self._run, self._environ = run, environ
        self._spans = Spans(most=_SYNCS)
        self._writer: _Writer | None = None
        self._useless = False
        self._queue: BackgroundQueue[Record | None] = BackgroundQueue(
            "replicas-otel", self._export_record, self._missed, _QUEUE
        )

    def put(self, record: Record) -> None:
        """Queue the next event for the thread, or drop it if the queue is full; never
        wait."""
        self._queue.put(record)

    def close(self, timeout_s: float = 3.0) -> None:
        """Export the spans that are left; block for at most ``timeout_s`` seconds, and
        log if that is not enough. The thread goes on until this process ends."""
        self._queue.put(None)
        if not self._queue.flush(timeout_s):
            log.warning("ending without exporting the last spans, which took more than %g s", timeout_s)

    def _missed(self, count: int) -> None:
        """Log that ``count`` events were dropped, as the queue was full. Called by the
        queue, on the exporting thread, before the next event."""
        log.warning("skipping %d events in the exported spans: the collector does not keep up", count)

    def _export_record(self, record: Record | None) -> None:
        """On the exporting thread: export the spans that an event has ended, or for
        None all that are left. An error is logged, and ends all export."""
        if self._useless:
            return
        try:
            if record is None:
                if self._writer is not None:
                    self._writer.flush()
                return
            self._writer = self._writer or _Writer(self._run, self._environ)
            self._spans.feed(record)
            for span in self._spans.changed(record.seq - 1)[0]:
                self._writer.write(span, record.seq)
        except ImportError as error:
            self._useless = True
            names = "OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_TRACES_EXPORTER"
            log.warning("exporting no spans, though %s is set: %s (pip install torch-replicas[otel])", names, error)
        except Exception:  # the SDK or an exporter may raise anything: the run continues without spans
            self._useless = True
            log.exception("exporting no more spans, after a bug; please report this")


class _Writer:
    """Exports spans of :mod:`.tracks` by OpenTelemetry's SDK, which it imports."""

    def __init__(self, run: str, environ: Mapping[str, str]) -> None:
        """Import the SDK and load the exporters, on the exporting thread. Raise
        ImportError if one is missing.

        :param run: name of the run, an attribute of all spans.
        :param environ: the environment, with OpenTelemetry's variables.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"replicas.run": run}
        if not environ.get("OTEL_SERVICE_NAME") and "service.name" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            about["service.name"] = "replicas"
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        for name in exporters(environ):
            found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=name)), None)
            if found is None:
                raise ImportError(f"no package here has the exporter {name}")
            self._provider.add_span_processor(BatchSpanProcessor(found.load()()))
        self._tracer = self._provider.get_tracer("replicas", replicas.__version__)
        self._known: OrderedDict[int, SpanContext] = OrderedDict()
        """The spans of syncs, by the numbers of their events."""

    def write(self, span: Span, seq: int) -> None:
        """Export a span that the event ``seq`` has changed: a sync or catch-up that has
        ended, or the load of a version that has begun; ignore any other."""
        channel = span.track.removeprefix("channel ")
        if span.id == seq and span.kind == "sync":
            self._sync(span, channel)
        elif span.id == seq and span.kind == "version":
            for load in parts(span):
                about = {"channel": load.attributes["channel"], "version": load.attributes["version"]}
                self._child(load, "load", about | {"replica": load.track.removeprefix("replica ")})
        elif span.id == seq and span.kind == "catch_up":
            facts = {"channel": channel, "version": span.attributes["version"]}
            self._export_span(span, f"catch_up {channel}", facts | {"members": tuple(span.attributes["members"])}, None)

    def _sync(self, span: Span, channel: str) -> None:
        """Export a sync, as a child of the span in which its trainer published, and the
        parts of the sync as its own children.

        Store the context of the exported span, as parent of the loads that follow.
        """
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts = span.attributes | {"channel": channel}
        caller = TraceContextTextMapPropagator().extract({"traceparent": facts.get("trace", "")})
        about = {name: facts[name] for name in _TOLD if facts.get(name) is not None}
        if slowest := facts.get("slowest"):
            about |= {"slowest": slowest, "slowest_s": facts.get("held", {}).get(replica_of(slowest), facts["seconds"])}
        self._known[span.id] = self._export_span(span, f"publish {channel}", about, caller)
        if len(self._known) > _SYNCS:
            self._known.popitem(last=False)
        for part in parts(span):
            moved = part.kind == "transfer"
            self._child(part, "pull" if moved else part.name, part.attributes)

    def _child(self, span: Span, name: str, about: Mapping[str, Any]) -> None:
        """Export a span under this name as a child of its sync's span; do nothing if
        that is not known.

        :param about: attributes of the exported span.
        """
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        if (parent := self._known.get(span.parent or 0)) is not None:  # else the parent is of an earlier supervisor
            self._export_span(span, name, about, set_span_in_context(NonRecordingSpan(parent)))

    def _export_span(self, span: Span, name: str, about: Mapping[str, Any], context: Any) -> SpanContext:
        """Export a span that has ended, under this name; return its own context.

        :param about: attributes of the exported span.
        :param context: OpenTelemetry's context of the parent; None: no parent.
        """
        from opentelemetry.trace import StatusCode

        outcome = span.attributes.get("outcome", "committed")
        facts = {f"replicas.{key}": value for key, value in about.items()} | {"replicas.event": span.id}
        told = self._tracer.start_span(name, context, attributes=facts, start_time=_ns(span.start))
        if outcome != "committed":
            told.set_attribute("error.type", outcome)
            told.set_status(StatusCode.ERROR, span.attributes.get("error", ""))
        told.end(_ns(span.start if span.end is None else span.end))
        return told.get_span_context()

    def flush(self) -> None:
        """Export the spans that wait in the SDK. Blocks as long as exporters try."""
        self._provider.force_flush()


def _ns(seconds: float) -> int:
    """Return seconds in nanoseconds."""
    return round(seconds * 1e9)
