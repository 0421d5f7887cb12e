"""What a reader of an archive hands out, and what it refuses.

Covers: archive/reader.py, channel/versions/owner.py.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import replicas
from replicas import errors
from replicas.archive import ArchiveKey, Facts, Follower, Rules, Version
from replicas.archive import reader as reading
from replicas.archive.keys import make_pem
from replicas.testing import FakeRun
from tests.support.archives import CHANNEL, KEY, Bucket, Words, bytes_of, changed, reader, version, writer

WORDS = np.random.default_rng(5).integers(0x3C00, 0x3D00, 601, dtype=np.uint16)
SHAPES = {"w": (600,), "tied": (600,), "b": ()}


def filled(count: int, rules: Rules = Rules()) -> tuple[Bucket, list[Words]]:
    bucket, words = Bucket(), [WORDS]
    now = writer(bucket, rules)
    for number in range(1, count + 1):
        now.write(version(number, words[-1], meta={"step": 10 * number}))
        words.append(changed(words[-1], number))
    return bucket, words[:count]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 0.15)
    monkeypatch.setattr(reading, "FIRST_S", 0.01)


# ------------------------------------------------------------ the update


def test_an_update_is_that_of_a_channel(tmp_path: Path) -> None:
    bucket, words = filled(3)
    with reader(bucket) as follower, next(follower) as update:
        assert isinstance(update, replicas.Update)
        assert (update.version, update.base, update.meta, update.content_of) == (3, 0, {"step": 30}, 0)
        assert follower.entry is not None
        assert update.digest == follower.entry.digest
        model = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        update.load_into(model)
        assert model["w"].view(torch.uint8).numpy().tobytes() == words[2][:600].tobytes()
        assert [name for name, _ in update] == ["w", "tied", "b"]
        loaded = safetensors.torch.load_file(update.path)
        mapped = dict(update)
    assert torch.equal(loaded["w"], model["w"])
    assert torch.equal(mapped["w"], model["w"]), "it stays while it is kept"


def test_changes_are_those_since_the_version_that_was_loaded() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket)
    with reader(bucket) as follower:
        model = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        for number in range(1, 6):
            now.write(version(number, words))
            with next(follower) as update:
                assert update.base == number - 1
                if update.base:
                    found = {one.name: one for one in update.changes()}
                    assert found["w"].whole is None
                    assert 0 < len(found["w"].positions) < 60
                update.load_into(model, changed_only=update.base > 0)
            assert model["w"].view(torch.uint8).numpy().tobytes() == words[:600].tobytes()
            words = changed(words, number)


def test_a_failed_load_has_no_base() -> None:
    bucket, _ = filled(1)
    now = writer(bucket)
    with reader(bucket) as follower:
        with next(follower):
            pass
        now.write(version(2, WORDS))
        with pytest.raises(ZeroDivisionError), next(follower) as update:
            assert update.base == 1
            _ = 1 / 0
        now.write(version(3, WORDS))
        assert next(follower).base == 0


def test_an_update_must_end_before_the_next() -> None:
    bucket, _ = filled(1)
    now = writer(bucket)
    with reader(bucket) as follower:
        update = next(follower)
        _ = dict(update)
        now.write(version(2, WORDS))
        with pytest.raises(errors.UsageError, match=r"the update of version 1 is open .leave its `with` block first"):
            next(follower)
        update.loaded()
        assert next(follower).base == 1


def test_an_update_that_was_not_used_is_taken_back_and_a_dropped_one_freed() -> None:
    bucket, words = filled(1)
    now = writer(bucket)
    with reader(bucket) as follower:
        kept = next(follower)
        for number in range(2, 7):
            now.write(version(number, words[0]))
            assert next(follower).version == number, "its slot is used again"
        assert kept.ended
        now.write(version(7, words[0]))
        update = next(follower)
        _ = dict(update)
        del update
        gc.collect()
        now.write(version(8, words[0]))
        assert (next(follower).base, follower.version) == (0, 8)


def test_scores_are_for_the_run() -> None:
    bucket, _ = filled(1)
    with reader(bucket) as follower, next(follower) as update:
        with pytest.raises(errors.UsageError, match=r"an archive takes no scores .report them to the run"):
            update.report(reward=1.0)
        assert update.adopt().done()


def test_an_old_version_has_the_content_of_another() -> None:
    bucket = Bucket()
    now = writer(bucket)
    now.write(version(1, WORDS))
    now.write(version(2, WORDS, content_of=1), Facts({"current": 2}, {2: {"reward": 0.5}}))
    with reader(bucket) as follower, next(follower) as update:
        assert update.content_of == 1
        assert follower.entry is not None
        assert (follower.entry.labels, follower.entry.scores) == (("current",), {"reward": 0.5})


async def _first(follower: Follower) -> int:
    async for update in follower:
        return update.version
    return 0


@pytest.mark.anyio
async def test_it_can_be_awaited() -> None:
    bucket, _ = filled(2)
    with reader(bucket) as follower:
        assert await _first(follower) == 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ------------------------------------------------------------ which version


def test_it_waits_for_the_next_version() -> None:
    bucket, _ = filled(1)
    now = writer(bucket)
    with reader(bucket) as follower:
        next(follower)
        timer = threading.Timer(0.3, now.write, [version(2, WORDS)])
        timer.start()
        assert next(follower).version == 2
        timer.join(10)


def test_a_wait_ends_by_its_deadline_with_the_reason() -> None:
    bucket = Bucket()
    with reader(bucket, timeout=0.2) as follower:
        began = time.monotonic()
        with pytest.raises(
            errors.DeadlineExceeded, match=r"a version after 0 did not come within 0\.2 s: .*latest cannot be read"
        ):
            next(follower)
        assert 0.2 <= time.monotonic() - began < 5
        writer(bucket).write(version(1, WORDS))
        assert next(follower).version == 1, "the next step goes on"


BOUNDS = [(2, True), (3, False), (("step", 20), True), (("step", 21), False), (("x", 0), False)]


@pytest.mark.parametrize(("at_least", "comes"), BOUNDS)
def test_versions_below_a_bound_are_waited_out(at_least: int | tuple[str, float], comes: bool) -> None:
    bucket, _ = filled(2)
    with reader(bucket, timeout=0.0, at_least=at_least) as follower:
        if comes:
            assert next(follower).version == 2
        else:
            with pytest.raises(errors.DeadlineExceeded):
                next(follower)


def test_a_late_reader_applies_the_steps_between() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket)
    with reader(bucket) as follower:
        for number in range(1, 12):
            words = changed(words, number, 0.002)
            now.write(version(number, words))
            if number in (1, 3, 11):
                bucket.read.clear()
                with next(follower) as update:
                    assert bytes_of(update) == words.tobytes()
                assert len(bucket.read) == {1: 1, 3: 2, 11: 8}[number], "steps, and no whole"


def test_the_url_may_be_that_of_the_channel(tmp_path: Path) -> None:
    from replicas.archive import Writer

    now = Writer(f"file://{tmp_path}/run", CHANNEL, run="grpo", key=KEY)
    now.write(version(1, WORDS))
    for archive, channel in ((f"file://{tmp_path}/run", CHANNEL), (f"file://{tmp_path}/run/{CHANNEL}", None)):
        follower = replicas.follow(archive, channel, key=KEY.public, timeout=5)
        with next(follower) as update:
            assert bytes_of(update) == WORDS.tobytes()
        follower.close()


def test_a_key_must_be_given_and_another_is_refused() -> None:
    bucket, _ = filled(1)
    with pytest.raises(TypeError, match="key"):
        replicas.follow("memory://", CHANNEL)  # type: ignore[call-arg]  # as a user may
    with reader(bucket, key=None) as follower:
        assert next(follower).version == 1
    another = ArchiveKey(make_pem()).public
    refused = pytest.raises(errors.ArchiveTampered, match="latest was not signed")
    with reader(bucket, key=another) as follower, refused:
        next(follower)


# ------------------------------------------------------------ faults


DAMAGE: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "lost": lambda data, other: None,
    "forged": lambda data, other: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "cut": lambda data, other: data[: len(data) * 2 // 3],
    "longer": lambda data, other: data + b"x",
    "swapped": lambda data, other: other,
    "empty": lambda data, other: b"",
}


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("held", [0, 2])
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("which", range(5))
def test_no_object_can_be_lost_forged_cut_or_swapped(held: int, kind: str, which: int) -> None:
    """A typed error or a wait; never other bytes, never an older version."""
    bucket, words = filled(2)
    with reader(bucket, timeout=0.0) as follower:
        if held:
            next(follower).loaded()
        now, last = writer(bucket), words[-1]
        for number in (3, 4):
            last = changed(last, number)
            now.write(version(number, last))
        names = [name.partition("/")[2] for name in bucket.names()]
        name = [one for one in names if "00000004" in one or "00000003" in one or one == "latest"][which]
        kin = [one for one in names if one != name and one.partition("/")[0] == name.partition("/")[0]]
        data = bucket.content(name)
        damaged = DAMAGE[kind](data, bucket.content((kin or [names[0]])[0]))
        bucket.objects.delete(f"{CHANNEL}/{name}")
        if damaged is not None:
            bucket.replace(name, damaged)
        began, kinds = time.monotonic(), set[type[Exception]]()
        try:
            with next(follower) as update:
                assert (update.version, bytes_of(update)) == (4, last.tobytes())
        except (errors.ArchiveTampered, errors.DeadlineExceeded) as error:
            kinds.add(type(error))
        if kind == "lost":
            assert errors.ArchiveTampered not in kinds
        elif kind == "forged":
            assert errors.DeadlineExceeded not in kinds
        unread = "entries/00000003" in name and (kind == "lost" or not held)
        assert kinds or unread or (kind == "longer" and "data" in name), "it has read what it did not need"
        assert time.monotonic() - began < 5
        bucket.replace(name, data)
        if follower.version < 4:
            with next(follower) as update:
                assert (update.version, bytes_of(update)) == (4, last.tobytes()), "it goes on when mended"


@pytest.mark.usefixtures("_impatient")
def test_an_object_that_comes_late_is_waited_for() -> None:
    bucket, words = filled(2)
    name = next(one for one in bucket.names(f"{CHANNEL}/data") if "00000002" in one)
    data = bucket.content(name.partition("/")[2])
    bucket.objects.delete(name)
    looks = itertools.count()

    def appear(read: str) -> None:
        if read == "latest" and next(looks) == 3:
            bucket.objects.put(name, data)

    bucket.before_read = appear
    with reader(bucket) as follower, next(follower) as update:
        assert bytes_of(update) == words[1].tobytes()


@pytest.mark.usefixtures("_impatient")
def test_an_object_that_stays_away_is_named() -> None:
    bucket, _ = filled(2)
    name = next(one for one in bucket.names(f"{CHANNEL}/data") if "00000002" in one)
    bucket.objects.delete(name)
    text = f"{name.partition('/')[2]} cannot be read: Object at location"
    with reader(bucket) as follower, pytest.raises(errors.ArchiveError, match=text):
        next(follower)
    late = pytest.raises(errors.DeadlineExceeded, match=rf"within .* s: .*{text}")
    with reader(bucket, timeout=0.05) as follower, late:
        next(follower)


def test_an_older_latest_is_ignored() -> None:
    bucket, words = filled(2)
    old = bucket.content("latest")
    now = writer(bucket)
    now.write(version(3, words[0]))
    with reader(bucket, timeout=0.1) as follower:
        with next(follower) as update:
            assert update.version == 3
        newest = bucket.content("latest")
        bucket.replace("latest", old)
        with pytest.raises(errors.DeadlineExceeded):
            next(follower)
        assert follower.version == 3
        bucket.replace("latest", newest)
        with pytest.raises(errors.DeadlineExceeded):
            next(follower)


def test_another_version_of_the_same_number_is_refused() -> None:
    bucket, _ = filled(2)
    other, _ = Bucket(), writer(bucket)
    now = writer(other)
    now.write(version(2, changed(WORDS, 77)))
    with reader(bucket, timeout=0.1) as follower:
        next(follower)
        bucket.replace("latest", other.content("latest"))
        with pytest.raises(errors.ArchiveTampered, match="latest: another 2 of policy"):
            next(follower)


def test_another_channels_latest_is_refused() -> None:
    bucket, _ = filled(1)
    bucket.objects.put("other/latest", bucket.content("latest"))
    follower = Follower(bucket.objects, "other", KEY.public, None, None, 0.0)
    with pytest.raises(errors.ArchiveTampered, match="another 1 of policy"):
        next(follower)


def test_a_deleted_step_costs_a_whole() -> None:
    """A reader that was away for longer than the archive keeps."""
    bucket, words = Bucket(), WORDS
    now = writer(bucket, Rules(keep=2, grace_s=0.0))
    with reader(bucket) as follower:
        for number in range(1, 7):
            words = changed(words, number, 0.002)
            now.write(version(number, words, at=float(number)))
            if number == 1:
                next(follower).loaded()
        bucket.read.clear()
        with next(follower) as update:
            assert bytes_of(update) == words.tobytes()
        assert len(bucket.read) == 2


# ------------------------------------------------------------ from a run to a reader


def test_what_a_channel_commits_is_what_a_reader_gets(run: FakeRun) -> None:
    """Bit by bit, with the digest of the receipt; the update ends before the write."""
    source, target = run.join("trainer"), run.join("rollout")
    bucket = Bucket()
    now = writer(bucket)
    weights = {"a": torch.randn(300, 4), "b": torch.randn(7).bfloat16(), "none": torch.empty(0)}
    with reader(bucket) as follower:
        for number in range(1, 4):
            weights["b"] += 1
            pending = source.publish(weights, meta={"step": number})
            with target.receive().wait(20) as update:
                found = Version.of(update)
            receipt = pending.wait(20)
            now.write(found, Facts({"current": number}))
            with next(follower) as archived:
                assert (archived.version, archived.digest, archived.meta) == (number, receipt.digest, {"step": number})
                assert archived.manifest == update.manifest
                for name, tensor in archived.tensors().items():
                    assert torch.equal(tensor, weights[name]), name
            assert follower.entry is not None
            assert (follower.entry.step, follower.entry.labels) == (number, ("current",))


def test_a_closed_archive_is_named() -> None:
    bucket, _ = filled(1)
    with reader(bucket) as follower:
        next(follower).loaded()
    with pytest.raises(errors.UsageError, match=r"policy was closed .open the archive again"):
        wait_closed(follower)


def wait_closed(follower: Follower) -> None:
    """The thread of a store ends some moments after it was closed."""
    deadline = time.monotonic() + 10
    while not follower._store._loop.is_closed():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    next(follower)
