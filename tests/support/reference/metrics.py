"""The page of metrics, from one scrape of an empty run: it yields every family."""

from __future__ import annotations

from prometheus_client.core import Metric

from replicas.status import RunStatus, StoreStatus
from replicas.telemetry.metrics import Metrics
from tests.support.reference.text import bullets, markdown

__all__ = ["body", "families"]

_UNITS = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio, from 0 to 1"}


def families() -> dict[str, Metric]:
    """Every family by the name under which it is scraped."""
    status = RunStatus(
        run="",
        version="",
        endpoint="",
        pid=0,
        uptime_s=0.0,
        ready=False,
        store=StoreStatus(up=False, host="", port=0),
    )
    found = Metrics(lambda: status).collect()
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}


def body() -> str:
    intro = markdown(
        """``GET /metrics`` on the control port answers in Prometheus' text format. A
        histogram has the series ``_bucket``, ``_sum`` and ``_count``. Values are those of
        ``/status``, and counters are made from the run's events (`events.md`)."""
    )
    return "\n\n".join([intro, *(_entry(name, family) for name, family in sorted(families().items()))])


def _entry(name: str, family: Metric) -> str:
    labels: tuple[str, ...] = getattr(family, "_labelnames", ())
    unit = next((unit for word, unit in _UNITS.items() if word in name.split("_")), "")
    facts = [f"type: {family.type}", f"labels: {', '.join(f'`{one}`' for one in labels) or 'none'}"]
    facts += [f"unit: {unit}"] if unit else []
    return f"## `{name}`\n\n{markdown(family.documentation)}\n\n{bullets(facts)}"
