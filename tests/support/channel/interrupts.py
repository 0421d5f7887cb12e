"""Interrupts of the main thread inside the public calls: at each line, as a tracer
would, and at random moments.

Theory of operation
===================

A *scene* is a coordinator on a thread, and members that are used by the main thread,
where signals' handlers run. A *deed* is one call of a user's, with what belongs to it
(the ``with`` block of an update). :func:`at_each_line` runs it first to see which lines
of the library the main thread comes through, and then once for each of them with a
KeyboardInterrupt there. :func:`at_random` runs deeds with a timer's signal somewhere in
them. After each interrupt the scene must work as if nothing had happened: it
*recovers*, by deeds without interrupts, within a few seconds, and no slot is left as it
was.

Run as a program it does both at length, and says what it found: ``python -m
tests.support.channel.interrupts --times 3000``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import replicas
from replicas import errors
from replicas.channel import Channel
from replicas.coordinator import Coordinator
from tests.support.channel.call_pools import MOVING, stir
from tests.support.machine.log_handlers import rogue_handlers
from tests.support.waits import eventually

__all__ = ["DEEDS", "Found", "Scene", "at_each_line", "at_random", "scene"]

LIBRARY = str(Path(replicas.__file__).parent)
WITHIN_S = 60.0
"""A scene that has not recovered by then hangs, on a machine however busy."""
FORMED_WITHIN_S = 60.0
"""Two processes have to import torch."""
SMALL = {"a": torch.ones(4, 3), "b": torch.arange(5)}
MOVED = {f"t{number}": one for number, one in enumerate(MOVING)}
LARGE = {"a": torch.ones(3 << 20), "b": torch.ones(1 << 20)}
PEERS = 2
FAILED = errors.SyncError, errors.Busy, errors.ManifestMismatch

Place = tuple[str, int]


class Hung(AssertionError):
    """It does not recover."""


class Finalisers:
    """Exceptions that Python has swallowed, for they came where something died: in the
    callback of a weak reference, say.

    :ivar ours: those for which this library is to blame.
    :ivar pythons: how many came in the sets that Python itself keeps of all tasks and
        threads, which nobody can help.
    """

    def __init__(self) -> None:
        self.ours: list[str] = []
        self.pythons = 0
        names = ((asyncio.tasks, "_all_tasks"), (asyncio.tasks, "_scheduled_tasks"), (threading, "_dangling"))
        self._sets = [getattr(module, name) for module, name in names if hasattr(module, name)]

    def watch(self) -> None:
        """From now on, in this process."""
        sys.unraisablehook = self._note

    def _note(self, what: Any) -> None:
        known = getattr(what.object, "__defaults__", None) or ()  # of WeakSet's callback: a reference to the set
        owner = known[0]() if known and isinstance(known[0], weakref.ref) else None
        if any(owner is one for one in self._sets):
            self.pythons += 1
            return
        stack = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_stack()[-6:-1]]
        self.ours.append(f"{what.err_msg or ''} {what.object!r} {what.exc_value!r} at {' '.join(stack)}")


FINALISERS = Finalisers()


class Found:
    """What became of the interrupts. ``lost``: what of the scene was not as it should
    be, with where the interrupt came; ``pythons``: those that Python swallowed in sets
    of its own.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.caught = 0
        self.pythons = 0
        self.other: Counter[str] = Counter()
        self.lost: list[str] = []
        self.slowest_s = 0.0

    def __str__(self) -> str:
        return (
            f"{self.sent} interrupts: {self.caught} reached the caller, {self.sent - self.caught - self.pythons} were "
            f"swallowed, and {self.pythons} by Python's own finalisers, "
            f"{len(self.lost)} lost something; slowest recovery {self.slowest_s:.2f} s; others raised: {dict(self.other)}"
        )


