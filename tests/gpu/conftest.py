"""What the tests of this folder share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.gpu.card import REAL, environment, has_gpu
from tests.support.sidecars import shared_forkserver


@pytest.fixture(scope="session")
def forkserver() -> Iterator[str]:
    """One for all ranks, as on a node: it takes as long to start as a rank. Its
    environment is not that of other tests which this process runs in between."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment().items():
                patch.setenv(name, value)
            address = stack.enter_context(shared_forkserver())
        yield address


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch, forkserver: str) -> None:
    """The GPU, or the fake, for this process and all that it starts."""
    if REAL and not has_gpu():
        pytest.fail("GPU_TESTS=real, and torch finds no GPU, or no NCCL: see tests/gpu/README.md")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REPLICAS_FORKSERVER", forkserver)
