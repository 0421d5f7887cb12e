"""Other users of the machine. Only root can become somebody else; without it such tests skip."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

__all__ = ["OWNER", "STRANGER", "needs_root", "stranger"]

OWNER, STRANGER = 2001, 2002
"""Two users without rights, whom no machine of ours has given a name."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def _become(uid: int, act: Callable[[Connection], None], pipe: Connection) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    act(pipe)


@contextmanager
def stranger(act: Callable[[Connection], None], uid: int = STRANGER) -> Iterator[Connection]:
    """``act`` in a process of another user, and our end of its pipe; killed at the end of the block.

    It is forked, as that user may not see our interpreter.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_become, args=(uid, act, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()
