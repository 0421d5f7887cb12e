"""What all tests share."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from replicas.common import logs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; all children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup, with which a run outlives its terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_OURS = os.getpid()


def _end(number: int, frame: object) -> None:
    """End as by Ctrl-C, so that tests stop the runs that they have started, which would
    outlive this process. A forked child just ends."""
    if os.getpid() == _OURS:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _end)
SHOWN_BEFORE_S = 1.0
"""Stacks of a test that takes too long are written so long before it is ended."""
STDERR = pytest.StashKey[int]()
"""Where they are written: what was standard error before it was captured."""
LEFT = pytest.StashKey[set[str]]()
"""The files that are left to other parts."""
MINUTES = {
    "agent/test_agents": 6.0,
    "campaign/test_campaign": 3.5,
    "channel/test_channel_faults": 4.5,
    "channel/test_interrupts": 4.0,
    "coordinator/test_far_links": 1.0,
    "coordinator/test_hosts_group": 1.0,
    "coordinator/test_pulls": 10.0,
    "engines/test_adapters": 2.5,
    "engines/test_caches": 3.0,
    "engines/test_distributed": 2.0,
    "engines/test_images": 1.0,
    "engines/test_slurm": 3.0,
    "engines/test_tutorial": 6.0,
    "engines/test_vllm": 8.0,
    "engines/test_vllm_architectures": 4.0,
    "engines/test_vllm_external": 2.5,
    "engines/test_vllm_follow": 2.0,
    "engines/test_vllm_lora": 1.5,
    "engines/test_vllm_tensor_parallel": 3.0,
    "engines/test_waves": 1.5,
    "fleet/test_external": 1.0,
    "frameworks/test_trl": 3.5,
    "frameworks/test_verl": 5.0,
    "gpu/test_environment": 1.0,
    "gpu/test_memory": 1.0,
    "gpu/test_staging": 3.0,
    "house/test_examples": 6.0,
    "house/test_kubernetes": 1.0,
    "integrations/test_follower": 3.0,
    "operations/test_operation_faults": 1.0,
    "sglang_cpu/test_architectures": 4.0,
    "sglang_cpu/test_follow": 2.0,
    "sglang_cpu/test_schedulers": 4.0,
    "sglang_cpu/test_sglang": 4.0,
    "sidecar/test_sidecar_liveness": 2.0,
    "supervisor/test_supervisor_embedded": 1.0,
    "supervisor/test_two_ranks": 1.0,
    "trust/test_run_tokens": 2.0,
    "versions/test_device_channels": 3.0,
    "versions/test_mapped_memory": 4.5,
}
"""Of files that take a minute and more, alone on two idle cores: a start of vLLM or
SGLang takes most of one. All others count as half of one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=_turn, metavar="N/M", help="run one of M parts of the test files: the N-th")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


def _turn(text: str) -> tuple[int, int]:
    """The number of a part, and of how many."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def _dealt(paths: set[Path], count: int) -> list[set[Path]]:
    """The longest file first, each to the part that has the least to do."""
    parts: list[set[Path]] = [set() for _ in range(count)]
    minutes = [0.0] * count
    for path in sorted(paths, key=lambda one: (-_minutes(one), one)):
        least = minutes.index(min(minutes))
        parts[least].add(path)
        minutes[least] += _minutes(path)
    return parts


def _minutes(path: Path) -> float:
    return MINUTES.get("/".join(path.with_suffix("").parts[-2:]), 0.5)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files are dealt by their names and lengths alone, so that all parts together are
    all tests, and each worker of pytest-xdist deals alike."""
    turn = config.getoption("--turn")
    if turn is None:
        return
    number, count = turn
    kept = _dealt({item.path for item in items}, count)[number - 1]
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    left = {item.nodeid.partition("::")[0] for item in items if item.path not in kept}
    config.stash[LEFT] = left
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = sorted(left)
    items[:] = [item for item in items if item.path in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist tells what it left out."""
    node.config.stash.setdefault(LEFT, set()).update(getattr(node, "workeroutput", {}).get("left", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part may have none of so few files, which is no failure; an error is one."""
    if session.config.getoption("--turn") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    turn = config.getoption("--turn")
    if turn is not None:
        ran = {report.nodeid.partition("::")[0] for report in terminalreporter.getreports("")}
        left = config.stash.get(LEFT, set())
        terminalreporter.write_line(f"part {turn[0]} of {turn[1]}: {' '.join(sorted(ran))}")
        terminalreporter.write_line(f"left to the other parts: {' '.join(sorted(left))}")


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
