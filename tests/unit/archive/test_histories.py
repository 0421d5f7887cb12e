"""Any history of an archive: versions, kills of the writer at any request, deletions.

A reader from any point gets the exact bytes of the newest version, from at most two
data objects if it has none, and never an older version after a newer one.

Covers: archive/writer.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import errors
from replicas.archive import ArchiveKey, Facts, Rules, Writer
from replicas.archive.format import Entry, unseal
from replicas.archive.keys import make_pem, verifier
from tests.support.archives import KEY, Bucket, Killed, Words, bytes_of, changed, manifest_of, reader, version, writer

WORDS = np.random.default_rng(5).integers(0, 65536, 600, dtype=np.uint16)


class Step(NamedTuple):
    """One version, and what happens: how much changes, after how many writes the writer
    is killed, and whether the reader that follows looks."""

    change: str
    killed_after: int | None
    looks: bool


@contextlib.contextmanager
def clock() -> Iterator[Callable[[float], None]]:
    """The writers' clock, by which data stay for ``grace_s``; yields what sets it."""
    found: Any = SimpleNamespace(time=time.time, now=0.0)
    found.monotonic = lambda: found.now
    with mock.patch("replicas.archive.writer.time", found):
        yield partial(setattr, found, "now")


STEPS = st.builds(
    Step,
    st.sampled_from(["step", "step", "step", "nothing", "all", "back", "layout"]),
    st.sampled_from([None, None, 0, 1, 2, 3]),
    st.booleans(),
)


def next_words(words: Words, first: Words, change: str, number: int) -> Words:
    match change:
        case "step":
            return changed(words, number)
        case "all":
            return words ^ np.uint16(0x5555)
        case "back":
            return first
        case "layout":
            return np.concatenate([words, words[:3]])
    return words


@given(st.lists(STEPS, min_size=1, max_size=14), st.integers(0, 3), st.integers(2, 8))
def test_readers_get_the_exact_bytes_and_need_two_objects(steps: list[Step], keep: int, chain: int) -> None:
    bucket, rules, words = Bucket(), Rules(keep=keep, chain=chain, grace_s=2.0), WORDS
    now, written = writer(bucket, rules), dict[int, bytes]()
    with reader(bucket, timeout=0.0) as follower, clock() as set_clock:
        for number, (change, killed_after, looks) in enumerate(steps, 1):
            set_clock(float(number))
            words = next_words(words, WORDS, change, number)
            bucket.put_limit = killed_after
            try:
                now.write(version(number, words), Facts(held={2}))
            except Killed:
                bucket.put_limit = None
                now = writer(bucket, rules)  # it starts again, with nothing in memory
            else:
                bucket.put_limit = None
                written[number] = words.tobytes()
            newest = max(written, default=0)
            if looks and newest > follower.version:
                with next(follower) as update:
                    assert (update.version, bytes_of(update)) == (newest, written[newest])
            elif looks:
                with pytest.raises(errors.DeadlineExceeded):
                    next(follower)
            if newest:
                bucket.read.clear()
                with reader(bucket) as joiner, next(joiner) as update:
                    assert (update.version, bytes_of(update)) == (newest, written[newest])
                assert len(bucket.read) <= 2
    if keep and written and now.write(version(99, words)) and now.write(version(100, words)):
        entries = bucket.names("policy/entries")
        assert len(entries) == min(keep, len(written) + 2), "orphans and old entries stay"


def test_a_version_takes_three_requests_of_each() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket)
    with reader(bucket) as follower:
        for number in range(1, 21):
            bucket.calls.clear()
            now.write(version(number, words))
            with next(follower):
                assert bucket.calls == {"put": 3, "read": 3}
            words = changed(words, number)


def test_a_writer_that_starts_again_goes_on_with_the_chain() -> None:
    bucket = Bucket()
    writer(bucket).write(version(1, WORDS))
    again = writer(bucket)
    again.write(version(2, changed(WORDS, 2)))
    names = [name.partition("/")[2] for name in bucket.names("policy/entries")]
    first, second = (unseal(bucket.content(name), Entry, verifier(KEY.public), name) for name in names)
    assert second.before is not None
    assert (second.before.version, first.version) == (1, 1)
    assert second.from_whole is None, "it has no bytes to compare with"


def test_a_version_that_is_there_is_not_written_again() -> None:
    bucket = Bucket()
    link = writer(bucket).write(version(1, WORDS))
    again = writer(bucket)
    bucket.calls.clear()
    assert again.write(version(1, WORDS)) == link
    assert bucket.calls["put"] == 0
    with pytest.raises(errors.StaleVersion, match=r"version 1 is not newer than version 1 of .*in their order"):
        again.write(version(1, changed(WORDS, 1)))


