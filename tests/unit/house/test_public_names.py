"""What ``import replicas`` shows."""

from __future__ import annotations

import pytest

import replicas


def test_the_public_names() -> None:
    assert set(replicas.__all__) == {
        "Change",
        "Channel",
        "Coordinator",
        "Member",
        "Pending",
        "Receipt",
        "Shard",
        "Supervisor",
        "Update",
        "__version__",
        "errors",
        "join",
    }
    for name in replicas.__all__:
        assert getattr(replicas, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = replicas.nothing
