"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.gpu.card import REAL, environment, has_gpu


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU, or the fake, for this process and all that it starts."""
    if REAL and not has_gpu():
        pytest.fail("REPLICAS_GPU_TESTS=real, and torch finds no GPU, or no NCCL: see tests/gpu/README.md")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
