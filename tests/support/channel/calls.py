"""Random calls of the whole public API: ``python -m tests.support.channel.calls COUNT
[SEED]``.

Each call takes good arguments, and one or two drawn ones in the place of some of them:
numbers of any kind and size, texts, odd objects, tensors that cannot be used. It may do
what it says or raise a documented error; after it the next version is committed and, if
peers were called, their next barrier is done. Without a seed the calls are the same in
every run.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import faulthandler
import inspect
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

import replicas
from replicas import errors
from replicas.channel import Channel, Pending, Update
from replicas.control.log_files import Selection
from replicas.coordinator import Coordinator
from replicas.linux.processes import die_with_parent
from replicas.messages.bounds import shown
from replicas.messages.version_orders import Promote
from replicas.supervisor import Supervisor
from replicas.weights.writable import WritableSlot
from tests.support.channel.call_pools import JUNK, POOLS, SLOW, Drawn, stir
from tests.support.machine.log_handlers import rogue_handlers

__all__ = ["limit_s"]

PATIENCE_S = 60.0
"""In which the next version must be committed, on however busy a machine; a channel
that is alive needs milliseconds."""
REJOIN_AFTER = 300
"""Calls, after which everybody joins anew: what was asked for and never comes (a
version of 2**62) does not pile up."""
SHORT_S = 0.3
WEIGHTS = {"w": torch.ones(2)}
CHANNELS: dict[str, dict[str, Any]] = {
    "policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "10s", "slots": 4},
    "outer": {"peers": ["peer"], "deadline": "10s"},
}
IDLE = {"replicas": 1, "command": ["sleep", "10000"], "launcher": "exec", "stop_timeout": "1s", "drain_timeout": "1s"}
BASE: dict[str, dict[str, Any]] = {
    "Channel.publish": {"weights": WEIGHTS},
    "Channel.arena_like": {"weights": WEIGHTS},
    "Channel.reserve": {"weights": WEIGHTS},
    "Channel.loaded": {"version": 1, "deadline": 0.01},
    "Channel.committed": {"after": 0},
    "Channel.progress": {"step": 1},
    "follow": {"archive": "memory://", "key": None},
    "Shard": {"tensor": torch.ones(2), "offsets": (0,), "shape": (4,)},
    "Coordinator": {"channels": CHANNELS},
    "Supervisor": {"config": {}},
    "Versions.hold": {"version": "current", "seconds": 0.1},
    "Versions.release": {"name": "mine"},
    "Versions.label": {"label": "mine", "version": "current"},
    "Versions.score": {"version": "current", "scores": {"reward": 1.0}},
    "Versions.read": {"version": 1},
    "Supervisor.steer": {"order": Promote(channel="nowhere")},
    "Update.report": {"scores": 1.0},
    "Supervisor.scale": {"group": "idle", "replicas": 1},
    "Supervisor.restart": {"target": "nobody"},
    "Supervisor.drain": {"target": "nobody"},
    "Supervisor.drain_node": {"node": "nowhere"},
    "Supervisor.read_logs": {"selection": Selection()},
    "Supervisor.reload": {"config": {}},
    "Supervisor.wait_ready": {"timeout": SHORT_S},
    "Supervisor.stacks": {"target": "nobody"},
    "Supervisor.reset_failed": {"target": "nobody"},
    "Supervisor.doctor": {"node": "nowhere"},
    "Update.load_into": {"model": {"w": torch.zeros(2)}},
    "Update.failed": {"error": "it does not load"},
    "Update.refuse": {"error": "it does not load"},
    **{f"Channel.{kind}": {"tensors": torch.ones(2)} for kind in ("all_reduce", "all_gather")},
    **{f"Channel.{kind}": {"tensors": torch.ones(2), "src": "peer/1"} for kind in ("broadcast", "recv")},
    **{f"Channel.{kind}": {"tensors": torch.ones(2), "dst": "peer/1"} for kind in ("reduce", "gather", "send")},
    "Channel.scatter": {"tensors": [torch.ones(2)] * 2, "src": "peer/0"},
    "Channel.reduce_scatter": {"tensors": [torch.ones(2)] * 2},
    "Channel.barrier": {},
}
COLLECTIVES = {name for name in BASE if "deadline" in POOLS.get(name, {}) and "step" in POOLS[name]}


def limit_s(count: int) -> float:
    """How long so many calls may take: some ten times as long as on a quiet machine."""
    return 120.0 + 0.1 * count


def is_users(error: BaseException) -> bool:
    """Whether it came out of what was drawn, and went through as it was: an iterable's,
    a mapping's."""
    return isinstance(error, Drawn) or (isinstance(error, ZeroDivisionError) and error.args == ("mine",))


