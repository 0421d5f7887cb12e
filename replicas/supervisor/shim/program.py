"""Run a Python program in a forked process as ``python -u`` runs it: as ``__main__``.

What a program can see of its start and end is what :mod:`runpy` and the interpreter's
own main function do (``Modules/main.c`` of CPython): ``sys.argv``, ``sys.path``,
``__main__``; uncaught errors and exit codes. Standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

UNBUFFERED = "-u"


def is_python(command: Sequence[str], interpreter: str) -> bool:
    """Return True if the command is ``INTERPRETER -u`` and a file or ``-m`` module.

    :func:`run_program` can then run it in this process.
    """
    return len(command) > 2 and [*command[:2]] == [interpreter, UNBUFFERED]


def run_program(command: Sequence[str]) -> None:
    """Run the program of ``python -u FILE ...`` or ``python -u -m MODULE ...`` here.

    Replaces ``__main__`` and :data:`sys.argv`, extends :data:`sys.path`. Returns when
    it has ended well; the caller then leaves the process to Python's own teardown.

    :param command: the whole command line, with the interpreter.
    :raises SystemExit: the program's, or with code 1 after an error, which is printed.
    """
    _, _, first, *rest = command
    sys.orig_argv = [*command]
    _refresh_state()
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    try:
        if first == "-m":
            name, *arguments = rest
            sys.argv = ["-m", *arguments]
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as the interpreter
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).resolve().parent))
            _run_file(first, vars(main))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        _report(error)
        if isinstance(error, KeyboardInterrupt):
            _die_of_interrupt()
        raise SystemExit(1) from None


def _run_file(path: str, variables: dict[str, Any]) -> None:
    """Execute a source file with these global variables, which it extends."""
    path = os.path.abspath(path)  # noqa: PTH100  # links stay, as in the interpreter
    loader = SourceFileLoader("__main__", path)
    variables.update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __doc__=None, __package__=None)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), variables)


def _refresh_state() -> None:
    """After a fork, renew NumPy's and torch's seeds, stdio buffering and thread id."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # as a new thread does
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    # Python's own generator is seeded anew in each fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _report(error: BaseException) -> None:
    """Print an uncaught error by ``sys.excepthook``, without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _die_of_interrupt() -> None:
    """End as Python does after an uncaught KeyboardInterrupt: by SIGINT."""
    threading._shutdown()  # type: ignore[attr-defined]  # the interpreter's own steps
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
