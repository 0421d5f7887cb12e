"""What ``import replicas`` shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import replicas


def test_the_public_names() -> None:
    assert set(replicas.__all__) == {
        "Change",
        "Channel",
        "Coordinator",
        "Lease",
        "Member",
        "Pending",
        "Receipt",
        "Shard",
        "Supervisor",
        "Update",
        "Versions",
        "__version__",
        "errors",
        "follow",
        "join",
    }
    for name in replicas.__all__:
        assert getattr(replicas, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = replicas.nothing


@pytest.mark.slow
def test_public_modules_need_no_import_of_their_own() -> None:
    """And cost nothing before they are used."""
    code = """
import sys, replicas
assert {"sources", "testing", "engine", "status"} <= set(dir(replicas))
assert "torch" not in sys.modules
print(replicas.sources.checkpoint, replicas.testing.FakeRun, replicas.engine.Engine, replicas.status.ChannelStatus)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
