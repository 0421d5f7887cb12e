"""What all tests share."""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Any

import pytest

from replicas.common import logs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; all children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup, with which a run outlives its terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

SHOWN_BEFORE_S = 1.0
"""Stacks of a test that takes too long are written so long before it is ended."""
STDERR = pytest.StashKey[int]()
"""Where they are written: what was standard error before it was captured."""
THIRDS = 3
SLOW_S = 0.25
"""A unit test that takes longer is marked so; one that is not, and does, is named."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third", type=int, choices=range(1, THIRDS + 1), help="run every third test file, from this one on"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files are dealt in the order of their names, so that all thirds together are all
    tests, and each worker of pytest-xdist deals alike."""
    third = config.getoption("--third")
    if third is None:
        return
    kept = set(sorted({item.path for item in items})[third - 1 :: THIRDS])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    items[:] = [item for item in items if item.path in kept]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    third = config.getoption("--third")
    if third is not None:
        ran = {report.nodeid.partition("::")[0] for report in terminalreporter.getreports("")}
        terminalreporter.write_line(f"third {third} of {THIRDS}: {' '.join(sorted(ran))}")
    for report in terminalreporter.getreports("passed"):
        if "tests/unit/" in report.nodeid and report.duration > SLOW_S and "slow" not in report.keywords:
            terminalreporter.write_line(f"slow, and not marked: {report.nodeid} took {report.duration:.2f} s")


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """A worker of pytest-xdist that pytest-timeout ends would not say why."""
    after_s = settings.timeout - SHOWN_BEFORE_S
    if after_s > 0:
        faulthandler.dump_traceback_later(after_s, file=item.config.stash[STDERR])


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


class _Flushed(pytest.LogCaptureFixture):  # type: ignore[misc]  # final, but there is no other way in
    """Records of this library come by a thread of its own: wait for them."""

    @property
    def handler(self) -> Any:
        logs.flush(10.0)
        return super().handler


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.__class__ = _Flushed
    return caplog
