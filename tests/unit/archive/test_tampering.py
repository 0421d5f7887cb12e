"""A thousand tries to deceive a reader that has the writer's key.

Whoever may write to the storage can delete versions and show old ones. All else is
found, or does no harm: a reader hands out the exact bytes of a version that was
written, of the number that it was asked for, and none older than what it had.

Covers: archive/keys.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from replicas import errors
from replicas.archive import ArchiveKey, Facts, Rules
from replicas.archive import reader as reading
from replicas.archive.format import Entry, Latest, Link, name_of, seal, sha256_of, unseal
from replicas.archive.keys import make_pem
from tests.support.archives import CHANNEL, KEY, Bucket, Words, bytes_of, changed, reader, version, writer

TRIES = 1000
VERSIONS = 9
OTHER = ArchiveKey(make_pem())
Objects = dict[str, bytes]
Tamper = Callable[[Objects, random.Random], object]


class Story:
    """An archive after each of its versions, and others to take objects from."""

    def __init__(self) -> None:
        self.words: list[Words] = [np.random.default_rng(1).integers(0x3C00, 0x3F00, 601, dtype=np.uint16)]
        bucket, self.states = Bucket(), list[Objects]()
        now = writer(bucket, Rules(chain=4))
        for number in range(1, VERSIONS + 1):
            now.write(version(number, self.words[-1], at=float(number)), Facts(labels={"best": max(1, number - 2)}))
            self.states.append(objects_of(bucket))
            self.words.append(changed(self.words[-1], number))
        now.close()
        self.others = [self._another("sft", KEY), self._another("grpo", OTHER)]

    def _another(self, run: str, key: ArchiveKey) -> Objects:
        """An archive of the same channel, of another run or another key."""
        bucket, words = Bucket(), self.words[0] ^ np.uint16(3)
        now = writer(bucket, Rules(chain=4), run=run, key=key)
        for number in range(1, VERSIONS + 3):
            now.write(version(number, words))
            words = changed(words, 100 + number)
        now.close()
        return objects_of(bucket)


def objects_of(bucket: Bucket) -> Objects:
    return {name.partition("/")[2]: bucket.content(name.partition("/")[2]) for name in bucket.names(CHANNEL)}


def names(objects: Objects, folder: str = "") -> list[str]:
    return sorted(name for name in objects if name.startswith(folder))


STORY = Story()


# ------------------------------------------------------------ what is done


def flip(objects: Objects, rng: random.Random) -> None:
    """One bit of any object."""
    name = rng.choice(names(objects, rng.choice(("latest", "entries", "data"))))
    data = bytearray(objects[name])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    objects[name] = bytes(data)


def cut(objects: Objects, rng: random.Random) -> None:
    name = rng.choice(names(objects, rng.choice(("latest", "entries", "data"))))
    objects[name] = objects[name][: rng.randrange(len(objects[name]))]


def lengthen(objects: Objects, rng: random.Random) -> None:
    name = rng.choice(names(objects))
    objects[name] += rng.randbytes(rng.choice((1, 100)))


def swap(objects: Objects, rng: random.Random) -> None:
    one, other = rng.sample(names(objects, rng.choice(("", "entries", "data"))), 2)
    objects[one], objects[other] = objects[other], objects[one]


def replay_latest(objects: Objects, rng: random.Random) -> None:
    objects["latest"] = rng.choice(STORY.states)["latest"]


def replay_entry(objects: Objects, rng: random.Random) -> None:
    """An entry under the name of another one."""
    one, other = rng.sample(names(objects, "entries"), 2)
    objects[one] = objects[other]


def rename_entry(objects: Objects, rng: random.Random) -> None:
    """An entry, under a name of its own with another number."""
    data = objects[rng.choice(names(objects, "entries"))]
    objects[name_of("entries", rng.randint(1, VERSIONS), rng.choice(("0", "f")) * 16, "json")] = data


def add(objects: Objects, rng: random.Random) -> None:
    """Something that is not an archive's at all."""
    number = rng.randint(1, VERSIONS)
    objects[rng.choice(("entries/README", f"entries/{number:08}-x", f"entries/{number:08}-{'f' * 16}.json"))] = b"hello"


