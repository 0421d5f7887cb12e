"""The exit report of a node, and what people read of it.

Covers: supervisor/shim/shim.py, supervisor/shim/part_processes.py.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest

from replicas.common.patience import Silence
from replicas.control.access import without_output
from replicas.linux.processes import Child
from replicas.supervisor.agent.shim_process import ShimProcess
from replicas.supervisor.fleet.causes import FailureReports, exited, verdict
from replicas.supervisor.shim.deaths import EndWatch, exit_report
from replicas.supervisor.shim.shim import Shim
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import MessageSocket, PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, RankExit
from replicas.telemetry.events import LogLinesDropped, RankEnd, ReplicaExited

BOOM = ("step 7", "Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "ValueError: boom", "")


@pytest.fixture(scope="module")
def child() -> Child:
    popen = subprocess.Popen(["true"])
    one = Child(popen)
    one.ended(popen.wait(30))
    return one


def spec(launcher: str) -> PartSpec:
    return PartSpec(
        run="r", group="a", replica=0, generation=1, node=0, nnodes=1, nproc_per_node=2, launcher=launcher,
        command=("x",), env={}, cwd="/", log_dir="/logs", stop_timeout_s=1.0, nonce="n",
    )  # fmt: skip


def lines(**known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    return lambda name: known.get(name.replace(" ", "_"), ())


def test_a_program_that_failed_is_reported_with_its_last_lines(child: Child) -> None:
    child.code = 3
    report = exit_report(spec("exec"), child, None, lines(rank_0=BOOM), stopping=False)
    (rank,) = report.ranks
    assert (report.outcome, rank.code, rank.text, rank.lines) == ("failed", 3, "ValueError: boom", BOOM)
    assert exit_report(spec("exec"), child, None, lines(), stopping=True).outcome == "stopped"
    child.code = 0
    assert exit_report(spec("exec"), child, None, lines(rank_0=BOOM), stopping=False) == ExitReport("ok")


@pytest.mark.parametrize("told", ["exec", "torchrun"])
@pytest.mark.parametrize(("code", "ended"), [(3, "exited with code 3"), (-6, "killed by SIGABRT"), (-40, "signal 40")])
def test_a_cause_without_what_the_program_printed(told: str, code: int, ended: str, child: Child) -> None:
    child.code = code
    report = exit_report(spec(told), child, None, lines(rank_0=("a: x; y",), torchrun=("a: x; y",)), stopping=False)
    cause = verdict([report])
    assert cause is not None
    for text in (cause.text, f"restarted with a/1: {cause.text}; all restarts are used", f"a\n{cause.text}\n"):
        shown = without_output(text)
        assert ended in shown
        assert "x; y" not in shown
    assert without_output("generation 2: all restarts are used") == "generation 2: all restarts are used"


def test_a_crash_is_named_by_what_faulthandler_says(child: Child) -> None:
    child.code = -signal.SIGSEGV
    stacks = ("Fatal Python error: Segmentation fault", "Thread 0x1 (most recent call first):", '  File "x", line 3')
    report = exit_report(spec("exec"), child, None, lines(rank_0=stacks), stopping=False)
    assert report.ranks[0].text == "Fatal Python error: Segmentation fault"


LEAKED = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked",
    "  warnings.warn('resource_tracker: There appear to be %d '",
)
ENGINE = (
    '(APIServer pid=7)   File "/x/core.py", line 12, in get_output',
    "(APIServer pid=7)     raise EngineDeadError",
    "(Worker pid=9) INFO bye",
    "(APIServer pid=7) vllm.EngineDeadError: EngineCore is dead",
    "(APIServer pid=7) INFO: Shutting down",
)


@pytest.mark.parametrize(
    ("code", "printed", "text"),
    [
        (1, (*BOOM, *LEAKED), "ValueError: boom"),
        (1, (*ENGINE, *LEAKED), "vllm.EngineDeadError: EngineCore is dead"),
        (1, ("a.py: cannot go on", *LEAKED), "a.py: cannot go on"),
        (
            1,
            ('  File "a.py", line 3', "    x = = 3", "        ^", "SyntaxError: invalid syntax"),
            "SyntaxError: invalid syntax",
        ),
        (3, (*BOOM, "giving up"), "giving up"),
        (1, LEAKED, LEAKED[1].strip()),
    ],
)
def test_a_failure_is_named_by_its_exception_and_not_by_what_was_said_last(
    child: Child, code: int, printed: tuple[str, ...], text: str
) -> None:
    child.code = code
    report = exit_report(spec("exec"), child, None, lines(rank_0=printed), stopping=False)
    assert report.ranks[0].text == text


def test_what_died_first_is_named_and_shown_to_everybody(child: Child) -> None:
    child.code = 1
    died = "its process 12 (VLLM::EngineCor) was killed by SIGKILL"
    report = exit_report(spec("exec"), child, None, lines(rank_0=ENGINE), stopping=False, first_death=lambda _: died)
    cause = verdict([orders.read(ExitReport, plain(report))])
    assert cause is not None
    shown = f"rank 0 exited with code 1 after {died}"
    assert cause.text == f"{shown}: vllm.EngineDeadError: EngineCore is dead"
    assert without_output(cause.text) == shown
    child.code = -signal.SIGTERM
    killed = exit_report(spec("exec"), child, None, lines(), stopping=False, first_death=lambda _: died)
    assert killed.ranks[0].after == ""


def test_what_torchelastic_wrote_is_told_only_where_the_log_does_not_have_it(child: Child) -> None:
    trace = "Traceback (most recent call last):\nValueError: boom"
    told = ExitReport("failed", ranks=(RankExit(1, 1, error=trace, text="ValueError: boom"), RankExit(0, -15)))
    seen = exit_report(spec("torchrun"), child, told, lines(rank_1=BOOM, rank_0=("bye",)), stopping=False)
    assert [(one.error, one.lines, one.text) for one in seen.ranks] == [("", BOOM, "ValueError: boom"), ("", (), "bye")]
    mute = exit_report(spec("torchrun"), child, told, lines(), stopping=False)
    assert mute.ranks[0].error == trace


def test_a_torchrun_that_died_without_a_word(child: Child) -> None:
    child.code = 1
    report = exit_report(spec("torchrun"), child, None, lines(torchrun=("ImportError: torch",)), stopping=False)
    assert (report.outcome, report.text) == ("lost", "torchrun of node 0 exited with code 1: ImportError: torch")
    told = ExitReport("stopped")
    report = exit_report(spec("torchrun"), child, told, lines(), stopping=False)
    assert (report.outcome, report.text) == ("lost", "torchrun on node 0 was stopped by a signal from outside")
    assert exit_report(spec("torchrun"), child, told, lines(), stopping=True) == told


def test_a_failure_report_has_the_log_of_the_first_rank_of_all_nodes_once() -> None:
    first = ExitReport("failed", ranks=(RankExit(1, 1, at=1.0, lines=("one",), error="Traceback\nE: x\n"),))
    second = ExitReport("failed", ranks=(RankExit(0, 1, at=2.0, lines=("zero",)),))
    event = exited("a", 0, 1, [second, first], reason="rank 1 exited with code 1")
    assert [(end.rank, end.lines) for end in event.ranks] == [(1, ("one",)), (0, ())]
    assert FailureReports().text(event).split("\n") == [
        *("a/0: the last lines of rank 1:", "    | one"),
        *("a/0: the error of rank 1:", "    | Traceback", "    | E: x"),
    ]
    ranks = (RankEnd(rank=0, code=-15, lines=("x",)),)
    asked = ReplicaExited(group="a", replica=0, generation=1, outcome="stopped", ranks=ranks)
    assert FailureReports().text(asked) == ""


def test_lost_lines_are_said_once_for_each_reason() -> None:
    reports = FailureReports()
    full = LogLinesDropped(group="a", replica=0, generation=1, count=5, reason="No space left on device")
    slow = LogLinesDropped(group="a", replica=0, generation=2, count=5, reason="nobody reads", where="tee")
    assert reports.text(full) == "a/0: losing lines of its log: No space left on device"
    assert "not showing some of its lines here, only in its log" in reports.text(slow)
    assert [reports.text(one) for one in (full, slow)] == ["", ""]


def test_a_launcher_whose_socket_a_daemon_holds_is_heard_out() -> None:
    ours, theirs = orders.pair()
    shim = Shim.__new__(Shim)
    shim._selector = selectors.DefaultSelector()
    shim._selector.register(ours, selectors.EVENT_READ)
    launcher = MessageSocket(ours, "the launcher", shim._take_from_launcher, shim._selector.unregister)
    report = ExitReport("failed", "it failed")
    orders.send(theirs, {"type": "report", "report": plain(report)})
    with theirs:  # open: the stream has no end
        launcher.read_rest()
    assert not launcher.open
    assert shim._report == report
    shim._selector.close()


def test_the_end_of_a_process_that_is_no_child_wakes_the_loop() -> None:
    """A sidecar is a child of the node's forkserver, so no SIGCHLD tells."""
    with selectors.DefaultSelector() as selector:
        ends = EndWatch(selector)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sidecar:
            assert not ends.watch_all(lambda: [sidecar.pid])
            sidecar.communicate(b"\n")
            ((key, _),) = selector.select(10)
            key.data()
        assert ends.watch_all(list)


