"""The Grafana board ``services/grafana/boards/replicas.json``: ``make board`` writes
it, a unit test compares.

``panels.py`` says what is shown; ``shapes.py`` turns it into Grafana's JSON, which
nobody writes by hand. For tests of board and alerts ``queries.py`` takes expressions of
PromQL apart, and ``prometheus.py`` starts a real one beside a run.
"""

from __future__ import annotations

import json

from tests.support.board.panels import board
from tests.support.root import ROOT

__all__ = ["PAGE", "text"]

PAGE = ROOT / "services" / "grafana" / "boards" / "replicas.json"


def text() -> str:
    """The file as it should be."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"