def delete(objects: Objects, rng: random.Random) -> None:
    for name in rng.sample(names(objects), rng.choice((1, 3))):
        del objects[name]


def go_back(objects: Objects, rng: random.Random) -> None:
    """All of it, to an older state."""
    objects.clear()
    objects.update(rng.choice(STORY.states))


def sign_latest(objects: Objects, rng: random.Random) -> None:
    """By another key: it says what it said, or names an older one as newer."""
    latest = unseal(objects["latest"], Latest, None, "latest")
    name = rng.choice(names(objects, "entries"))
    link = Link(version=VERSIONS + 1, entry=name, sha256=sha256_of(objects[name]))
    fields: dict[str, Any] = {"newest": link, "at": latest.at + 1} if rng.random() < 0.5 else {}
    objects["latest"] = seal(msgspec.structs.replace(latest, **fields), OTHER.sign)


def sign_entry(objects: Objects, rng: random.Random) -> None:
    name = rng.choice(names(objects, "entries"))
    objects[name] = seal(unseal(objects[name], Entry, None, name), OTHER.sign)


def change_signed(objects: Objects, rng: random.Random) -> None:
    """Other content under a signature that was of something else."""
    name = rng.choice(names(objects, "entries"))
    body = objects[name].partition(b"\n")[0].replace(b'"version":', b'"version":1', 1)
    objects[name] = body + b"\n" + objects[name].split(b"\n")[1] + b"\n"


def another_archive(objects: Objects, rng: random.Random) -> None:
    """Of another run or another key: all of it, or some objects."""
    other = rng.choice(STORY.others)
    if rng.random() < 0.4:
        objects.clear()
    if rng.random() < 0.5:
        objects.update({name: data for name, data in other.items() if rng.random() < 0.8 or not objects})
    else:
        objects.update(other)


TAMPERS: list[Tamper] = [flip, flip, cut, lengthen, swap, swap, replay_latest, replay_entry, rename_entry]
TAMPERS += [add, delete, go_back, sign_latest, sign_entry, change_signed, another_archive, another_archive]


# ------------------------------------------------------------ what comes of it


def one_try(number: int) -> str:
    """Return what came of it."""
    rng = random.Random(number)
    tamper, bucket = TAMPERS[number % len(TAMPERS)], Bucket()
    held, which = rng.choice((0, 0, 2, VERSIONS - 1)), rng.choice((None, None, rng.randint(1, VERSIONS), "best"))
    with reader(bucket, timeout=0.0, version=which) as follower:
        had = read = 0
        if held and not isinstance(which, int):
            store(bucket, STORY.states[held - 1])
            with next(follower) as update:
                had = update.version
        objects = dict(STORY.states[-1])
        tamper(objects, rng)
        store(bucket, objects)
        story = f"try {number}: {tamper.__name__}, with version {held}, of {which}"
        for _ in range(2):
            try:
                with next(follower) as update:
                    found, data = update.version, bytes_of(update)
            except StopIteration:
                break
            except errors.DeadlineExceeded as error:
                return "read" if read else type(error).__name__
            except (errors.ArchiveTampered, errors.ArchiveError, errors.Gone) as error:
                return type(error).__name__
            if had or objects.get("latest") != STORY.others[0]["latest"]:  # a reader learns the run's name from it
                assert data == STORY.words[found - 1].tobytes(), (story, found)
            assert which is None or found == which or which == "best", (story, found)
            assert found > had, (story, "an older one", found, had)
            had, read = found, read + 1
    return "read"


def store(bucket: Bucket, objects: Objects) -> None:
    for name in bucket.names(CHANNEL):
        bucket.objects.delete(name)
    for name, data in objects.items():
        bucket.replace(name, data)


@pytest.mark.slow
def test_nobody_without_the_key_can_deceive_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 0.0)
    found = Counter(one_try(number) for number in range(TRIES))
    print(dict(found))
    assert found["ArchiveTampered"] > TRIES // 4
    assert found["read"] > TRIES // 10, "what it does not need does no harm"
