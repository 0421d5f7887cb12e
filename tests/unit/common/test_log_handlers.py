"""Log handlers of the user's program: whatever they raise and however long they take,
no thread of ours ends or waits by it, and the records come as they were made.

Covers: common/background_queue.py, common/logs.py, common/reason.py.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from replicas.common import background_queue, logs
from replicas.common.background_queue import BackgroundQueue
from replicas.common.logs import Log
from replicas.testing import FakeRun

PATIENCE_S = 30.0
ONE = {"weight": torch.ones(3)}


class Handler(logging.Handler):
    def __init__(self, act: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._act = act

    def handle(self, record: logging.LogRecord) -> bool:
        self._act(record)
        return True


@pytest.fixture
def installed() -> Iterator[Callable[[Callable[[logging.LogRecord], object]], None]]:
    """Adds a handler to this library's loggers, until the end of the test."""
    logger, added = logging.getLogger("replicas"), list[Handler]()
    level = logger.level
    logger.setLevel(logging.INFO)

    def install(act: Callable[[logging.LogRecord], object]) -> None:
        added.append(Handler(act))
        logger.addHandler(added[-1])

    yield install
    logs.flush(PATIENCE_S)
    logger.setLevel(level)
    for handler in added:
        logger.removeHandler(handler)


Install = Callable[[Callable[[logging.LogRecord], object]], None]