def test_a_second_writer_is_refused_by_name() -> None:
    bucket = Bucket()
    one, other = writer(bucket), writer(bucket)
    other.write(version(1, WORDS))
    with pytest.raises(errors.Fenced, match=r"is written by .* process \d+ .*, too: version 1 \(end one"):
        one.write(version(1, changed(WORDS, 1)))
    other.write(version(2, WORDS))
    with reader(bucket) as follower, next(follower) as update:
        assert bytes_of(update) == WORDS.tobytes()


@contextlib.contextmanager
def lost_answer(now: Writer, name: str, *, written: bool) -> Iterator[None]:
    """The next write of an object fails, and was done or not."""
    put = now._store.put

    def fail(one: str, *given: object, **more: object) -> object:
        if one != name:
            return put(one, *given, **more)  # type: ignore[arg-type]  # passed on
        if written:
            put(one, *given, **more)  # type: ignore[arg-type]  # passed on
        raise errors.ArchiveError("no answer")

    now._store.put = fail  # type: ignore[method-assign,assignment]  # for the block
    yield
    now._store.put = put  # type: ignore[method-assign]  # as before


def test_an_answer_that_is_lost_changes_nothing() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket)
    for number, written in enumerate([True, False, True], 1):
        words = changed(words, number)
        one = version(number, words)
        with (
            lost_answer(now, "latest", written=written),
            contextlib.nullcontext() if written else pytest.raises(errors.ArchiveError),
        ):
            now.write(one)
        assert now.write(one).version == number
        with reader(bucket) as follower, next(follower) as update:
            assert bytes_of(update) == words.tobytes()


@pytest.mark.parametrize(
    ("run", "key", "text"),
    [
        ("other", KEY, r"policy holds policy of run grpo, by .* process \d+"),
        ("grpo", ArchiveKey(make_pem()), "is not this writer's: latest was not signed by the key"),
    ],
)
def test_a_foreign_archive_is_refused(run: str, key: ArchiveKey, text: str) -> None:
    bucket = Bucket()
    writer(bucket).write(version(1, WORDS))
    with pytest.raises(errors.UsageError, match=text):
        writer(bucket, run=run, key=key)


@pytest.mark.parametrize("channel", [".", "..", "", "a/b"])
def test_a_channel_must_be_able_to_name_a_folder(channel: str) -> None:
    with pytest.raises(errors.UsageError, match="cannot be the name of a folder"):
        Writer("memory://", channel, run="grpo", key=KEY)


def test_bytes_must_have_the_digest_of_the_receipt() -> None:
    now = writer(Bucket())
    with pytest.raises(errors.UsageError, match=r"version 1 has digest .*, not 00"):
        now.write(version(1, WORDS, digest="00"))


def test_data_outlives_its_entry_and_labels_keep_both() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket, Rules(keep=2, chain=3, grace_s=10.0))

    def write(number: int, at: float) -> None:
        """At this moment, however long ago the version was copied."""
        with clock() as set_clock:
            set_clock(at)
            now.write(version(number, words, at=0.0), Facts(held={2}))

    for number in range(1, 8):
        words = changed(words, number)
        write(number, float(number))
    kept = [int(name.partition("-")[0].rpartition("/")[2]) for name in bucket.names("policy/entries")]
    assert kept == [2, 6, 7]
    assert len(bucket.names("policy/data")) == 9, "4 and 7 are wholes, and have a step beside"
    for number, at in ((8, 30.0), (9, 39.0), (9, 39.0)):
        write(number, at)
        data = [int(name.partition("-")[0].rpartition("/")[2]) for name in bucket.names("policy/data")]
        assert set(data) == {1, 2, 4, 6, 7, 8, 9} - ({9} if number == 8 else set()), "6 was needed until 30"
    write(10, 49.0)
    data = [int(name.partition("-")[0].rpartition("/")[2]) for name in bucket.names("policy/data")]
    assert data == [1, 2, 7, 8, 9, 10, 10], "2 is made of 1, and 9 of the whole 7; 8 was needed until 49"


def test_a_failed_deletion_is_tried_again() -> None:
    bucket, words = Bucket(), WORDS
    now = writer(bucket, Rules(keep=1, grace_s=0.0))
    delete = now._store.delete

    def fail(names: object) -> None:
        raise errors.ArchiveError("denied")

    now._store.delete = fail  # type: ignore[method-assign]  # for some versions
    for number in range(1, 4):
        now.write(version(number, words))
    assert len(bucket.names("policy/entries")) == 3
    now._store.delete = delete  # type: ignore[method-assign]  # as before
    now.write(version(4, words))
    assert len(bucket.names("policy/entries")) == 1


def test_a_small_archive_of_steps() -> None:
    """20 versions, of each of which 1 % changes anywhere, take little more than two."""
    bucket, words = Bucket(), np.random.default_rng(1).integers(0x3C00, 0x3D00, 100_001, dtype=np.uint16)
    manifest = manifest_of(100_000)
    now = writer(bucket)
    for number in range(1, 21):
        now.write(version(number, words, manifest))
        words = changed(words, number, 0.01)
    assert bucket.nbytes() < 0.12 * 20 * len(words) * 2
