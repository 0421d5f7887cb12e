"""State of one publish of this rank, and the messages that announce it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicas.channel.pending import Pending, Receipt
from replicas.core.versions.manifest import PartManifest
from replicas.messages import Filled, Meta, Packed, PackFailed, PublishBegin, SlotPlace, arguments
from replicas.weights.copying import Copier
from replicas.weights.devices.device_copies import DeviceCopies
from replicas.weights.memory.arena import Slot

__all__ = ["PublishJob"]


class PublishJob:
    """One publish of this rank; fields change on the session thread.

    :ivar pending: the caller's Pending.
    :ivar number: its number among the replica's publishes; 0 until it has begun.
    :ivar version: the number that the coordinator gave it; 0 until then.
    :ivar late_meta: the user's function that makes ``meta`` after the walk; None:
        ``meta`` is known.
    :ivar user_failed: ``late_meta`` raised.
    :ivar hold: GPU tensors are copied on the caller's stream.
    :ivar copies: its copies on a device, under way or ended.
    :ivar copier: its copies on the CPU.
    :ivar walked: the caller has done its whole part.
    :ivar walk_over: the caller has left the call, done or not.
    :ivar packed: its slot is filled.
    :ivar ready: all that Packed says is known, including ``digest``.
    :ivar told: Packed or Filled was sent.
    :ivar streaming: the coordinator was told that it is being filled, and has it sent
        meanwhile.
    :ivar failed: the failure reported by this rank; None: no failure here.
    :ivar settling: timer that settles it by a commit or discard if no verdict follows.
    """

    def __init__(
        self,
        version: int | None,
        deadline_s: float,
        meta: Meta | Callable[[], Mapping[str, Any]],
        new_manifest: bool,
        channel: str,
        *,
        hold: bool = True,
    ) -> None:
        self.number = 0
        self.asked_version = version
        self.version = 0
        self.deadline_s = deadline_s
        self.began = time.monotonic()
        self.deadline = self.began + deadline_s
        self.late_meta = meta if callable(meta) else None
        self.user_failed = False
        self.meta: Meta = {} if callable(meta) else meta
        self.new_manifest = new_manifest
        self.hold = hold
        self.copies: DeviceCopies | None = None
        self.pending: Pending[Receipt] = Pending(f"publish on {channel}")
        self.admitted: Pending[int] = Pending(f"admission of a publish on {channel}")
        self.packed = False
        self.ready = False
        self.told = False
        self.streaming = False
        self.digest = ""
        self.digest_s = 0.0
        self.failed: PackFailed | None = None
        self.copier: Copier | None = None
        self.walked = False
        self.walk_over = False
        self.slot: Slot | None = None
        self.manifest: PartManifest | None = None
        self.device = "cpu"
        self.wait_s = 0.0
        self.pack_s = 0.0
        self.hold_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.settling: asyncio.TimerHandle | None = None

    def ask_meta(self) -> None:
        """Call the user's ``meta`` function after the walk; its exceptions pass.

        :raises replicas.errors.UsageError: its result is not valid.
        """
        if self.late_meta is None:
            return
        try:
            found = self.late_meta()
        except BaseException:
            self.user_failed = True
            raise
        self.meta = arguments.meta("publish: what meta() returned", found)

    @property
    def announced(self) -> bool:
        """Whether the coordinator knows its local result: the next one may be told."""
        return self.told or self.streaming or self.failed is not None

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def begin_message(self, deadline_s: float) -> PublishBegin:
        """The announcement, also to a coordinator that did not admit it."""
        return PublishBegin(
            publish=self.number,
            version=self.version or self.asked_version,
            deadline_s=deadline_s,
            meta=self.meta,
            new_manifest=self.new_manifest,
            resumed=self.version != 0,
        )

    def packed_message(self) -> Packed:
        manifest = self.manifest
        return Packed(
            publish=self.number,
            manifest_hash=manifest.hash if manifest is not None else "",
            nbytes=manifest.nbytes if manifest is not None else 0,
            device=self.device,
            wait_s=self.wait_s,
            pack_s=self.pack_s,
            digest=self.digest,
            place=self.slot.place if self.slot is not None else None,
            digest_s=self.digest_s,
            hold_s=self.hold_s,
            meta=self.meta if self.late_meta is not None else None,
        )

    def streaming_message(self, manifest: PartManifest, device: str) -> Packed:
        """The announcement that the bytes filled so far may be sent."""
        return Packed(self.number, manifest.hash, manifest.nbytes, device, self.wait_s, 0.0, streaming=True)

    def filled_message(self, place: SlotPlace) -> Filled:
        return Filled(self.number, self.pack_s, self.digest, self.digest_s, place, self.hold_s)

    def receipt(self, epoch: int, staging: str) -> Receipt:
        """Receipt of a version known to be committed, without a verdict's details."""
        return Receipt(
            version=self.version,
            epoch=epoch,
            members=(),
            lost=(),
            nbytes=self.manifest.nbytes if self.manifest is not None else 0,
            seconds=time.monotonic() - self.began,
            phases={"wait": self.wait_s, "pack": self.pack_s, "hold": self.hold_s},
            staging=staging,
            digest=self.digest if self.slot is not None and self.slot.image is not None else "",
        )

    def stop_timers(self) -> None:
        for timer in (self.timer, self.settling):
            if timer is not None:
                timer.cancel()
        self.timer = self.settling = None
