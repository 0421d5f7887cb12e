"""Which text format a scrape of metrics asks for."""

from __future__ import annotations

import contextlib


def prefers_openmetrics(accept: str) -> bool:
    """Return True if an Accept header prefers OpenMetrics 1.0.0 to plain text.

    The function of prometheus-client echoes any version, and ignores ``q=0``.
    """
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for one in accept.lower().split(","):
        kind, *given = (part.strip() for part in one.split(";"))
        options = dict(part.partition("=")[::2] for part in given)
        if kind == "text/plain" or (kind in weights and options.get("version", "1.0.0").strip('"') == "1.0.0"):
            with contextlib.suppress(ValueError):
                weights[kind] = max(weights[kind], float(options.get("q", "1")))
    wanted, plain = weights.values()
    return wanted > 0 and wanted >= plain
