"""What writers and readers of an archive do after faults that come together.

Covers: archive/writer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replicas import errors
from replicas.archive import Rules, Writer
from replicas.archive.format import number_of
from tests.support.archives import CHANNEL, Bucket, Killed, Words, bytes_of, changed, reader, version, writer

WORDS = np.random.default_rng(5).integers(0x3C00, 0x3D00, 601, dtype=np.uint16)
OTHERS = WORDS ^ np.uint16(0x0101)


def entries(bucket: Bucket) -> list[int]:
    return [number_of(name) for name in bucket.names(f"{CHANNEL}/entries")]


def killed_at_latest(bucket: Bucket, now: Writer, number: int, words: Words) -> None:
    """Its data and entry are there, and nothing refers to them."""
    bucket.put_limit = 2
    with pytest.raises(Killed):
        now.write(version(number, words))
    bucket.put_limit = None


def failing(call: Callable[..., Any], times: int, *, done: bool, name: str = "latest") -> Callable[..., Any]:
    """Its next calls for this object fail; when it was ``done``, or before."""
    left = times

    def fail(what: str, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        if what != name or not left:
            return call(what, *arguments, **options)
        left -= 1
        if done:
            call(what, *arguments, **options)
        raise errors.ArchiveError("the answer is lost")

    return fail


def test_an_entry_that_latest_never_named_does_not_count_as_kept() -> None:
    bucket, rules = Bucket(), Rules(keep=2, grace_s=0.0)
    now = writer(bucket, rules)
    for number in (1, 2):
        now.write(version(number, WORDS))
    killed_at_latest(bucket, now, 3, OTHERS)
    again = writer(bucket, rules)
    again.write(version(4, WORDS))
    assert entries(bucket) == [2, 4], "an orphan took the place of a version"


def test_a_run_that_starts_again_leaves_the_numbers_of_orphans_alone() -> None:
    bucket = Bucket()
    now = writer(bucket)
    now.write(version(1, WORDS))
    killed_at_latest(bucket, now, 2, WORDS)
    again = writer(bucket)
    assert again.write(version(1, OTHERS)).version == 3
    with reader(bucket, version=3) as follower, next(follower) as update:
        assert bytes_of(update) == OTHERS.tobytes()


def test_of_two_entries_of_a_number_readers_get_the_one_that_was_the_newest() -> None:
    """A writer that was shown no ``latest`` has written another one, and was fenced."""
    for seed in range(4):  # names have hashes: one is the first in half of all cases
        bucket, words = Bucket(), changed(OTHERS, seed)
        now = writer(bucket)
        now.write(version(1, WORDS))
        late = writer(bucket)
        late._latest, late._tag = None, None
        with pytest.raises(errors.Fenced):
            late.write(version(1, words))
        now.write(version(2, WORDS))
        assert entries(bucket) == [1, 1, 2]
        with reader(bucket, version=1) as follower, next(follower) as update:
            assert bytes_of(update) == WORDS.tobytes()


def test_a_run_that_starts_again_may_fail_at_first() -> None:
    bucket = Bucket()
    writer(bucket).write(version(5, WORDS))
    again = writer(bucket)
    again._store.list_names = failing(again._store.list_names, 1, done=False, name="entries")  # type: ignore[method-assign]
    with pytest.raises(errors.ArchiveError):
        again.write(version(1, OTHERS))
    assert again.write(version(1, OTHERS)).version == 6


def test_nothing_is_deleted_by_a_list_that_is_late() -> None:
    """Else the data of an entry that it lacks would be."""
    bucket, rules = Bucket(), Rules(keep=4, grace_s=0.0)
    now = writer(bucket, rules)
    for number in (1, 2, 3):
        now.write(version(number, changed(WORDS, number)))
    again = writer(bucket, rules)
    list_names = again._store.list_names
    late = {name for name in list_names("entries") if number_of(name) == 3}
    again._store.list_names = lambda folder: [one for one in list_names(folder) if one not in late]  # type: ignore[method-assign]
    again.write(version(4, WORDS))
    with reader(bucket, version=3) as follower, next(follower) as update:
        assert bytes_of(update) == changed(WORDS, 3).tobytes()
    again._store.list_names = list_names  # type: ignore[method-assign]
    for number in (5, 6):
        again.write(version(number, WORDS))
    assert entries(bucket) == [3, 4, 5, 6], "it is made up for"


def test_a_latest_that_was_written_unknown_to_its_writer_is_followed_by_a_whole() -> None:
    """Its answer is lost, and then the storage is away: the writer has compared with
    the version before it."""
    bucket, words = Bucket(), changed(WORDS, 2, 0.005)
    now = writer(bucket, Rules(keep=3, grace_s=0.0))
    now.write(version(1, WORDS))
    put, read = now._store.put, now._store.read
    now._store.put, now._store.read = failing(put, 1, done=True), failing(read, 1, done=False)  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(errors.ArchiveError):
            now.write(version(2, words))
    assert now.write(version(2, words)).version == 2
    with reader(bucket) as follower:
        next(follower).loaded()
        for number in (3, 4, 5):
            words = changed(words, number, 0.005)
            now.write(version(number, words))
            with next(follower) as update:
                assert (update.version, bytes_of(update)) == (number, words.tobytes())
            assert entries(bucket) == [number - 2, number - 1, number], "it counts as the others"


def test_a_reader_stays_with_its_run() -> None:
    """One key may have signed more than one run's archive."""
    bucket, other = Bucket(), Bucket()
    writer(bucket).write(version(1, WORDS))
    now = writer(other, run="sft")
    for number in (1, 2):
        now.write(version(number, OTHERS))
    with reader(bucket, timeout=0.0) as follower:
        next(follower).loaded()
        for name in other.names():
            bucket.objects.put(name, bytes(other.objects.get(name).bytes()))
        with pytest.raises(errors.ArchiveTampered, match="another 2 of policy"):
            next(follower)


def test_an_old_version_of_another_run_is_refused() -> None:
    bucket, other = Bucket(), Bucket()
    for number in (1, 2):
        writer(bucket).write(version(number, WORDS))
    writer(other, run="sft").write(version(1, OTHERS))
    own, theirs = bucket.names(f"{CHANNEL}/entries")[0], other.names(f"{CHANNEL}/entries")[0]
    bucket.objects.delete(own)
    bucket.objects.put(theirs, bytes(other.objects.get(theirs).bytes()))
    with reader(bucket, version=1) as follower, pytest.raises(errors.ArchiveTampered, match="of run sft"):
        next(follower)


def test_a_missing_latest_at_the_start_fences_the_writer() -> None:
    """It cannot write over what it has not seen."""
    bucket = Bucket()
    writer(bucket).write(version(3, WORDS))
    before = bucket.content("latest")
    bucket.objects.delete(f"{CHANNEL}/latest")
    late = writer(bucket)
    bucket.replace("latest", before)
    with pytest.raises(errors.Fenced):
        late.write(version(1, OTHERS))
    assert bucket.content("latest") == before