class Scene:
    """A trainer, a rollout and two peers in this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.swallowed: list[str] = []
        self.visitor: Channel | None = None
        self.trainer = self.join("policy", "trainer")
        self.rollout = self.join("policy", "rollout")
        self.peers = [self.join("outer", "peer", index) for index in range(PEERS)]
        self._reduce_again(FORMED_WITHIN_S)  # their process group is there from now on
        self.publish()  # and a version

    def join(self, channel: str, group: str, replica: int = 0) -> Channel:
        where: dict[str, Any] = {"endpoint": self._coordinator.endpoint, "token": self._coordinator.token}
        return replicas.join(channel, group=group, replica=replica, rank=0, world_size=1, **where)

    def close(self) -> None:
        for channel in (self.trainer, self.rollout, *self.peers):
            channel.close(wait=False)

    # ------------------------------------------------------------ deeds

    def publish(self) -> None:
        self.trainer.publish(SMALL, new_manifest=True).wait(WITHIN_S)

    def publish_much(self) -> None:
        self.trainer.publish(LARGE, new_manifest=True).wait(WITHIN_S)

    def publish_moving(self) -> None:
        """Another thread frees and replaces what is published."""
        with contextlib.suppress(errors.ManifestMismatch):
            self.trainer.publish(MOVED, new_manifest=True).wait(WITHIN_S)

    def publish_steps(self) -> None:
        self.trainer.publish(iter(SMALL.items()), new_manifest=True).wait(WITHIN_S)

    def write_in_place(self) -> None:
        with self.trainer.arena_like(SMALL) as slot:
            for name, tensor in SMALL.items():
                slot[name].copy_(tensor)
            pending = self.trainer.publish(slot, new_manifest=True)
        pending.wait(WITHIN_S)

    def take_and_leave(self) -> None:
        with self.trainer.arena_like(SMALL):
            pass

    def load(self) -> None:
        model = {name: torch.empty_like(tensor) for name, tensor in SMALL.items()}
        with self.rollout.receive().wait(WITHIN_S) as update:
            if update.manifest.image_nbytes < 1 << 20:
                update.load_into(model)

    def ask(self) -> None:
        self.rollout.progress(1)
        self.rollout.committed(after=0).wait(WITHIN_S)
        self.trainer.fence()

    def reduce(self) -> None:
        tensor = torch.ones(3)
        self.peers[0].all_reduce(tensor, deadline=5).wait(WITHIN_S)

    def join_and_close(self) -> None:
        with self.join("policy", "rollout", 1) as self.visitor:
            self.visitor.progress(2)

    # ------------------------------------------------------------ around them

    def prepare(self, deed: str) -> Callable[[], None]:
        """What the others do meanwhile; returns what is to be done when it is over."""
        if deed == "load":
            self._publish_again()
        if deed == "reduce":
            other = threading.Thread(target=self._reduce_too)
            other.start()
            return other.join
        return lambda: None

    def _reduce_too(self) -> None:
        with contextlib.suppress(errors.ReplicasError, TimeoutError):
            self.peers[1].all_reduce(torch.ones(3), deadline=0.4).wait(WITHIN_S)

    def recover(self, deed: str) -> None:
        """It goes on as if nothing had happened: what the deed did works again, and
        nothing of it is left."""
        if deed == "load":
            self._load_again()
        elif deed == "reduce":
            self._reduce_again()
        elif deed == "join_and_close":
            self._gone()
        else:
            self._publish_again()
        self._no_slot_is_lost()

    def _publish_again(self) -> None:
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                return self.publish()
            except (
                errors.SyncError,
                errors.Busy,
                errors.ManifestMismatch,
            ):  # the verdict of the publish that was interrupted, once
                if time.monotonic() > until:
                    raise

    def _load_again(self) -> None:
        self._publish_again()
        deadline, refused = time.monotonic() + WITHIN_S, None
        while self.rollout.version < self.trainer.latest:
            try:
                self.load()
            except errors.UsageError as error:  # until it is noticed that nobody has the update any more
                refused = error
                time.sleep(0.02)
            assert time.monotonic() < deadline, f"the rollout does not get the newest version: {refused}"

    def _reduce_again(self, deadline_s: float = 1.0) -> None:
        until = time.monotonic() + max(WITHIN_S, 2 * deadline_s)
        while time.monotonic() < until:
            sums = [torch.ones(3) for _ in self.peers]
            with contextlib.suppress(errors.ReplicasError):  # the peers' calls are not paired yet
                pending = [
                    peer.all_reduce(one, deadline=deadline_s) for peer, one in zip(self.peers, sums, strict=True)
                ]
                for one in pending:
                    one.wait(2 * deadline_s + WITHIN_S)
                assert [one.tolist() for one in sums] == [[2.0] * 3] * PEERS
                return
        raise AssertionError("the peers do not come together again")

    def _gone(self) -> None:
        visitor, self.visitor = self.visitor, None
        if visitor is not None and not visitor._closed:
            visitor.close(wait=False)  # interrupted before it had begun to close: it is as it was, and can be closed
        # One that was interrupted at the first line of its block is in nobody's hands:
        # the next join of this rank takes its place.
        with self.join("policy", "rollout", 1) as again:
            eventually(lambda: again.member in self.trainer.members, "it is a member", timeout_s=WITHIN_S)
        eventually(
            lambda: all(member.name != "rollout/1/0" for member in self.trainer.members),
            "an interrupted join is no member any more",
            timeout_s=WITHIN_S,
        )

    def _no_slot_is_lost(self) -> None:
        until = time.monotonic() + WITHIN_S
        while True:
            states = {
                channel.member.group: [
                    (slot.state, slot.pins) for slot in channel._hub.arena.slots if slot.state == "filling"
                ]
                + [(slot.state, slot.pins) for slot in channel._hub.arena.foreign if slot.pins > 0]
                for channel in (self.trainer, self.rollout)
            }
            if not any(states.values()):
                return
            assert time.monotonic() < until, f"slots are lost: {states}"
            time.sleep(0.02)


DEEDS = (
    "publish",
    "publish_much",
    "publish_moving",
    "publish_steps",
    "write_in_place",
    "take_and_leave",
    "load",
    "ask",
    "reduce",
    "join_and_close",
)


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """A coordinator on a thread of its own, and members; log handlers that raise."""
    config: dict[str, Any] = {
        "policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "10s", "slots": 3},
        "outer": {"peers": ["peer"], "deadline": "10s"},
    }
    ready, box = threading.Event(), dict[str, Any]()

    async def serve() -> None:
        async with Coordinator(config, groups={"rollout": 2, "peer": PEERS}) as coordinator:
            box.update(coordinator=coordinator, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await box["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    found = Scene(box["coordinator"])
    over = threading.Event()
    stirrer = threading.Thread(target=stir, args=(random.Random(0), over), daemon=True)
    stirrer.start()
    try:
        with rogue_handlers():
            yield found
    finally:
        over.set()
        stirrer.join()
        found.close()
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)


class Tracer:
    """Raises at one of the lines that the main thread comes through; without one it
    notes them all."""

    def __init__(self, place: Place | None = None, times: int = 1) -> None:
        self.lines: Counter[Place] = Counter()
        self.raised = False
        self._place = place
        self._left = times

    def __enter__(self) -> Tracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def __len__(self) -> int:
        """How often it has raised."""
        return int(self.raised)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.lines[place] += 1
            if place == self._place:
                self._left -= 1
                if not self._left:
                    self.raised = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._line


def at_each_line(world: Scene, deed: str, *, most: int | None = None, seed: int = 0) -> Found:
    """Interrupt the deed at each line at which it comes by, the first and the last
    time; at ``most`` of them."""
    found = Found()
    act: Callable[[], None] = getattr(world, deed)
    lines: Counter[Place] = Counter()
    passes = 0
    while passes < 2:  # the second time other things are known already
        after = world.prepare(deed)
        with (
            Tracer() as tracer,
            contextlib.suppress(errors.DeadlineExceeded, errors.ManifestMismatch),
        ):  # on a busy machine; memory that moves
            act()
            passes += 1
        after()
        lines |= tracer.lines
    moments = [(place, times) for place, count in lines.items() for times in sorted({1, count})]
    if most is not None and most < len(moments):
        moments = random.Random(seed).sample(moments, most)
    for place, times in moments:
        after = world.prepare(deed)
        where = f"{deed} at {Path(place[0]).relative_to(LIBRARY)}:{place[1]} ({times})"
        tracer = Tracer(place, times)
        _interrupted(deed, where, found, partial(_traced, tracer, act), tracer)
        after()
        _recover(world, deed, where, found)
    return found


def _traced(tracer: Tracer, act: Callable[[], None]) -> None:
    with tracer:
        act()


def at_random(world: Scene, times: int, seed: int = 0, deeds: tuple[str, ...] = DEEDS) -> Found:
    """Interrupt deeds by a signal, somewhere in them, so many times."""
    found, chosen = Found(), random.Random(seed)
    lasts: dict[str, float] = {}
    fired: list[str] = []

    def raises(number: int, frame: FrameType | None) -> None:
        fired.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "?")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raises)
    try:
        while found.sent < times:
            deed = chosen.choice(deeds)
            act: Callable[[], None] = getattr(world, deed)
            after = world.prepare(deed)
            began = time.monotonic()
            fired.clear()

            def timed(act: Callable[[], None] = act, deed: str = deed) -> None:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, chosen.uniform(0, 1.2 * lasts.get(deed, 0.01))))
                try:
                    act()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)

            _interrupted(deed, f"{deed} by a signal", found, timed, fired)
            if not fired:
                lasts[deed] = time.monotonic() - began
            after()
            _recover(world, deed, f"{deed} at {fired}", found)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found


def _interrupted(deed: str, where: str, found: Found, run: Callable[[], None], raised: Sized) -> None:
    before = FINALISERS.pythons
    try:
        run()
    except KeyboardInterrupt:
        found.caught += 1
        found.sent += 1
        return
    except (errors.ReplicasError, TimeoutError) as error:
        found.other[f"{deed}: {type(error).__name__}: {error}"[:160]] += 1
    if len(raised):
        found.sent += 1
        if FINALISERS.pythons > before:
            found.pythons += 1
        else:
            found.lost.append(f"the interrupt was swallowed: {where}")


def _recover(world: Scene, deed: str, where: str, found: Found) -> None:
    began = time.monotonic()
    outcome: list[BaseException | None] = []

    def recover() -> None:
        try:
            world.recover(deed)
            outcome.append(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            outcome.append(error)

    thread = threading.Thread(target=recover, daemon=True)
    thread.start()
    thread.join(3 * WITHIN_S)
    if not outcome:
        raise Hung(f"it hangs after {where}")
    if outcome[0] is not None:
        found.lost.append(f"{where}: {type(outcome[0]).__name__}: {outcome[0]}")
        print(found.lost[-1], file=sys.stderr, flush=True)
    found.slowest_s = max(found.slowest_s, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deeds", default=",".join(DEEDS))
    parser.add_argument("--most", type=int, help="lines of each deed; default: all")
    arguments = parser.parse_args()
    deeds = tuple(arguments.deeds.split(","))
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    FINALISERS.watch()
    bad = 0
    with scene() as world:
        for deed in deeds:
            found = at_each_line(world, deed, most=arguments.most, seed=arguments.seed)
            bad += len(found.lost)
            print(f"{deed}: {found}", *found.lost, sep="\n    ", flush=True)
        if arguments.times:
            found = at_random(world, arguments.times, arguments.seed, deeds)
            bad += len(found.lost)
            print(f"at random: {found}", *found.lost, sep="\n    ", flush=True)
    print("swallowed in finalisers:", *FINALISERS.ours, sep="\n    ")
    return bool(bad or FINALISERS.ours)


if __name__ == "__main__":
    sys.exit(main())