class CallWorld:
    """A coordinator and a supervisor on a loop of their own, and members here."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.loop = asyncio.new_event_loop()
        self.told: collections.Counter[str] = collections.Counter()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.over = asyncio.Event()
        self.folder = tempfile.mkdtemp(prefix="calls-")
        self.coordinator: Coordinator
        self.supervisor: Supervisor
        self.members: dict[str, Channel] = {}
        self.update: Update | None = None
        self.recent: collections.deque[str] = collections.deque(maxlen=12)
        self.operated = True

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    async def live(self, ready: threading.Event) -> None:
        """From start to end, in one task."""
        config = {
            "schema_version": 1,
            "run": {"name": "calls", "state_dir": self.folder},
            "control": {"listen": "127.0.0.1:0"},
            "groups": {"idle": IDLE},
        }
        async with (
            Coordinator(CHANNELS, groups={"peer": 2}) as self.coordinator,
            Supervisor(config, report=lambda text: None) as self.supervisor,
        ):
            ready.set()
            await self.over.wait()

    def start(self) -> None:
        ready = threading.Event()
        self.life = asyncio.run_coroutine_threadsafe(self.live(ready), self.loop)
        assert ready.wait(PATIENCE_S), self.life.exception(0)

    def close(self) -> None:
        for channel in self.members.values():
            channel.close(wait=False)
        self.loop.call_soon_threadsafe(self.over.set)
        self.life.result(PATIENCE_S)
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------ members

    def join(self, group: Any, replica: int = 0, **more: Any) -> Channel:
        given = {"group": group, "replica": replica, "rank": 0, "world_size": 1, "timeout": PATIENCE_S, **more}
        channel = given.pop("channel", "outer" if isinstance(group, str) and group == "peer" else "policy")
        where = {"endpoint": self.coordinator.endpoint, "token": self.coordinator.token}
        return replicas.join(channel, **where | given)

    def rejoin(self, *names: str) -> None:
        if "rollout/0" in names:
            self.update = None
        for name in names:
            if name in self.members:
                self.members.pop(name).close(wait=False)
            group, _, replica = name.partition("/")
            self.members[name] = self.join(group, int(replica))

    def goes_on(self) -> None:
        """The next version is committed and received; if peers have operated since the
        last time, they meet in a barrier."""
        trainer, rollout = self.members["trainer/0"], self.members["rollout/0"]
        if self.update is not None and not self.update.ended:
            with contextlib.suppress(errors.UsageError):
                self.update.loaded()
        pending = rollout.receive()
        self._let_go()
        version = trainer.publish(WEIGHTS, new_manifest=True).wait(PATIENCE_S).version
        self.update = pending.wait(PATIENCE_S)
        assert self.update.version <= version
        if self.operated:
            self.operated = False
            for barrier in [self.members[name].barrier(deadline=PATIENCE_S) for name in ("peer/0", "peer/1")]:
                barrier.wait(PATIENCE_S)

    def _let_go(self) -> None:
        """End the labels and leases of earlier calls: the channel has few slots, and a
        target here reads the version before while the next one is published."""
        versions = self.members["trainer/0"].versions
        for label in set(versions.labels) - {"current", "previous", "candidate"}:
            versions.label(label, "").wait(PATIENCE_S)
        (policy,) = [one for one in self.run(self._statuses()) if one.name == "policy"]
        for lease in [lease for version in policy.versions for lease in version.leases]:
            with contextlib.suppress(errors.UsageError):  # its time has just ended
                versions.release(lease.name).wait(PATIENCE_S)

    async def _statuses(self) -> Any:
        return self.coordinator.channel_statuses()

    # ------------------------------------------------------------ calls

    def arguments(self, name: str) -> dict[str, Any]:
        """Good ones, but for one or two."""
        given = dict(BASE.get(name, {}))
        if name in COLLECTIVES:
            given["deadline"] = SHORT_S
        pools = POOLS[name]
        if "tensors" in given and name != "Channel.scatter" and isinstance(given["tensors"], torch.Tensor):
            given["tensors"] = given["tensors"].clone()
        for parameter in self.choose.sample(sorted(pools), min(len(pools), self.choose.choice((1, 1, 2)))):
            pool = pools[parameter]
            drawn = self.choose.choice(pool if pool and self.choose.random() < 0.5 else JUNK)
            given[parameter] = drawn() if parameter in ("weights", "model") and inspect.isfunction(drawn) else drawn
        return given

    def call(self, name: str) -> None:
        """One call. Raises what is not documented."""
        given = self.arguments(name)
        self.recent.append(f"{name}({', '.join(f'{key}={shown(value)}' for key, value in given.items())})")
        room, _, method = name.partition(".")
        try:
            match room:
                case "join":
                    self._join(given)
                case "follow":
                    replicas.follow(**given).close()
                case "Shard":
                    replicas.Shard(**given)
                case "Coordinator":
                    self.run(self._construct(Coordinator, given))
                case "Supervisor" if not method:
                    self.run(self._construct(Supervisor, given))
                case "Supervisor":
                    self.run(self._supervise(method, given))
                case "Channel" if name in COLLECTIVES:
                    self._collective(method, given)
                case "Channel":
                    self._channel(method, given)
                case "Versions":
                    _use(getattr(self.members["trainer/0"].versions, method)(**given))
                case "Update":
                    self._update(method, given)
                case _:
                    self._wait(room, method, given)
        except errors.InternalError:
            raise
        except (errors.ReplicasError, TimeoutError) as error:
            self.told[type(error).__name__] += 1
        except BaseException as error:
            if not is_users(error):
                raise
            self.told["the user's own"] += 1
        else:
            self.told["done"] += 1

    def _join(self, given: dict[str, Any]) -> None:
        timeout = 0.2 if "endpoint" in given else 5.0
        self.join(**{"group": "rollout", "replica": 1, "channel": "policy", "timeout": timeout, **given}).close(
            wait=False
        )

    async def _construct(self, kind: Callable[..., Any], given: dict[str, Any]) -> None:
        if given.get("state_dir") is None or kind is not Coordinator:
            kind(**given)
            return
        given["state_dir"] = (
            given["state_dir"] if not isinstance(given["state_dir"], str) else "a\0b"
        )  # nothing is made
        kind(**given)

    async def _supervise(self, method: str, given: dict[str, Any]) -> None:
        if method == "drain" and given["target"] is None:
            return  # that is the end of the run
        if method == "scale" and _is_large(given["replicas"]):
            return  # it could be done
        found = getattr(self.supervisor, method)(**given)
        if inspect.isawaitable(found):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(found, 10)

    def _channel(self, method: str, given: dict[str, Any]) -> None:
        name = "rollout/0" if method in ("receive", "progress") else "trainer/0"
        found = getattr(self.members[name], method)(**given)
        if method == "close":
            self.rejoin(name)
        elif method == "receive":
            self._end(found, name)
        elif isinstance(found, WritableSlot):
            with found as slot:
                if self.choose.random() < 0.5:
                    self.members[name].publish(slot, new_manifest=True).wait(PATIENCE_S)
        elif method == "publish":
            found.wait(PATIENCE_S)

    def _collective(self, method: str, given: dict[str, Any]) -> None:
        one, other = self.members["peer/0"], self.members["peer/1"]
        mine = getattr(one, method)(**given)
        self.operated = True
        if method == "send":
            answer = other.recv(src="peer/0", deadline=SHORT_S)
        elif method == "recv":
            answer = other.send(torch.ones(2), dst="peer/0", deadline=SHORT_S)
        else:
            answer = other.barrier(deadline=SHORT_S)
        for pending in (answer, mine):
            self._end(pending, "peer/0", "peer/1")

    def _end(self, pending: Pending[Any], *names: str) -> None:
        """Wait for its end; one that has none soon ends with the session of these
        members."""
        try:
            pending.wait(SHORT_S * 2)
        except TimeoutError:
            self.rejoin(*names)
        except errors.InternalError:
            raise
        except errors.ReplicasError as error:
            self.told[f"later {type(error).__name__}"] += 1

    def _update(self, method: str, given: dict[str, Any]) -> None:
        update = self.update
        assert update is not None
        if self.choose.random() < 0.5:
            with contextlib.suppress(KeyboardInterrupt), update:
                _use(getattr(update, method)(**given))
        else:
            _use(getattr(update, method)(**given))

    def _wait(self, room: str, method: str, given: dict[str, Any]) -> None:
        trainer = self.members["trainer/0"]
        if room == "Receipt":
            trainer.publish(WEIGHTS, new_manifest=True).wait(PATIENCE_S).metrics(**given)
            return
        done = given.get("timeout", 0) is None or _is_large(given.get("timeout", 0)) or self.choose.random() < 0.5
        pending: Pending[int] = trainer.committed(after=0 if done else None)
        getattr(pending, method)(**given)


def _use(result: Any) -> None:
    """Read all of an iterator; wait for what is pending."""
    if isinstance(result, Pending | replicas.Lease):
        with contextlib.suppress(TimeoutError):
            result.wait(SHORT_S * 2)
    elif isinstance(result, Iterator):
        list(result)


def _is_large(value: Any) -> bool:
    try:
        return not float(value) <= 0.05
    except Exception:  # noqa: BLE001  # what was drawn may be anything
        return False


def main(count: str, number: str = "", every: str = "1") -> None:
    """``every``: after so many calls the next version must be committed."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s(int(count)), exit=True)
    warnings.simplefilter("ignore")
    choose = random.Random(int(number) if number else 0)
    world, began = CallWorld(choose), time.monotonic()
    world.start()
    over = threading.Event()
    stirrer = threading.Thread(target=stir, args=(random.Random(choose.random()), over), daemon=True)
    stirrer.start()
    names = sorted(POOLS)
    weights = [0.1 if name.startswith(SLOW) else 1.0 for name in names]
    done = 0
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    handlers = contextlib.ExitStack()
    handlers.enter_context(rogue_handlers(int(number) if number else 0))
    try:
        for done in range(int(count)):
            if done % REJOIN_AFTER == 0:
                world.rejoin("trainer/0", "rollout/0", "peer/0", "peer/1")
            if world.update is None or world.update.ended:
                world.goes_on()
            world.call(choose.choices(names, weights)[0])
            if done % int(every) == 0:
                world.goes_on()
    except BaseException:
        print(f"call {done} (seed {number or 0}), after", *world.recent, sep="\n  ", flush=True)
        traceback.print_exc()
        raise
    finally:
        faulthandler.dump_traceback_later(60, exit=True)
        over.set()
        stirrer.join()
        world.close()
        handlers.close()
    print(f"{done + 1} calls in {time.monotonic() - began:.0f} s: {dict(world.told.most_common())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
