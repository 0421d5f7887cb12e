"""Which replicas have a forkserver started on their node.

Covers: supervisor/fleet/generation.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replicas.config.file import parse
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.generation import _sidecars

WEIGHTS = {"sources": ["a"], "targets": ["b"]}


@pytest.mark.parametrize("bind", ["127.0.0.1", "10.0.0.5"])
@pytest.mark.parametrize(
    ("channel", "when"),
    [
        (WEIGHTS, "later"),
        ({**WEIGHTS, "transport": "tcp"}, "later"),
        ({**WEIGHTS, "encrypt": True}, "later"),
        ({**WEIGHTS, "transport": "group"}, "ahead"),
        ({**WEIGHTS, "staging": "device"}, "ahead"),
        ({**WEIGHTS, "staging": "device", "transport": "tcp"}, "later"),
        ({"peers": ["a"], "ranks": "leader"}, "ahead"),
        ({**WEIGHTS, "sources": ["c"]}, ""),
    ],
)
def test_a_forkserver_is_started_ahead_where_a_channel_forms_groups(
    bind: str, channel: dict[str, Any], when: str
) -> None:
    """Wherever the store listens: versions that are pulled need no store."""
    config = parse(
        {
            "schema_version": 1,
            "run": {"name": "x"},
            "store": {"bind": bind},
            "groups": {name: {"command": ["-m", "x"]} for name in "abc"},
            "channels": {"policy": channel},
        },
        base=Path("/"),
    )
    context = SimpleNamespace(config=config)
    context.on_channel = lambda group: FleetContext.on_channel(cast("FleetContext", context), group)
    assert _sidecars(cast("FleetContext", context), "a") == when
