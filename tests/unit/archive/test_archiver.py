"""The target that archives: what it writes, when it is told to stop, a storage that
fails.

Covers: archive/archiver.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from replicas import Channel, errors
from replicas.archive import Facts, Writer, archiver
from replicas.archive.archiver import archive_versions
from replicas.archive.store import Denied
from replicas.testing import FakeRun
from tests.support.archives import CHANNEL, KEY, Bucket, reader, writer
from tests.support.waits import eventually

OWNER = "0123456789ab"


class Scene:
    """An archiver on a thread. ``fenced``: it has said that it stops."""

    def __init__(self, run: FakeRun) -> None:
        self.bucket, self.told, self.facts = Bucket(), threading.Event(), Facts()
        self.source, self.target = run.join("trainer"), run.join("rollout")
        self.steps: list[int] = []
        self.target.progress = self.steps.append  # type: ignore[method-assign,assignment]  # to see them
        self.writer = writer(self.bucket)
        self.weights = torch.zeros(500)
        self.ended: BaseException | None = None
        self.fenced = False

    def publish(self) -> int:
        self.weights += 1
        return self.source.publish({"w": self.weights}, meta={"step": self.weights[0].item()}).wait(20).version

    @contextmanager
    def archiving(self) -> Iterator[None]:
        def work() -> None:
            try:
                archive_versions(self.target, self.writer, lambda: self.facts, self.told, OWNER)
            except errors.ReplicasError as error:
                self.ended = error

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            self.told.set()
            thread.join(30)
            assert not thread.is_alive()

    def wait_for(self, version: int) -> None:
        eventually(lambda: self.steps[-1:] == [version], f"version {version} is archived")


@pytest.fixture
def scene(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(archiver, "FIRST_S", 0.01)
    monkeypatch.setattr(archiver, "LAST_S", 0.05)
    monkeypatch.setattr(archiver, "LOOK_S", 0.05)
    monkeypatch.setattr(archiver, "WAIT_S", 0.05)
    found = Scene(run)

    def error(text: str, *_: object) -> None:
        found.fenced |= "this writer stops" in text

    monkeypatch.setattr(archiver.logger, "error", error)
    return found


def fail(now: Writer, error: Exception) -> Any:
    """Have each write fail; returns the function as it was."""

    def put(*_: object, **__: object) -> None:
        raise error

    before, now._store.put = now._store.put, put  # type: ignore[method-assign,assignment]  # for a while
    return before


def test_each_version_is_archived_with_its_step(scene: Scene) -> None:
    with scene.archiving():
        for _ in range(3):
            scene.wait_for(scene.publish())
    with reader(scene.bucket) as follower, next(follower) as update:
        assert (update.version, update.tensors()["w"][0].item()) == (3, 3)
        assert follower.entry is not None
        assert follower.entry.step == 3
    assert scene.steps == [1, 2, 3]


def test_labels_and_scores_follow_without_a_version(scene: Scene) -> None:
    with scene.archiving():
        for _ in range(3):
            scene.wait_for(scene.publish())
        puts = scene.bucket.calls["put"]
        scene.facts = Facts({"best": 2}, {2: {"reward": 0.5}})
        eventually(lambda: scene.bucket.calls["put"] > puts, "labels are written")
    with reader(scene.bucket, version="best") as follower, next(follower) as update:
        assert update.version == 2
    assert scene.bucket.calls["put"] == puts + 1, "and nothing again"


@pytest.mark.parametrize("kind", [errors.ArchiveError, Denied])
def test_a_storage_that_fails_holds_nobody_up(scene: Scene, kind: type[errors.ArchiveError]) -> None:
    put = fail(scene.writer, kind("s3://bucket: no"))
    with scene.archiving():
        for number in range(1, 6):
            assert scene.publish() == number
            scene.source.loaded(1).wait(20)
        assert scene.steps == []
        scene.writer._store.put = put  # type: ignore[method-assign]  # as before
        scene.wait_for(5)
    assert scene.steps == [1, 5], "the one that it had, and the newest"


def test_told_to_stop_it_archives_the_newest(scene: Scene) -> None:
    with scene.archiving():
        scene.wait_for(scene.publish())
        number = scene.publish()
        scene.told.set()
    assert scene.steps[-1] == number
    assert scene.ended is None


def test_told_to_stop_it_does_not_wait_for_a_storage_that_fails(scene: Scene) -> None:
    fail(scene.writer, errors.ArchiveError("s3://bucket: no"))
    with scene.archiving():
        scene.source.loaded(scene.publish()).wait(20)
    assert isinstance(scene.ended, errors.ArchiveError)


@pytest.mark.parametrize("owner", [OWNER, "theirs"])
def test_after_another_writer_it_waits_and_after_an_earlier_life_it_ends(scene: Scene, owner: str) -> None:
    """Two that are restarted would take the archive from each other for ever."""
    other = Writer(scene.bucket.objects, CHANNEL, run="grpo", key=KEY, owner=owner)
    with scene.archiving():
        scene.wait_for(scene.publish())
        other._latest, other._tag = other._read_latest()
        other.describe(Facts({"theirs": 1}))
        scene.publish()
        eventually(lambda: scene.fenced or scene.ended is not None, "it is refused")
        assert (owner == OWNER) == isinstance(scene.ended, errors.Fenced)
    assert scene.steps == [1]


def test_after_another_writer_it_ends_with_its_session(scene: Scene) -> None:
    other = Writer(scene.bucket.objects, CHANNEL, run="grpo", key=KEY, owner="theirs")
    with scene.archiving():
        scene.wait_for(scene.publish())
        other._latest, other._tag = other._read_latest()
        other.describe(Facts({"theirs": 1}))
        scene.publish()
        eventually(lambda: scene.fenced, "it is refused")
        del scene.target.progress  # the real one
        scene.target.close(wait=False)
        eventually(lambda: scene.ended is not None, "it ends")
    assert isinstance(scene.ended, errors.ReplicasError)


def test_a_run_that_does_not_answer_keeps_its_labels(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def ask() -> Facts:
        calls.append(1)
        if len(calls) > 1:
            raise errors.Disconnected("busy")
        return Facts({"best": 1})

    monkeypatch.setattr(scene, "facts", None)
    told = scene.told
    thread = threading.Thread(target=archive_versions, args=(scene.target, scene.writer, ask, told, OWNER))
    thread.start()
    scene.wait_for(scene.publish())
    scene.wait_for(scene.publish())
    told.set()
    thread.join(30)
    assert len(calls) > 1
    with reader(scene.bucket, version="best") as follower, next(follower) as update:
        assert update.version == 1


def test_a_dropped_session_ends_it(scene: Scene, run: FakeRun) -> None:
    channel: Channel = scene.target
    with scene.archiving():
        scene.wait_for(scene.publish())
        channel.close(wait=False)
        eventually(lambda: scene.ended is not None, "it ends")
    assert isinstance(scene.ended, errors.ReplicasError)
