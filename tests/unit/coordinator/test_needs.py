"""What is needed of process and kernel is asked for at the start, and named.

Covers: linux/needs.py.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
from pathlib import Path

import pytest

import replicas
from replicas import errors
from replicas.coordinator import Coordinator
from replicas.linux import needs

CONFIG = {"schema_version": 1, "run": {"name": "r"}, "groups": {"a": {"launcher": "exec", "command": ["true"]}}}


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)


def test_nothing_is_missing_here() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    needs.check()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


@pytest.mark.usefixtures("denied")
def test_a_call_that_is_denied_is_named_with_the_options_that_allow_it(tmp_path: Path) -> None:
    for start in (
        lambda: replicas.join("c", endpoint="127.0.0.1:1", token="x", group="a"),
        lambda: Coordinator({"c": {"sources": ["a"]}}),
        lambda: replicas.Supervisor({**CONFIG, "run": {"name": "r", "state_dir": str(tmp_path)}}),
    ):
        with pytest.raises(errors.UsageError, match="memfd_create") as caught:
            start()
        assert all(word in str(caught.value) for word in ("docker", "RuntimeDefault", "SystemCallFilter"))


def test_a_lack_of_descriptors_is_no_denial(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    assert list(needs.missing()) == []


def test_replaced_threads_and_selectors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(select, "epoll")
        with pytest.raises(errors.UsageError, match=r"gevent.*thread=False, select=False"):
            needs.check()
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
    assert [one.what for one in needs.missing()] == ["Python's own threads and selectors were replaced in this process"]


def test_a_hidden_boot_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(needs, "boot_id", hidden)
    with pytest.raises(errors.UsageError, match=r"/proc/sys/\S+ \(.*ProcSubset=all"):
        needs.check()