def goes_on(run: FakeRun) -> None:
    """Connections break, which is logged on the session thread, and all goes on."""
    trainer, rollout = run.join("trainer"), run.join("rollout")
    for version in (1, 2):
        run.disconnect(trainer)
        run.disconnect(rollout)
        committed = trainer.committed(deadline=PATIENCE_S)
        assert trainer.publish(ONE, deadline=PATIENCE_S).wait(PATIENCE_S).version == version
        assert committed.wait(PATIENCE_S) == version
        with rollout.receive(deadline=PATIENCE_S).wait(PATIENCE_S) as update:
            assert update.version == version
        assert trainer.loaded(version, deadline=PATIENCE_S).wait(PATIENCE_S) == version


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
def test_what_a_handler_raises_ends_nothing_and_is_shown(
    kind: type[BaseException], installed: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    called = threading.Event()

    def fail(record: logging.LogRecord) -> None:
        called.set()
        raise kind("of the program")

    installed(fail)
    with FakeRun() as run:
        goes_on(run)
        assert called.wait(PATIENCE_S)
    assert logs.flush(PATIENCE_S)
    assert "replicas: a handler of the logger replicas.channel failed" in (shown := capfd.readouterr().err)
    assert f"{kind.__name__}: of the program" in shown


def test_a_handler_that_takes_its_time_holds_nobody_up(installed: Install) -> None:
    go_on, called = threading.Event(), threading.Event()

    def wait(record: logging.LogRecord) -> None:
        called.set()
        assert go_on.wait(2 * PATIENCE_S)

    installed(wait)
    try:
        with FakeRun() as run:
            goes_on(run)
            assert called.wait(PATIENCE_S)
            assert not logs.flush(0.0)
    finally:
        go_on.set()


def test_a_handler_may_wait_for_the_thread_that_logs(installed: Install) -> None:
    done = threading.Event()
    with FakeRun() as run:
        trainer = run.join("trainer")

        def publish(record: logging.LogRecord) -> None:
            if not done.is_set():
                trainer.publish(ONE, deadline=PATIENCE_S).wait(PATIENCE_S)
                done.set()

        installed(publish)
        run.target("rollout")
        run.disconnect(trainer)
        assert done.wait(PATIENCE_S)


class Texted:
    """Its text is made by code of the program."""

    def __str__(self) -> str:
        raise SystemExit("of the program")


def test_records_are_as_they_were_made(installed: Install) -> None:
    found: list[logging.LogRecord] = []
    installed(found.append)
    log = Log("replicas.test")

    def tell() -> None:
        try:
            raise ValueError("lost")
        except ValueError:
            log.exception("%s of %d", "one", 2)

    teller = threading.Thread(target=tell, name="teller")
    teller.start()
    teller.join(PATIENCE_S)
    log.debug("not this")
    log.warning("%s", Texted())
    log.warning("last")
    assert logs.flush(PATIENCE_S)
    first, texted, last = found
    assert (first.name, first.levelname, first.getMessage()) == ("replicas.test", "ERROR", "one of 2")
    assert (first.threadName, first.funcName, first.filename) == ("teller", "tell", os.path.basename(__file__))  # noqa: PTH119  # as logging makes it
    assert first.exc_info is not None
    assert isinstance(first.exc_info[1], ValueError)
    assert (texted.levelname, last.getMessage()) == ("WARNING", "last")
    assert first.created <= texted.created <= last.created


def test_the_programs_factory_and_filters_count(installed: Install) -> None:
    found: list[logging.LogRecord] = []
    installed(found.append)
    logger, factory = logging.getLogger("replicas.test"), logging.getLogRecordFactory()

    def make(*arguments: object, **more: object) -> logging.LogRecord:
        record: logging.LogRecord = factory(*arguments, **more)
        record.rank = 3
        return record

    def not_odd(record: logging.LogRecord) -> bool:
        return "odd" not in record.getMessage()

    logging.setLogRecordFactory(make)
    logger.addFilter(not_odd)
    try:
        Log("replicas.test").warning("%s", "even")
        Log("replicas.test").warning("%s", "odd")
        assert logs.flush(PATIENCE_S)
    finally:
        logger.removeFilter(not_odd)
        logging.setLogRecordFactory(factory)
    assert [(record.getMessage(), vars(record)["rank"]) for record in found] == [("even", 3)]


def test_what_a_slow_handler_misses_is_told(installed: Install) -> None:
    go_on, called, found = threading.Event(), threading.Event(), list[str]()

    def wait(record: logging.LogRecord) -> None:
        called.set()
        assert go_on.wait(PATIENCE_S)
        found.append(record.getMessage())

    installed(wait)
    log = Log("replicas.test")
    log.warning("first")
    assert called.wait(PATIENCE_S)
    for number in range(1500):
        log.warning("%d", number)
    go_on.set()
    assert logs.flush(PATIENCE_S)
    log.warning("last")
    assert logs.flush(PATIENCE_S)
    assert found[:3] == ["first", "0", "1"]
    assert found[-2:] == [
        "dropped 500 log records before this one: a logging handler of this program is too slow",
        "last",
    ]


def test_a_forked_child_has_its_own(installed: Install) -> None:
    reader, writer = os.pipe()
    installed(lambda record: os.write(writer, record.getMessage().encode()))
    Log("replicas.test").warning("parent")
    assert logs.flush(PATIENCE_S)
    assert os.read(reader, 100) == b"parent"
    child = os.fork()
    if not child:
        Log("replicas.test").warning("child")
        os._exit(0 if logs.flush(PATIENCE_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.read(reader, 100) == b"child"
    for descriptor in (reader, writer):
        os.close(descriptor)
    sys.stderr.flush()


def test_who_logs_does_not_wait_for_the_configuration_of_logging(installed: Install) -> None:
    """dictConfig() holds the lock while it constructs the program's handlers."""
    found: list[logging.LogRecord] = []
    installed(found.append)
    log = Log("replicas.test.configured")
    teller = threading.Thread(target=log.warning, args=("here",), daemon=True)
    with logging._lock:  # type: ignore[attr-defined]  # logging's own
        teller.start()
        teller.join(PATIENCE_S)
        assert not teller.is_alive()
    assert logs.flush(PATIENCE_S)
    assert [record.getMessage() for record in found] == ["here"]


def test_levels_count_as_they_do_for_the_logger(installed: Install) -> None:
    logger, log = logging.getLogger("replicas.test.levels"), Log("replicas.test.levels")
    assert log.isEnabledFor(logging.INFO)
    assert not log.isEnabledFor(logging.DEBUG)
    logger.setLevel(logging.ERROR)
    assert not log.isEnabledFor(logging.WARNING)
    logging.disable(logging.ERROR)
    try:
        assert not log.isEnabledFor(logging.ERROR)
        assert log.isEnabledFor(logging.CRITICAL)
    finally:
        logging.disable(logging.NOTSET)
    logger.disabled = True
    assert not log.isEnabledFor(logging.CRITICAL)


def test_without_a_thread_nobody_waits_for_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Unwaited:
        def wait(self, timeout_s: float) -> bool:
            raise AssertionError("in vain")

    queue: BackgroundQueue[int] = BackgroundQueue("test", int, int)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(background_queue, "Latch", Unwaited)
        queue.put(1)
        assert not queue.flush(PATIENCE_S)


def test_the_name_of_the_task_is_kept(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 adds it, where the record is made."""

    class Record(logging.LogRecord):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]  # as they come
            self.taskName = "loader"

    found: list[logging.LogRecord] = []
    installed(found.append)
    with monkeypatch.context() as patch:
        patch.setattr(logging, "LogRecord", Record)
        Log("replicas.test").warning("here")
    assert logs.flush(PATIENCE_S)
    assert [vars(record).get("taskName") for record in found] == ["loader"]


def test_a_process_that_ends_at_once_says_its_last_words(installed: Install) -> None:
    reader, writer = os.pipe()
    installed(lambda record: os.write(writer, record.getMessage().encode()))
    child = os.fork()
    if not child:
        try:
            Log("replicas.test").warning("last words")
            logs.end_process(3)
        finally:  # never on in this child
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    os.close(writer)
    assert os.read(reader, 100) == b"last words"
    os.close(reader)
