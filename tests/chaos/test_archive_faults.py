"""Faults of an archive's storage by seed, one round after the other, each with an
archive of its own behind a proxy (:mod:`tests.support.archives.faults`).

A round has a writer, which is a process that is killed at any request and started
again, sometimes as a run that counts from 1 again, sometimes beside the one before; a
follower; and now and then a joiner, and readers by number and by label. Some rounds
delete old versions at once, while readers are held up for longer.

Without more it goes on for some seconds. ``CHAOS_SEED`` and ``CHAOS_ROUNDS`` choose
another history or a longer one: the same seed deals the same faults and kills. Checked
after each step: A1: a reader hands out the bytes that were written under that number,
and never an older version after a newer one. A2: errors are of the documented types,
and a reader that was shown what was written calls nothing tampered. A3: each call ends
by its bound. A4: ``latest`` never goes back, names an entry that is there with all its
data, and no two writers take turns. A5: what a kept entry needs is not deleted. A6:
after the faults the writer goes on, the follower gets the newest version soon, and all
that is kept can be read by its number.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import replicas
from replicas import errors
from replicas.archive import ArchiveKey, Follower, Rules
from replicas.archive import reader as reading
from replicas.archive import store as storing
from replicas.archive.format import Entry, Latest, Link, sha256_of, unseal
from replicas.archive.keys import verifier
from tests.support.archives import CHANNEL, bytes_of
from tests.support.archives.faults import KINDS, READ_KINDS, TAMPERING, Door, Fault, Proxy, Stop
from tests.support.archives.nursery import Child, Command, Nursery, nursery, words_of
from tests.support.archives.servers import ENVIRONMENT, make_bucket, serving
from tests.support.machine.load import Load

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
SECONDS = float(os.environ.get("CHAOS_ARCHIVE_SECONDS", "12"))
"""How long it goes on when it is not told how many rounds."""
SEED = int(os.environ.get("CHAOS_SEED", "7"))
CALL_S, PATIENCE_S, TIMEOUT_S = 0.4, 1.0, 0.15
BOUND_S = 12 * CALL_S
"""Of the longest call: so many requests at most meet a fault in it."""
RECOVERY_S, REPLY_S = 10.0, 60.0
WRITING = ("status", "slow", "cut", "lost", "silent", "delayed", "late", "missing")
"""Faults of a writer: it trusts what it reads of its own storage."""
REFUSED = {"ArchiveError", "Missing", "Denied", "Overtaken", "Unchanged"}
COUNTS = (301, 12_001, 40_001)


class Archive:
    """What the storage has taken, and what must hold of it."""

    def __init__(self, proxy: Proxy, bucket: str, key: str) -> None:
        self.committed: dict[int, tuple[Link, Entry]] = {}
        """What was the newest at any time, by version."""
        self.labels: list[dict[str, int]] = []
        self.latest: Latest | None = None
        self.entries: dict[str, Entry] = {}
        self._proxy, self._bucket, self._verify = proxy, bucket, verifier(key)
        self._objects: dict[str, bytes] = {}
        self._writers: list[str] = []
        self._at = 0

    @property
    def newest(self) -> int:
        return 0 if self.latest is None else self.latest.newest.version

    def contents(self, version: int) -> set[Any]:
        """What a version may have: what it had as the newest; if that is deleted, or
        never was, also what writers that were killed or fenced have left."""
        link, entry = self.committed.get(version, (None, None))
        left = [one for one in self.entries.values() if one.version == version]
        found = [*([] if link and link.entry in self.entries else left), *([entry] if entry else [])]
        return {one.meta["step"] for one in found}

    def state(self) -> int:
        return len(self._proxy.writes.get(self._bucket, []))

    def check(self) -> None:
        """A4 and A5, of each write since the last call."""
        for name, data, _ in self._proxy.writes.get(self._bucket, [])[self._at :]:
            self._at += 1
            if data is None:
                self._objects.pop(name, None)
                self._gone(name, self.entries.pop(name, None))
                continue
            assert name == "latest" or self._objects.get(name, data) == data, ("A4: other bytes", name)
            self._objects[name] = data
            if name == "latest":
                self._moved(unseal(data, Latest, self._verify, name))
            elif name.startswith("entries/"):
                self.entries[name] = unseal(data, Entry, self._verify, name)

    def _moved(self, latest: Latest) -> None:
        before, link = self.latest, latest.newest
        assert before is None or (latest.at > before.at and link.version >= self.newest), ("A4: back", before, latest)
        assert sha256_of(self._objects.get(link.entry, b"")) == link.sha256, ("A4: no entry", link)
        entry = self.entries[link.entry]
        assert entry.objects <= self._objects.keys(), ("A4: no data", link, entry.objects - self._objects.keys())
        assert self.committed.setdefault(link.version, (link, entry)) == (link, entry), ("A4: two of a number", link)
        if not self._writers or self._writers[-1] != latest.writer:
            assert latest.writer not in self._writers, ("A4: two writers take turns", self._writers)
            self._writers.append(latest.writer)
        self.latest = latest
        self.labels.append(latest.labels)

    def _gone(self, name: str, entry: Entry | None) -> None:
        latest = self.latest
        assert latest is not None
        if entry is not None:
            assert name != latest.newest.entry, ("A5: the newest is deleted", name)
            return
        kept = [one.version for one in self.entries.values() if name in one.objects and self.is_committed(one)]
        assert not kept, ("A5: data is deleted that versions need", name, kept)

    def is_committed(self, entry: Entry) -> bool:
        return self.committed.get(entry.version, (None, None))[1] == entry


class Round:
    """One archive, its processes and its readers."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.rng = random.Random(f"{SEED} {number}")
        self.seed = self.rng.randrange(1 << 30)
        self.story: list[str] = []
        self._began = time.monotonic()
        self.bucket = f"round-{number}"
        make_bucket(world.server, self.bucket)
        self.url = f"s3://{self.bucket}/run"
        self.archive = Archive(world.proxy, self.bucket, world.key.public)
        self.doors = [world.proxy.door(self.seed + one) for one in range(4)]
        self.door, self.spare, self.following, self.joining = self.doors
        self.rules = Rules(
            chain=self.rng.choice((2, 4, 20)),
            keep=self.rng.choice((0, 2, 3)),
            grace_s=self.rng.choice((0.25, 0.25, 600.0)),
        )
        self.count = self.rng.choice(COUNTS)
        self.run_number = self.content = 0
        self.labels: dict[str, int] = {}
        self.child: Child | None = None
        self.may_be_fenced = False
        self.last: Command | None = None
        self.follower = self.reader(self.following, TIMEOUT_S)
        self.say(f"{self.rules}, {self.count} words")

    def say(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:7.3f} {text}")

    def reader(self, door: Door, timeout_s: float, version: int | str | None = None) -> Follower:
        os.environ["AWS_ENDPOINT"] = door.endpoint
        return replicas.follow(self.url, CHANNEL, key=self.world.key.public, version=version, timeout=timeout_s)

    # ------------------------------------------------------------ the writer

    def start(self, door: Door) -> Child:
        environment = ENVIRONMENT | {"AWS_ENDPOINT": door.endpoint}
        child = self.world.nursery.start(self.url, self.world.key_file, environment, self.rules, CALL_S)
        self.say(f"writer {child.pid} starts")
        return child

    def next_command(self, tries: int = 1) -> Command:
        """The next version of the run."""
        self.run_number += self.rng.choice((1, 1, 2))
        self.content += 1
        if self.rng.random() < 0.3:
            self.labels = {"best": self.run_number if self.rng.random() < 0.7 else max(1, self.run_number - 2)}
        self.last = Command(self.run_number, self.content, self.seed, self.count, tries, self.labels)
        return self.last

    def tell(self, child: Child, *commands: Command) -> None:
        for command in commands:
            self.say(f"writer {child.pid}: version {command.number}, content {command.content}, {command.labels}")
            child.tell(command)

    def results(self, child: Child, count: int) -> bool:
        """What came of commands; False if the writer is of no more use."""
        for _ in range(count):
            found = child.result(REPLY_S)
            self.say(f"writer {child.pid}: {found}")
            error = found.get("error", "")
            assert error in REFUSED | {"", "Fenced"}, ("A2", found)
            self.world.in_time(found["slowest_s"], BOUND_S, f"write {found}")
            self.world.seen[f"write {error or 'ok'}"] += 1
            if error == "Fenced":
                assert self.may_be_fenced, ("A2: fenced, and alone", found)
                child.kill()
                break
        return not child.dead

    def killed(self, child: Child, why: str) -> None:
        child.kill()
        self.say(f"writer {child.pid} is killed {why}")
        self.world.seen["kill"] += 1
        self.may_be_fenced = False

    def writes(self) -> None:
        """Tell the writer to write; kill it in the middle, or let it be."""
        if self.child is None or self.child.dead:
            if self.content and self.rng.random() < 0.3:
                self.run_number, self.labels, self.last = 0, {}, None
                self.say("the run starts again")
            self.child = self.start(self.door)
        first = [] if self.last is None or self.rng.random() < 0.5 else [self.last]  # perhaps it is not there yet
        commands = first + [self.next_command() for _ in range(self.rng.choice((1, 1, 2, 3)) - len(first))]
        kind = self.rng.choice(("write", "write", "stop", "stop", "kill", "two"))
        stop = Stop("", self.rng.randint(1, 9), self.rng.random() < 0.5)
        if kind == "stop":
            self.door.stop = stop
        self.tell(self.child, *commands)
        self.looks()
        if kind == "stop" and stop.arrived.wait(0.15):
            self.killed(self.child, f"{'after' if stop.after else 'before'} {self.door.requests[-1]}")
            self.may_be_fenced = any(one.startswith("delayed") for one in self.door.hit)
        elif kind == "kill":
            time.sleep(self.rng.random() * 0.1)  # a moment that the seed chose
            self.killed(self.child, "at any moment")
            self.may_be_fenced = True  # by what it had under way
        else:
            self.door.stop = None
            if self.results(self.child, len(commands)) and kind == "two":
                self.two(self.child)

    def two(self, first: Child) -> None:
        """Another writer of the same run takes the archive over."""
        second, command, began = self.start(self.spare), self.next_command(), first.began
        self.may_be_fenced = True
        self.tell(second, command)
        if self.rng.random() < 0.5:
            self.tell(first, command)
            self.results(first, 1)
        self.results(second, 1)
        self.archive.check()
        owner = "" if self.archive.latest is None else self.archive.latest.writer
        if f"process {second.pid} " in owner and began and not first.dead:
            self.tell(first, self.next_command())
            result = first.result(REPLY_S)
            self.say(f"writer {first.pid}: {result}")
            assert result.get("error") in REFUSED | {"Fenced"}, ("A4: the first of two goes on", result)
            self.world.seen[f"second {result['error']}"] += 1
            self.killed(first, "as it is not needed")
            self.child, self.door, self.spare = second, self.spare, self.door
        else:  # of two that nobody compared, either may go on
            self.killed(second, "as it is not needed")
        self.may_be_fenced = True

    # ------------------------------------------------------------ the readers

    def looks(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            self.look(self.follower, self.following, "follower")
        if self.rng.random() < 0.4:
            self.joins()

    def joins(self) -> None:
        """A reader that has nothing, of the newest version, a number or a label."""
        self.archive.check()
        which = self.rng.choice((None, None, "best", *self.archive.committed))
        joiner = self.reader(self.joining, TIMEOUT_S, which)
        self.look(joiner, self.joining, "joiner" if which is None else f"reader of {which}", which)
        joiner.close()

    def look(self, follower: Follower, door: Door, who: str, which: int | str | None = None) -> int:
        """One step of a reader; A1 to A3. Return the version, or 0."""
        self.archive.check()
        began, hit, before, floor = time.monotonic(), len(door.hit), follower.version, self.archive.newest
        faulty = bool(door.faults)
        try:
            with next(follower) as update:
                found, content, data = update.version, update.meta["step"], bytes_of(update)
        except errors.ReplicasError as error:
            self._refused(error, door.hit[hit:], which, who)
            found = 0
        else:
            self.archive.check()
            self.say(f"{who}: version {found}, content {content}")
            self.world.seen["read"] += 1
            known = self.archive.contents(found)
            assert content in known, ("A1: another version of this number", found, content, known)
            assert which is not None or found in self.archive.committed, ("A1: it was never the newest", found)
            assert data == words_of(self.seed, int(str(content)), self.count).tobytes(), ("A1: other bytes", found)
            if isinstance(which, str):
                assert found in [one.get(which, 0) for one in self.archive.labels], ("A1: not that label's", found)
            elif which is not None:
                assert found == which, ("A1: not that number", found)
            else:
                assert found > before, ("A1: an older version after a newer one", before, found)
                assert faulty or found >= floor, ("A1: not the newest", found, floor)
        self.world.in_time(time.monotonic() - began, TIMEOUT_S + BOUND_S, who)
        return found

    def _refused(self, error: errors.ReplicasError, hit: list[str], which: int | str | None, who: str) -> None:
        self.archive.check()
        name = type(error).__name__
        self.say(f"{who}: {name}: {error} ({', '.join(hit)})")
        self.world.seen[f"read {name}"] += 1
        if isinstance(error, errors.ArchiveTampered):
            assert any(one.startswith(TAMPERING) for one in hit), ("A2: nothing was tampered with", error)
        elif isinstance(error, errors.Gone):
            assert which is not None, ("A2", error)
            has = {one.version for one in self.archive.entries.values()}
            assert isinstance(which, str) or which not in has or hit, ("A2: it is there", error, which)
        else:
            assert isinstance(error, errors.ArchiveError | errors.DeadlineExceeded), ("A2", error)

    # ------------------------------------------------------------ the faults

    def trouble(self) -> None:
        if self.rng.random() < 0.1:  # written, and the writer cannot know
            self.door.add(Fault("lost", "PUT latest"), Fault("silent", "GET latest", times=2))
            self.say("writing: lost of 'PUT latest', and then silence")
        ways = [(self.door, WRITING, "writing"), (self.following, KINDS, "following"), (self.joining, KINDS, "joining")]
        for door, kinds, name in ways:
            for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
                fault = self.fault(kinds)
                door.add(fault)
                self.say(f"{name}: {fault}")
                self.may_be_fenced |= door is self.door and fault.kind in ("late", "missing", "delayed")

    def fault(self, kinds: tuple[str, ...]) -> Fault:
        kind = self.rng.choice(kinds)
        reads = kinds == KINDS or kind in READ_KINDS
        verbs = ("GET", "GET", "LIST") if reads else ("PUT", "PUT", "DELETE", "GET", "LIST")
        verb = "GET" if kind in TAMPERING else self.rng.choice(verbs)
        what = f"{verb} {self.rng.choice(('latest', 'entries/', 'data/', ''))}" if verb in ("GET", "PUT") else verb
        return Fault(
            kind,
            what,
            times=1 if kind == "silent" else self.rng.choice((1, 1, 2, 3, 12)),
            status=self.rng.choice((403, 429, 500, 503, 507)),
            state=self.rng.randint(max(0, self.archive.state() - 12), self.archive.state()),
            seconds=self.rng.random() * 0.6,
        )

    def heal(self) -> None:
        for door in self.doors:
            door.heal()

    # ------------------------------------------------------------ the round

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 6)):
            self.trouble()
            self.writes()
            if self.rng.random() < 0.7:
                self.heal()
                self.say("healed")
            self.looks()
            self.archive.check()
        self.recovers()
        self.reads_all()

    def recovers(self) -> None:
        """A6: the writer goes on, and the follower gets what it writes."""
        self.heal()
        self.say("all is healed")
        self.may_be_fenced = True
        began = time.monotonic()
        for _ in range(2):  # the first may have been fenced
            if self.child is None or self.child.dead:
                self.child = self.start(self.door)
            command = self.next_command(tries=20)
            self.tell(self.child, command)
            if self.results(self.child, 1):
                break
        while True:
            found = self.look(self.follower, self.following, "follower")
            if found and self.archive.contents(found) == {self.content}:
                break
            assert time.monotonic() - began < self.world.load.bar_s(RECOVERY_S, began), "A6: it does not go on"
        self.world.recovered.append(time.monotonic() - began)

    def reads_all(self) -> None:
        """A6: each version that is kept, by its number."""
        there = [version for version, (link, _) in self.archive.committed.items() if link.entry in self.archive.entries]
        kept = sorted(self.archive.committed)[-self.rules.keep :]
        assert set(kept) <= set(there), ("A5: they are kept", set(kept) - set(there))
        for version in there:
            one = self.reader(self.joining, 5.0, version)
            assert self.look(one, self.joining, f"reader of {version}", version) == version, ("A6: not read", version)
            one.close()

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
        self.follower.close()
        for door in self.doors:
            door.close()


