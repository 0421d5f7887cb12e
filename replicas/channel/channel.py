"""`Channel`: a rank's membership of a channel, and the public API of this package."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from replicas import errors
from replicas.channel.operations.collectives import Collectives
from replicas.channel.operations.operations import RankOperations
from replicas.channel.operations.results import OperationCall
from replicas.channel.session.carriers import Carriers
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.hub import BYE_TIMEOUT_S, GRACE_S, Hub
from replicas.channel.session.pending import Pending, Promise, Receipt, copy_error
from replicas.channel.session.session import Session
from replicas.channel.session.sidecar_lanes import SidecarLanes
from replicas.channel.versions.filling import PublishJob, arena_like, reserve
from replicas.channel.versions.manifest_exchange import ManifestExchange
from replicas.channel.versions.orders import VersionOrders, Versions
from replicas.channel.versions.publish import Publisher
from replicas.channel.versions.receive import Bound, Receiver, Watches
from replicas.channel.versions.transfers import Transfers
from replicas.channel.versions.update import Update
from replicas.common import own_loop
from replicas.common.logs import Log
from replicas.messages import arguments
from replicas.messages.bounds import VERSION_MAX, shown
from replicas.messages.identity import Member
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.tensors import overlaps_itself
from replicas.weights.feed import Feed
from replicas.weights.writable import WritableSlot

logger = Log("replicas.channel")
CLOSE_TIMEOUT_S = 12.0


@arguments.refuse_unknown_keywords
class Channel(Collectives):
    """This process's membership of a channel, whose ranks share weights or tensors.

    Made by :func:`replicas.join`; end it with :meth:`close` or a ``with`` block.
    Methods may be called from any thread, but only one thread may publish at a time.
    Attributes never block. Orders to serve and to keep versions: ``versions``.
    """

    def __init__(self, hub: Hub, session: Session) -> None:
        """Make the parts that handle messages, and register them; connect nothing."""
        self._hub = hub
        self._pid = os.getpid()
        self._closed = self._leaving = False
        self._left: Promise[None] = hub.pending("leaving")
        self._lanes = SidecarLanes(hub)
        self._publisher = Publisher(hub)
        self._manifests = ManifestExchange(hub, self._publisher.manifest_of)
        self._carriers = Carriers(hub, self._lanes.prepare)
        self._transfers = Transfers(hub, self._lanes, self._carriers, self._manifests)
        self.versions: Versions = Versions(hub, orders := VersionOrders(hub))
        self._receiver = Receiver(hub, self.versions.score)
        self._watches = Watches(hub)
        self._operations = RankOperations(hub, self._lanes, self._transfers.broadcast)
        weights = (self._publisher, self._receiver, self._watches, self._transfers, self._manifests)
        hub.start(session, (*weights, orders, self._operations, self._lanes, self._carriers))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version={self.version} latest={self.latest} epoch={self.epoch}"
        return f"<Channel {self.name} {self.member} {state}>"

    @property
    def name(self) -> str:
        """Name of the channel."""
        return self._hub.name

    @property
    def member(self) -> Member:
        """This process's group, replica, rank and incarnation (nonce of the join)."""
        return self._hub.member

    @property
    def version(self) -> int:
        """The version that this rank serves (a source: its last commit); 0 if none."""
        return self._hub.loaded

    @property
    def latest(self) -> int:
        """The newest committed version known to this process, or 0."""
        return self._hub.latest

    @property
    def epoch(self) -> int:
        """Number of the newest membership epoch known to this process."""
        return self._hub.epoch

    @property
    def members(self) -> tuple[Member, ...]:
        """All members of the epoch :attr:`epoch`, sorted by group, replica and rank."""
        return self._hub.members

    @property
    def role(self) -> str:
        """``source``, ``target``, ``both``, ``peer`` or ``observer``."""
        return self._hub.settings.role

    @property
    def info(self) -> Mapping[str, str]:
        """The ``info`` that this process passed to join."""
        return dict(self._hub.hello.info)

    def publish(
        self,
        weights: object,
        *,
        version: int | None = None,
        dtype: torch.dtype | None = None,
        meta: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        new_manifest: bool = False,
        adapter: str | None = None,
        deadline: float | None = None,
        hold: bool = True,
        check_finite: bool = False,
    ) -> Pending[Receipt]:
        """Copy a complete set of weights and send it to all targets.

        Returns when the weights are copied (from a GPU: when the copies are queued);
        the Pending ends with the commit. Call it on every rank of a source replica, in
        the same order (with ``ranks = "leader"`` the leader alone suffices, unless
        gathering the weights needs the other ranks). The call iterates over the weights
        once, in order, on this thread and stream, even after a failure or a refused
        argument, as the gathers involve other ranks; every rank raises the same error.

        A publish continues if the coordinator restarts. Without a verdict by the
        deadline it raises OutcomeUnknown; wait again to learn the outcome.

        **On a GPU** the copies are only queued, on this thread's current stream, like
        any torch operation: later work on the stream may change the weights, and a
        tensor allocated on it may be freed as soon as the iterable advances. The copies
        occupy the stream for ``receipt.phases["hold"]`` seconds.

        :param weights: a slot of :meth:`arena_like`, a module (tied storage once), a
            mapping, an iterable of ``(name, Tensor | DTensor | Shard | None)``, or an
            object with ``metadata()`` and iteration; tensors of any dtype, shape,
            strides and device.
        :param version: number of the version, greater than every earlier one; default:
            the next number. A failed or refused publish uses up its number.
        :param dtype: cast plain floating tensors to this dtype; default: no cast.
        :param meta: scalars, and lists and dicts of scalars; receivers get it as
            ``update.meta`` (with the caller's OpenTelemetry span as ``traceparent``).
            Or a function that returns such a mapping (with a checksum, say): every rank
            calls it, on this thread, after the last weight, and rank 0's result is
            used. No bytes go to other hosts before that.
        :param new_manifest: allow other names, shapes or dtypes than before.
        :param adapter: the weights are the LoRA adapter of this name, with its
            configuration (JSON) as ``weights.adapter_config``, which
            ``replicas.sources.hf(model, adapter="only")`` has. Followers load it beside
            their model; ``meta`` gets the keys ``adapter`` and ``adapter_config``.
        :param deadline: seconds for the whole publish; default: the channel's.
        :param hold: False: another stream copies the GPU tensors, and this stream does
            not wait for it. The caller must not write to the weights before
            :meth:`fence` or the next publish. Applies to weights that need no gather (a
            module or a mapping); others are always copied on the current stream.
        :param check_finite: True: a version with NaN or infinite values is not
            committed; the Pending raises ManifestMismatch, which names the tensors. The
            check reads all bytes once more, on another thread.
        :raises replicas.errors.StaleVersion: ``version`` is not newer.
        :raises replicas.errors.ManifestMismatch: a value is unusable or does not fit.
        :raises replicas.errors.NoCapacity: there is no memory for a slot.
        :raises replicas.errors.Busy: no slot became free in time.
        :raises replicas.errors.ReplicasError: a failure that no caller waited for yet.
        """
        self._check_role("publish")
        feed = Feed(weights, mode=self._publisher.mode)
        try:
            feed.cast_to(dtype)
            self._check_open()
            number = None
            if version is not None:
                number = arguments.integer("publish: version", version, least=1, most=VERSION_MAX)
            said = arguments.with_trace("publish", arguments.with_adapter("publish", meta, adapter, weights))
            renewed = arguments.flag("publish: new_manifest", new_manifest)
            held = arguments.flag("publish: hold", hold)
            deadline_s = self._deadline_s(deadline)
            job = PublishJob(number, deadline_s, said, renewed, self.name, self._hub.loop.end, hold=held)
            job.check_finite = arguments.flag("publish: check_finite", check_finite)
            own_loop.must_not_block("publish")
        except Exception:  # any error of the call: walking the weights makes gathers that other ranks take part in
            feed.drain()
            raise
        return self._publisher.publish(feed, job)

    def fence(self, stream: torch.Stream | None = None) -> None:
        """Make ``stream`` wait for the copies of all publishes.

        By default ``stream`` is this thread's current stream. The wait is on the GPU;
        the call does not block. Work queued on the stream afterwards may write to
        weights published with ``hold=False``. Without a GPU the call does nothing:
        publish has already copied the weights.

        :raises replicas.errors.UsageError: ``stream`` is not a torch.(cuda.)Stream.
        """
        self._check_open()
        # with an accelerator, on_stream() checks the type
        if accelerator() is None and stream is not None and not isinstance(stream, torch.Stream):
            raise self._misuse(f"fence: stream must be a torch.Stream, not {shown(stream)}", "e.g. torch.cuda.Stream()")
        self._publisher.copies.fence(stream)

    def arena_like(
        self, weights: object, *, dtype: torch.dtype | None = None, deadline: float | None = None
    ) -> WritableSlot:
        """Lend memory for one version (a slot) as writable tensors by name.

        Use it in a ``with`` block: write the next version into every tensor (on the
        CPU; their contents are undefined) and pass the mapping to :meth:`publish`
        inside the block, which copies nothing. Leaving the block without a publish
        returns the slot. The publish empties the mapping's tensors, and other processes
        then read the slot: keep no views of it. The channel needs ``slots`` >= 2.

        With ``staging = "device"`` the tensors are on the GPU: write them on this
        thread's current stream; publish on a stream that made or awaits all writes.

        :param weights: names, shapes and dtypes: a module, a mapping, or an object with
            ``metadata()``.
        :param dtype: dtype of plain floating tensors; default: as they are.
        :param deadline: seconds to wait for a free slot; default: the channel's.
        :raises replicas.errors.ManifestMismatch: a value cannot be published.
        :raises replicas.errors.NoCapacity: there is no memory for a slot.
        :raises replicas.errors.Busy: no slot became free in time.
        """
        self._check_can_fill("arena_like", dtype)
        return arena_like(self._hub, weights, dtype, self._publisher.mode, self._deadline_s(deadline))

    def reserve(self, weights: object, *, dtype: torch.dtype | None = None, slots: int | None = None) -> None:
        """Allocate the memory for versions ahead of the first publish.

        Does not block: a thread allocates as much as fits. Without this call a first
        publish takes ten times longer; one that comes meanwhile waits for its slot.

        :param weights: names, shapes and dtypes, as for :meth:`arena_like`.
        :param dtype: dtype of plain floating tensors; default: as they are.
        :param slots: number of versions; default: all of the channel's ``slots``.
        :raises replicas.errors.ManifestMismatch: a value cannot be published.
        :raises replicas.errors.UsageError: not on a source, or a wrong argument.
        """
        self._check_can_fill("reserve", dtype)
        most = len(self._hub.arena.slots)
        number = most if slots is None else arguments.integer("reserve: slots", slots, least=1, most=most)
        reserve(self._hub, weights, dtype, self._publisher.mode, number)

    def _check_can_fill(self, what: str, dtype: object) -> None:
        """Raise UsageError unless this is a source and ``dtype`` None or a torch.dtype.
        Raise the error of a channel that has ended. ``what``: the calling method."""
        self._check_role(what)
        self._check_open()
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise self._misuse(f"{what}: dtype must be a torch.dtype, not {shown(dtype)}", "pass e.g. torch.bfloat16")

    def _check_role(self, what: str) -> None:
        """Raise UsageError unless this rank is a source; ``what`` names the method."""
        self._check_process()
        if self.role not in ("source", "both"):
            hint = {"peer": "peers never publish: send or all_reduce"}.get(self.role, "publish from a source group")
            raise self._misuse(f"{what}: this rank is a {self.role} of channel {self.name}", hint)

    def receive(
        self, *, deadline: float | None = None, at_least: int | tuple[str, float] | None = None
    ) -> Pending[Update]:
        """Get the newest committed version, the same for all ranks of this replica.

        It is newer than the version loaded here; if ``at_least`` allows the loaded
        version and no newer one exists, the loaded version is returned again, so that
        a step can be repeated. A second call before the update was taken returns the
        same Pending. The call may be made ahead of time: until a caller waits for the
        update, each newer version replaces it (``done()`` is then briefly False). An
        open update keeps its slot in use; a publish may have to wait for that slot.

        A replica that restarts in the middle of a commit gets the version before it;
        pass ``at_least`` where that is too old, and the same on all ranks of a replica.
        Otherwise the highest bound applies to all ranks that wait, and a bound above
        the version that another rank has begun to load waits until that rank calls
        again.

        :param deadline: seconds; None (the default): no limit.
        :param at_least: a version number, or ``(key, number)`` of the publisher's
            ``meta``, such as ``("step", 100)``: older versions, and versions without
            such a number, are skipped. A call with another bound replaces the receive
            under way, which fails with UsageError.
        :raises replicas.errors.UsageError: the last update is still open, or this rank
            is not a target. The Pending raises DeadlineExceeded, or Disconnected after
            60 s without a session.
        """
        self._check_open()
        if self.role not in ("target", "both"):
            raise self._misuse(f"receive: this rank is a {self.role} of channel {self.name}", "receive in a target")
        bound = Bound(*arguments.bound("receive: at_least", at_least))
        return self._receiver.receive(None if deadline is None else self._deadline_s(deadline), bound)

    def committed(self, *, after: int | None = None, deadline: float | None = None) -> Pending[int]:
        """Return a Pending that ends at a commit newer than ``after``, with its number.

        It ends immediately, with the newest, if there is one. It raises
        DeadlineExceeded, or Disconnected after 60 s without a session.

        :param after: a version number; default: the latest now.
        :param deadline: seconds; None (the default): no limit.
        """
        self._check_open()
        number = None if after is None else arguments.integer("committed: after", after)
        return self._watches.committed(number, None if deadline is None else self._deadline_s(deadline))

    def loaded(self, version: int, *, deadline: float | None = None) -> Pending[int]:
        """Return a Pending that ends when all live targets serve ``version`` or newer.

        Its value is the oldest version that a live target replica serves. It raises
        SyncError (a target refused it), DeadlineExceeded, or Disconnected after 60 s
        without a session.

        :param deadline: seconds; None (the default): no limit.
        """
        self._check_open()
        number = arguments.integer("loaded: version", version)
        return self._watches.loaded(number, None if deadline is None else self._deadline_s(deadline))

    def progress(self, step: int) -> None:
        """Report the training step with the next heartbeat, to detect lack of progress.

        :param step: a whole number, 0 or more; it replaces one not sent yet.
        """
        self._check_open()
        self._hub.progress(arguments.integer("progress: step", step, least=0))

    def close(self, *, wait: bool = True) -> None:
        """Leave the channel: say good-bye, end the sidecars, free the memory.

        The call blocks (``wait`` apart, 12 s a step). Closing again starts nothing.

        :param wait: first wait for publishes and operations, until their deadlines.
        :raises replicas.errors.UsageError: a coordinator runs on this thread's event
            loop: call it in a worker thread. The channel stays open.
        :raises replicas.errors.ReplicasError: with ``wait``, after closing: a failed
            publish or collective for which no caller has waited.
        """
        if self._pid != os.getpid():
            return  # a forked child has nothing to close
        wait = arguments.flag("close: wait", wait)
        if self._closed:
            if self._leaving:
                self._left.wait_ended(CLOSE_TIMEOUT_S)
            return
        if self._hub.over is None:
            own_loop.must_not_block("close")
        failure: BaseException | None = None
        inside = Holder()
        try:
            self._hub.call(self._hub.loans.lend, inside, self._start_to_leave)  # runs even if this is interrupted
            self._closed = True
            if wait and self._hub.over is None:
                self._hub.loop.run(lambda: asyncio.sleep(0), CLOSE_TIMEOUT_S)  # earlier calls have reached the loop
                for pending in (*self._publisher.open_jobs(), *self._operations.open_jobs()):
                    pending.wait_ended()  # not wait(): that would count as telling the caller
            if not self._publisher.copies.wait(CLOSE_TIMEOUT_S):
                text = "closing channel %s, though its copies on the GPU still run after %s s"
                logger.warning(text, self.name, CLOSE_TIMEOUT_S)
            failure = self._hub.failures.take_unreported()
        finally:
            self._hub.call(self._hub.loans.give_back, inside)
        if not self._left.wait_ended(CLOSE_TIMEOUT_S):
            logger.warning("leaving channel %s without its end, which took more than %s s", self.name, CLOSE_TIMEOUT_S)
        if failure is None or isinstance(failure, errors.Fenced):
            return
        if wait:
            raise failure
        logger.warning("closing channel %s after a failure that no caller waited for: %s", self.name, failure)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the channel; unless the block raised, wait for open work before."""
        self.close(wait=error is None)

    def _start_to_leave(self) -> None:
        """Session thread: mark as closed; start the task that leaves; once only."""
        if not self._leaving:
            self._closed = self._leaving = True
            self._hub.loop.spawn(self._leave_on_loop(), f"{self.name}: leaves")

    async def _leave_on_loop(self) -> None:
        """Session thread: send Bye, fail open work with Gone, then free the memory."""
        hub = self._hub
        try:
            await hub.session.close("closed", BYE_TIMEOUT_S)
            hub.session_over(hub.error(errors.Gone, f"channel {self.name} was closed", hint=""))
            await self._lanes.all_gone()
            hub.held_versions.close()
            self._operations.close()
            hub.loop.closers.pop(self, None)
        finally:
            self._left.resolve(None)

    def _open(self, timeout_s: float) -> None:
        """Connect, and block until the session is open. Have the channel closed at the
        interpreter's exit; on a peer start to fork a sidecar, to run its collectives.
        Raise Disconnected if no coordinator answers within ``timeout_s`` seconds."""
        loop = self._hub.loop
        began = time.monotonic()
        loop.closers[self] = partial(self.close, wait=False)
        try:
            loop.run(lambda: self._hub.session.open(timeout_s), timeout_s + GRACE_S)
        except TimeoutError as error:
            waited_s = time.monotonic() - began
            text = f"no coordinator answered at {self._hub.session.endpoint} within {waited_s:.0f} s"
            raise self._hub.error(errors.Disconnected, text) from error
        settings = self._hub.settings
        if settings.role == "peer" and (settings.peer_ranks != "leader" or self._hub.leader):
            self._hub.call(self._lanes.prepare)  # the other roles need sidecars only with several hosts

    def _start_operation(self, operation: OperationCall, deadline: float | None) -> Pending[Receipt]:
        """Check role and tensors, copy the inputs, and start the collective. Return its
        Pending, which ends within ``deadline`` seconds (None: the channel's)."""
        self._check_open()
        if self.role != "peer":
            raise self._misuse(f"{operation.kind}: channel {self.name} has no peers", "use one with peers = [...]")
        if self._hub.settings.peer_ranks == "leader" and self._hub.member.rank:
            text = f"{operation.kind}: only rank 0 of each replica takes part"
            raise self._misuse(text, 'set ranks = "each" or "all" for the peers')
        if operation.step is not None:
            step = arguments.integer(f"{operation.kind}: step", operation.step, least=0)
            operation = dataclasses.replace(operation, step=step)
        for tensor in operation.written(self.member, each=self._hub.settings.peer_ranks == "each"):
            if overlaps_itself(tensor):
                raise self._misuse(
                    f"{operation.kind}: a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has "
                    "elements that share memory, and cannot be written",
                    "pass a tensor with memory of its own, such as a clone()",
                )
        return self._operations.start(operation, self._deadline_s(deadline))

    def _deadline_s(self, deadline: float | None) -> float:
        """Return ``deadline`` (seconds), for None the channel's; UsageError if bad."""
        if deadline is None:
            return self._hub.settings.deadline_s
        return arguments.seconds("deadline", deadline)

    def _check_process(self) -> None:
        """Raise UsageError in a forked child of the process that joined."""
        if self._pid != os.getpid():
            text = "this process was forked from the one that joined the channel"
            raise self._misuse(text, "join in the process that uses the channel")

    def _check_open(self) -> None:
        """Raise UsageError if closed or forked, or the error that ended the channel."""
        self._check_process()
        if self._closed:
            raise self._misuse(f"channel {self.name} is closed", "join again")
        if self._hub.over is not None:
            raise copy_error(self._hub.over)

    def _misuse(self, text: str, hint: str) -> errors.ReplicasError:
        """Return (do not raise) a UsageError of this channel."""
        return self._hub.error(errors.UsageError, text, hint=hint)