def test_a_process_that_ends_while_it_is_looked_at_is_over() -> None:
    nobody = (1 << 22) + 1  # no pid is as large
    with selectors.DefaultSelector() as selector:
        ends, looks = EndWatch(selector), iter([[nobody], []])
        assert ends.watch_all(lambda: next(looks))
        assert not ends.has_unwatched
        assert not ends.watch_all(lambda: [nobody])  # it is there, and cannot be watched
        assert ends.has_unwatched


def test_a_shim_is_silent_for_as_long_as_it_does_not_answer_but_for_our_own_pauses() -> None:
    """Looked at each second, a little late."""
    shim = ShimProcess.__new__(ShimProcess)
    shim.state, shim._finishing, shim._told_until = UNKNOWN, False, None
    shim._answered_at, shim._silence = 0.0, Silence(1.0)
    shim._control = mock.Mock(send=lambda _: False)

    def silent_s(at: float) -> float:
        shim.check_shim(at, None, 0.0)
        return shim.state.silent_s

    assert [silent_s(at) for at in (1.01, 2.02, 3.03)] == pytest.approx([0.0, 0.0, 2.02]), "a second is none"
    assert silent_s(10.03) == 0.0, "for six seconds nobody looked"
    assert [silent_s(at) for at in (11.03, 12.03)] == pytest.approx([0.0, 2.0])
