"""Older versions of an archive, by number and by label; and runs that began again.

Covers: archive/reader.py, archive/writer.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from replicas import errors
from replicas.archive import Facts, Rules
from replicas.archive.format import Latest, unseal
from tests.support.archives import Bucket, Words, bytes_of, changed, reader, version, writer

WORDS = np.random.default_rng(5).integers(0x3C00, 0x3D00, 601, dtype=np.uint16)


def filled(count: int, rules: Rules = Rules(), facts: Facts = Facts()) -> tuple[Bucket, list[Words]]:
    bucket, words = Bucket(), [WORDS]
    now = writer(bucket, rules)
    for number in range(1, count + 1):
        now.write(version(number, words[-1]), facts)
        words.append(changed(words[-1], number))
    return bucket, words[:count]


def latest(bucket: Bucket) -> Latest:
    return unseal(bucket.content("latest"), Latest, None, "latest")


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_version_by_its_number_comes_once(number: int) -> None:
    bucket, words = filled(5, Rules(chain=3))
    with reader(bucket, version=number) as follower:
        with next(follower) as update:
            assert (update.version, bytes_of(update)) == (number, words[number - 1].tobytes())
        assert list(follower) == []


def test_one_that_was_deleted_is_named_with_those_that_are_there() -> None:
    bucket, _ = filled(6, Rules(keep=3))
    with reader(bucket, version=2) as follower, pytest.raises(errors.Gone, match=r"has no version 2; it has 6, 5, 4"):
        next(follower)


def test_one_that_is_to_come_is_named_too() -> None:
    bucket, _ = filled(2)
    with reader(bucket, version=3) as follower, pytest.raises(errors.Gone, match=r"has no version 3; it has 2, 1"):
        next(follower)


def test_labels_of_an_earlier_start_of_the_run_stay() -> None:
    """Until this one gives them; those that the run moves itself do not."""
    bucket, words = filled(4, Rules(keep=1), Facts({"best": 2, "worst": 1, "current": 4, "candidate": 3}))
    again = writer(bucket, Rules(keep=1))
    again.write(version(1, words[0]), Facts({"current": 1, "worst": 1}))
    again.write(version(2, words[1]), Facts({"current": 2, "worst": 1}))
    assert latest(bucket).labels == {"best": 2, "current": 6, "worst": 5}
    with reader(bucket, version="best") as follower, next(follower) as update:
        assert (update.version, bytes_of(update)) == (2, words[1].tobytes())


def test_a_label_that_nobody_gave_is_waited_for_and_the_others_are_named() -> None:
    bucket, _ = filled(2, Rules(), Facts({"best": 1, "last": 2}))
    with (
        reader(bucket, version="bset", timeout=0.1) as follower,
        pytest.raises(errors.DeadlineExceeded, match=r'label "bset" did not come .* it has the labels best, last'),
    ):
        next(follower)


def test_a_label_is_followed_also_to_an_older_version() -> None:
    bucket, words = filled(4)
    now = writer(bucket)
    now.write(version(5, words[0]), Facts({"best": 4}))
    with reader(bucket, version="best", timeout=0.1) as follower:
        for number in (4, 2, 5):
            now.describe(Facts({"best": number}))
            with next(follower) as update:
                assert update.version == number
                assert bytes_of(update) == words[number - 1 if number < 5 else 0].tobytes()
        with pytest.raises(errors.DeadlineExceeded, match='another version of label "best"'):
            next(follower)
        now.describe(Facts({}))
        with pytest.raises(errors.DeadlineExceeded, match='another version of label "best"'):
            next(follower)


def test_labels_that_the_storage_shows_late_are_not_followed_back() -> None:
    bucket, words = filled(3)
    now = writer(bucket)
    now.write(version(4, words[0]), Facts({"best": 1}))
    old = bucket.content("latest")
    now.describe(Facts({"best": 3}))
    with reader(bucket, version="best", timeout=0.1) as follower:
        next(follower).loaded()
        bucket.replace("latest", old)
        with pytest.raises(errors.DeadlineExceeded):
            next(follower)


def test_versions_of_labels_and_leases_are_kept() -> None:
    bucket, words = filled(8, Rules(keep=2), Facts({"best": 2}, {}, {4}))
    for number in (2, 4, 7, 8):
        with reader(bucket, version=number) as follower, next(follower) as update:
            assert bytes_of(update) == words[number - 1].tobytes()


def test_scores_are_those_that_the_run_knows() -> None:
    bucket, words = filled(1)
    now = writer(bucket)
    now.write(version(1, words[0]))
    now.write(version(2, WORDS), Facts({}, {1: {"reward": 0.5}, 2: {}}))
    assert latest(bucket).scores == {"1": {"reward": 0.5}}


def test_nothing_is_written_for_labels_that_stay() -> None:
    bucket, words = filled(1)
    now = writer(bucket)
    now.write(version(1, words[0]))
    now.describe(Facts({"best": 1}))
    bucket.calls.clear()
    now.describe(Facts({"best": 1}))
    assert bucket.calls["put"] == 0


def test_a_version_and_its_labels_take_three_requests() -> None:
    bucket, words = filled(3)
    now = writer(bucket)
    now.write(version(4, words[0]))
    bucket.calls.clear()
    now.write(version(5, words[1]), Facts({"current": 5, "previous": 4}, {4: {"reward": 1.0}}))
    assert bucket.calls["put"] == 3


def test_a_run_that_began_again_counts_on() -> None:
    """Its versions have the next numbers, also for a writer that is restarted."""
    bucket, words = filled(3)
    again = writer(bucket)
    for number in (1, 2):
        again.write(version(number, words[number]), Facts({"current": number}))
    assert (latest(bucket).newest.version, latest(bucket).labels, latest(bucket).shift) == (5, {"current": 5}, 3)
    assert again.newest == 2
    restarted = writer(bucket)
    bucket.calls.clear()
    restarted.write(version(2, words[2]))
    assert bucket.calls["put"] == 0, "the newest one is there"
    restarted.write(version(3, words[0], content_of=1))
    with reader(bucket) as follower, next(follower) as update:
        assert (update.version, update.content_of) == (6, 4)
    third = writer(bucket)
    third.write(version(1, words[1]))
    assert latest(bucket).newest.version == 7
    with reader(bucket, version=3) as follower, next(follower) as update:
        assert bytes_of(update) == words[2].tobytes(), "those of the first run stay"


def test_at_least_and_version_exclude_each_other() -> None:
    bucket, _ = filled(1)
    with (
        pytest.raises(errors.UsageError, match="at_least and version exclude each other"),
        reader(bucket, version=1, at_least=1),
    ):
        pass
