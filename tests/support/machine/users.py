"""Other users of this machine: programs under their ids, and folders of theirs. Only
root can have these."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.runs import ROOT

__all__ = ["ATTACKER", "VICTIM", "as_user", "folder_of", "needs_users", "python_environment", "stranger"]

VICTIM, ATTACKER = 2001, 2002
"""Two users without rights, whom no machine of ours has given a name."""


@functools.cache
def why_no_users() -> str:
    """Why no test can be two other users here; empty: it can."""
    if os.geteuid() != 0:
        return "needs root, to become two other users"
    command = ["unshare", "--mount", "setpriv", f"--reuid={VICTIM}", f"--regid={VICTIM}", "--clear-groups", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return f"needs unshare and setpriv, of util-linux: {error}"
    return f"this root can make no mount namespace: {done.stderr.strip()}" if done.returncode else ""


needs_users = pytest.mark.skipif(bool(why_no_users()), reason=why_no_users())


def as_user(uid: int, command: Sequence[str], *, before: str = "") -> list[str]:
    """``command`` as it is run under this id, by exec alone: its pid is that of what is
    started.

    It sees this interpreter and the package also where they lie in a closed folder,
    such as root's home: in a mount namespace of its own.

    :param before: shell commands to run as root in that namespace.
    """
    identity = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    script = "\n".join(["set -e", *_openings(), before, 'exec "$@"'])
    return ["unshare", "--mount", "sh", "-c", script, "sh", *identity, *command]


def _openings() -> Iterator[str]:
    """Shell commands that put what this interpreter needs, and nothing else, where
    closed folders are in the way."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, str(ROOT), *sys.path) if path}
    closed: dict[Path, set[Path]] = {}
    for path in needed:
        above = next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)
        if above is not None and path.exists():
            closed.setdefault(above, set()).add(path)
    for above, paths in closed.items():
        tops = [one for one in sorted(paths) if not paths & set(one.parents)]
        yield "hold=$(mktemp -d)"
        yield "mount -t tmpfs -o mode=755 tmpfs $hold"
        for number, path in enumerate(tops):
            yield f"mkdir $hold/{number} && mount --rbind {shlex.quote(str(path))} $hold/{number}"
        yield f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(above))}"
        for number, path in enumerate(tops):
            yield f"mkdir -p {shlex.quote(str(path))} && mount --rbind $hold/{number} {shlex.quote(str(path))}"
        yield "umount --lazy $hold && rmdir $hold"


def python_environment() -> dict[str, str]:
    """With which a Python program of another user finds the package."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}


@contextmanager
def folder_of(uid: int) -> Iterator[Path]:
    """A folder of this user's, in one that everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="replicas-users-") as name:
        above = Path(name)
        above.chmod(0o755)
        folder = above / "home"
        folder.mkdir(mode=0o700)
        shutil.chown(folder, uid, uid)
        yield folder


def _become(uid: int, act: Callable[[Connection], None], pipe: Connection) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    act(pipe)


@contextmanager
def stranger(act: Callable[[Connection], None], uid: int = ATTACKER) -> Iterator[Connection]:
    """``act`` in a process of another user, and our end of its pipe; killed at the end
    of the block.

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