class World:
    """What all rounds share, and what they saw."""

    def __init__(self, server: str, proxy: Proxy, processes: Nursery, key_file: Path, load: Load) -> None:
        self.server, self.proxy, self.nursery, self.key_file, self.load = server, proxy, processes, key_file, load
        self.key = ArchiveKey.of_file(key_file)
        self.seen = Counter[str]()
        self.recovered: list[float] = []
        self.longest: dict[str, float] = {}

    def in_time(self, took_s: float, bound_s: float, what: str) -> None:
        kind = what.split()[0]
        self.longest[kind] = max(took_s, self.longest.get(kind, 0.0))
        assert took_s < self.load.bar_s(bound_s), ("A3: too late", what, took_s)

    def round(self, number: int) -> None:
        now = Round(self, number)
        try:
            now.run()
        except BaseException:
            print(f"\nseed {SEED} round {number}:", *now.story, sep="\n  ", flush=True)
            raise
        finally:
            now.close()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "CALL_S", CALL_S)
    monkeypatch.setattr(reading, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(reading, "FIRST_S", 0.01)
    monkeypatch.setattr(reading, "LAST_S", 0.1)
    for name, value in (ENVIRONMENT | {"AWS_ENDPOINT": ""}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_an_archive_under_faults(tmp_path: Path) -> None:
    with serving() as (server, host, port), Proxy(host, port) as proxy, nursery() as processes, Load() as load:
        world = World(server, proxy, processes, tmp_path / "key.pem", load)
        began, number = time.monotonic(), 0
        for number in itertools.count(1):
            if number > ROUNDS if ROUNDS else time.monotonic() - began > SECONDS:
                break
            world.round(number)
        figures: dict[str, Any] = {"slowest": world.longest, "recovery": max(world.recovered, default=0.0)}
        print(f"seed {SEED}: {number - 1} rounds in {time.monotonic() - began:.0f} s: {dict(world.seen)}, {figures}")
