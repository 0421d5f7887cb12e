"""The page of metrics, from one scrape of a run with one of everything: it yields every
family, and every value of a label that is one of a few words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from replicas.coordinator.limits import REASONS
from replicas.integrations.vllm_gate import ServedVersion
from replicas.status import ChannelStatus, GroupStatus, MemberStatus, RunStatus, StoreStatus
from replicas.telemetry.metrics import ERRORS, Metrics
from tests.support.reference.text import bullets, markdown

__all__ = ["body", "engine_families", "families"]

_UNITS = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio, from 0 to 1"}
_WORDS = ("kind", "outcome", "phase", "reason", "state")
"""Labels whose values are words of this package."""


def families() -> dict[str, Metric]:
    """Every family by the name under which it is scraped."""
    peer = MemberStatus(name="one/0/0", state="live", role="peer")
    status = RunStatus(
        run="",
        version="",
        endpoint="",
        pid=0,
        uptime_s=0.0,
        ready=False,
        store=StoreStatus(up=False, host="", port=0),
        groups=(GroupStatus(name="one", launcher="exec", world_size=1, replicas=()),),
        channels=(ChannelStatus(name="one", epoch=1, committed_version=0, digest="", members=(peer,)),),
        refused=dict.fromkeys(REASONS, 0),
    )
    return _by_name(Metrics(lambda: status))


def engine_families() -> dict[str, Metric]:
    """Those of an inference server, by name."""
    closed: Any = SimpleNamespace(version=0, paused_s=0.0, is_open=False)
    return _by_name(ServedVersion(closed))


def _by_name(collector: Collector) -> dict[str, Metric]:
    return {f"{one.name}_total" if one.type == "counter" else one.name: one for one in collector.collect()}


def body() -> str:
    intro = markdown(
        """``GET /metrics`` on the control port answers in Prometheus' text format. A
        histogram has the series ``_bucket``, ``_sum`` and ``_count``. Values are those of
        ``/status``, and counters are made from the run's events (`events.md`). ``group``,
        ``replica`` (its index), ``channel`` and ``node`` are names of the config. Names of
        outcomes that are no success are those of errors (`errors.md`), in snake case."""
    )
    servers = markdown("A vLLM server that follows a channel has these beside its own, on its own port.")
    return "\n\n".join(
        [
            intro,
            *(_entry(name, family) for name, family in sorted(families().items())),
            "## Of inference servers",
            servers,
            *("#" + _entry(name, family) for name, family in sorted(engine_families().items())),
        ]
    )


def _entry(name: str, family: Metric) -> str:
    labels: tuple[str, ...] = getattr(family, "_labelnames", ())
    unit = next((unit for word, unit in _UNITS.items() if word in name.split("_")), "")
    facts = [f"type: {family.type}", f"labels: {', '.join(f'`{one}`' for one in labels) or 'none'}"]
    facts += [f"unit: {unit}"] if unit else []
    for label in _WORDS:
        values = dict.fromkeys(one.labels[label] for one in family.samples if label in one.labels)
        facts += [f"`{label}`: {_words(list(values))}"] if values else []
    return f"## `{name}`\n\n{markdown(family.documentation)}\n\n{bullets(facts)}"


def _words(values: list[str]) -> str:
    """Those of errors are on a page of their own."""
    shown = [one for one in values if one not in ERRORS]
    return ", ".join([*(f"`{one}`" for one in shown), *(["the name of an error"] if len(shown) < len(values) else [])])
