"""Receives of one rank: what is given back unlooked at, and who may look at an update
at the same time.

Covers: channel/versions/receive.py, channel/versions/update.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.session.hub import Part
from replicas.channel.session.pending import Promise
from replicas.channel.versions import receive as receive_module
from replicas.channel.versions import update as update_module
from replicas.channel.versions.receive import Bound
from replicas.channel.versions.update import Update
from replicas.common.logs import flush
from replicas.weights.loading import load_image
from tests.support.channel.scripted import DIGEST, ScriptedWorld
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


async def asked(target: ScriptedWorld, version: int, bound: Bound = Bound()) -> Promise[Update]:
    """A receive that was granted ``version``, which is here, and at which nobody has
    looked."""
    pending = target.receiver.receive(None, bound)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, version))
    assert pending.done()
    return pending


def pins(target: ScriptedWorld) -> dict[int, int]:
    return {slot.version: slot.pins for slot in target.hub.arena.slots if slot.state == "held"}


async def test_an_update_that_nobody_has_looked_at_is_given_back_for_a_newer_one(target: ScriptedWorld) -> None:
    await target.hold(3)
    pending = await asked(target, 3)
    target.session.sent.clear()
    await target.hold(4, commit=False)
    assert pending.done(), "nothing newer is committed"
    target.tell(wire.Commit(4, DIGEST))
    assert not pending.done()
    ask = await target.session.next(wire.ReceiveAsk)
    await asyncio.sleep(0)
    assert pins(target) == {3: 0, 4: 0}
    target.tell(wire.ReceiveGrant(ask.ask, 4))
    with await pending as update:
        assert update.version == 4


async def test_it_is_asked_for_once_when_the_other_ranks_have_begun_with_the_old_one(target: ScriptedWorld) -> None:
    await target.hold(3)
    pending = await asked(target, 3)
    await target.hold(4)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 3))
    assert pending.done()
    target.tell(wire.Commit(4, DIGEST))
    target.hub.tell(Part.versions_grown)
    assert pending.done(), "it would be granted the same once more"
    assert (await pending).version == 3


async def test_one_that_somebody_has_looked_at_stays(target: ScriptedWorld) -> None:
    await target.hold(3)
    update = await (await asked(target, 3))
    await target.hold(4)
    assert not any(isinstance(sent, wire.ReceiveAsk) for sent in target.session.sent)
    with update:
        assert update.version == 3


async def test_a_wait_that_is_woken_too_late_waits_for_the_newer_one(target: ScriptedWorld) -> None:
    """The task was woken for version 3, and has not run before version 4 took its
    place."""
    await target.hold(3)
    await target.hold(4, commit=False)
    pending = target.receiver.receive(None)
    waiter = asyncio.ensure_future(pending)
    ask = await target.session.next(wire.ReceiveAsk)
    await asyncio.sleep(0)
    target.tell(wire.ReceiveGrant(ask.ask, 3), wire.Commit(4, DIGEST))
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 4))
    assert (await waiter).version == 4


@pytest.mark.parametrize("granted", [False, True])
async def test_after_a_pause_it_is_asked_for_again(target: ScriptedWorld, granted: bool) -> None:
    """Another incarnation may have served newer ones meanwhile."""
    await target.hold(3)
    pending = target.receiver.receive(None)
    grant = wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 3)
    if granted:
        target.tell(grant)
        assert pending.done()
    target.hub.paused()
    if not granted:
        target.tell(grant)  # it was on its way
    assert not pending.done()
    await asyncio.sleep(0)
    assert pins(target) == {3: 0}
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 3))
    with await pending as update:
        assert update.version == 3, "there was nothing newer"
        target.hub.paused()
    assert not any(isinstance(sent, wire.ReceiveAsk) for sent in target.session.sent), "it was looked at"


async def test_its_deadline_begins_again_when_it_is_given_back(target: ScriptedWorld) -> None:
    await target.hold(3)
    pending = target.receiver.receive(0.2)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 3))
    await target.hold(4)
    cancel = await target.session.next(wire.ReceiveCancel)
    assert cancel.ask == 2
    with pytest.raises(errors.DeadlineExceeded):
        await pending


@pytest.mark.parametrize("after", [False, True])
async def test_one_whose_first_touch_is_interrupted_is_kept_by_nobody(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    await target.hold(3)
    pending = await asked(target, 3)
    touched = target.receiver.loads.touched

    def interrupted(version: int) -> None:
        if after:
            touched(version)
        raise KeyboardInterrupt

    monkeypatch.setattr(target.receiver.loads, "touched", interrupted)
    with pytest.raises(KeyboardInterrupt), await pending:
        pytest.fail("it was entered")
    monkeypatch.undo()
    del pending
    await target.hold(4)
    again = target.receiver.receive(None)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 4))
    with await again as update:
        assert update.version == 4
    await wait_until(lambda: not any(pins(target).values()), "nobody holds any")


async def test_one_that_was_handed_out_to_nobody_is_replaced_by_the_next_receive(target: ScriptedWorld) -> None:
    """Who waited was interrupted between the hand-out and his first line."""
    await target.hold(3)
    lost = await (await asked(target, 3))
    assert await target.receiver.receive(None) is lost, "there is nothing newer"
    await target.hold(4)
    pending = await asked(target, 4)
    assert (await pending).version == 4
    with pytest.raises(errors.UsageError, match="replaced by a newer version"):
        lost.__enter__()
    with pytest.raises(errors.UsageError, match="replaced by a newer version"):
        lost.loaded()


async def test_two_blocks_of_one_update_are_refused(target: ScriptedWorld) -> None:
    await target.hold(3)
    update = await (await asked(target, 3))
    with update:
        with pytest.raises(errors.UsageError, match="version 3 is open in another `with` block"), update:
            pytest.fail("it was let in")
        assert dict(update)["w"].tolist() == [7.0] * 4
    with pytest.raises(errors.UsageError, match="has ended: loaded"):
        update.__enter__()


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_load_keeps_the_memory_when_another_thread_ends_the_update(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    await target.hold(3)
    update = await (await asked(target, 3))
    copying, go_on = threading.Event(), threading.Event()
    real: Callable[..., None] = load_image

    def slow(*args: Any, **options: Any) -> None:
        copying.set()
        assert go_on.wait(30)
        real(*args, **options)

    monkeypatch.setattr(update_module, "load_image", slow)
    model = {"w": torch.zeros(4)}
    if not by_hand:
        update.__enter__()
    load = asyncio.create_task(asyncio.to_thread(update.load_into, model))
    assert await asyncio.to_thread(copying.wait, 30)
    if by_hand:
        update.loaded()
    else:
        update.__exit__(None, None, None)
    await asyncio.sleep(0)
    assert pins(target)[3] == 1, "its memory may be written to while it is read"
    with pytest.raises(errors.UsageError, match="has ended"):
        update.load_into(model)
    go_on.set()
    await load
    await asyncio.sleep(0)
    assert pins(target)[3] == 0
    assert model["w"].tolist() == [7.0] * 4


# ---------------------------------------------------------------- at least


async def test_the_bound_is_told_also_to_a_new_coordinator(target: ScriptedWorld) -> None:
    target.receiver.receive(None, Bound(7))
    ask = await target.session.next(wire.ReceiveAsk)
    assert (ask.at_least, ask.key) == (7, "")
    target.new_coordinator()
    ask = await target.session.next(wire.ReceiveAsk)
    assert (ask.at_least, ask.key) == (7, "")


@pytest.mark.slow
@pytest.mark.parametrize("bound", [Bound(4), Bound(4, "n"), Bound(0, "other")])
async def test_less_than_the_bound_is_declined(target: ScriptedWorld, bound: Bound) -> None:
    """The coordinator grants it when another rank has begun with it."""
    await target.hold(3)
    pending = target.receiver.receive(0.5, bound)
    ask = await target.session.next(wire.ReceiveAsk)
    target.tell(wire.ReceiveGrant(ask.ask, 3))
    again = await target.session.next(wire.ReceiveAsk)
    assert (again.ask, again.after) == (ask.ask + 1, 3)
    assert pins(target)[3] == 0
    with pytest.raises(errors.DeadlineExceeded, match="version 3"):
        await pending
    assert (await (await asked(target, 3, Bound(3, "n")))).meta == {"n": 3}


async def test_the_deadline_says_what_was_asked_for_and_what_there_is(target: ScriptedWorld) -> None:
    await target.hold(3)
    with pytest.raises(errors.DeadlineExceeded, match=r"receive\(at_least=\('step', 7\)\)"):
        await target.receiver.receive(0.05, Bound(7, "step"))


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (
            Bound(9),
            r"receive\(at_least=9\) did not end within its 0\.05 s: version 9 or a newer one is not published yet",
        ),
        (Bound(), r"the receive did not end within its 0\.05 s: version 4 or a newer one is not published yet"),
    ],
)
async def test_a_version_that_is_not_published_is_no_slow_member(
    target: ScriptedWorld, bound: Bound, text: str
) -> None:
    await target.hold(3)
    target.hub.loaded = 3
    with pytest.raises(errors.DeadlineExceeded, match=rf"{text} \(the newest is 3\) \(see what the source"):
        await target.receiver.receive(0.05, bound)


async def test_another_bound_takes_the_place_of_the_receive_under_way(target: ScriptedWorld) -> None:
    await target.hold(3)
    first = target.receiver.receive(None)
    assert target.receiver.receive(None) is first
    second = target.receiver.receive(None, Bound(3))
    with pytest.raises(errors.UsageError, match=r"receive\(at_least=3\) has replaced this one"):
        await first
    await target.session.next(wire.ReceiveAsk)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 3))
    third = target.receiver.receive(None, Bound(4))  # nobody has looked at what the second one was given
    with pytest.raises(errors.UsageError, match=r"receive\(at_least=4\) has replaced this one"):
        await second
    ask = await target.session.next(wire.ReceiveAsk)
    await target.hold(4)
    target.tell(wire.ReceiveGrant(ask.ask, 4))
    with await third as update:
        assert update.version == 4
        with pytest.raises(errors.UsageError, match="version 4 is still open"):
            target.receiver.receive(None, Bound(5))
    assert pins(target) == {3: 0, 4: 1}
    await asyncio.sleep(0)
    assert pins(target) == {3: 0, 4: 0}


async def test_what_was_handed_out_to_nobody_is_handed_out_again_if_it_is_enough(target: ScriptedWorld) -> None:
    await target.hold(3)
    lost = await (await asked(target, 3))
    assert await target.receiver.receive(None, Bound(3)) is lost
    pending = target.receiver.receive(None, Bound(4))
    assert not pending.done()
    assert lost.ended


async def test_the_wait_for_the_first_version_is_told_once_with_its_end(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receive_module, "WAIT_S", 0.0)
    for number in range(2):
        with pytest.raises(errors.DeadlineExceeded):
            await target.receiver.receive(0.05 + number / 100)
    assert flush()
    told = [one.getMessage() for one in caplog.records if "waiting" in one.getMessage()]
    assert told == ["channel policy: waiting for the first version, up to 0.05 s"]
