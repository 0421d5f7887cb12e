"""A rank on a host of a network that is made for a test: a line of JSON in, one out,
until its standard input ends.

It knows the commands that the methods of :class:`_Rank` are. See
:mod:`tests.support.channel.host_ranks`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import replicas

__all__ = ["ELEMENTS", "TENSORS", "TIMEOUT_S"]

TIMEOUT_S = 60.0
ELEMENTS = 1 << 20
TENSORS = 4
"""Of 4 MiB each."""
FEW = 1 << 12
"""One byte in so many differs from the base's."""


class _Rank:
    """The commands."""

    def __init__(self) -> None:
        self._channels: dict[str, replicas.Channel] = {}
        self._model = torch.empty(0, dtype=torch.uint8)

    def join(self, channel: str = "policy", **where: Any) -> dict[str, Any]:
        self._channels[channel] = replicas.join(channel, **where)
        return {}

    def publish_bytes(self, seed: int, nbytes: int, channel: str = "policy", base: int = -1) -> dict[str, Any]:
        """One tensor of so many bytes, which follow from ``seed``; ``base``: nearly all
        are those of that seed."""
        weights = {"w": _bytes(seed, nbytes, base)}
        receipt = self._channels[channel].publish(weights, new_manifest=base < 0).wait(TIMEOUT_S)
        return {"version": receipt.version, "lost": receipt.lost, "reasons": receipt.reasons}

    def receive_bytes(self, channel: str = "policy", base: int = -1) -> dict[str, Any]:
        """The newest version, once it is there, all of whose bytes have been looked at.

        ``seed``: the one that they follow from; -1 for none.
        """
        with self._channels[channel].receive().wait(TIMEOUT_S) as update:
            found = dict(update)["w"]
            seed = int(found[0]) if len(found) else -1
            if seed >= 0 and not any(torch.equal(found, _bytes(seed, len(found), one)) for one in (base, -1)):
                raise RuntimeError(f"version {update.version} has other bytes than those of {seed}")
            return {"version": update.version, "seed": seed, "nbytes": len(found)}

    def publish_changed(self, nbytes: int, places: list[int]) -> dict[str, Any]:
        """One tensor of so many bytes, others than before at these places alone."""
        if not len(self._model):
            self._model = _bytes(0, nbytes)
        self._model[places] += 1
        receipt = self._channels["policy"].publish({"w": self._model}).wait(TIMEOUT_S)
        return {"version": receipt.version, "lost": receipt.lost}

    def load_changed(self) -> dict[str, Any]:
        """Load the newest version, and of it what has changed alone.

        ``places``: where that was; None: it came whole. ``right``: the model has it.
        """
        with self._channels["policy"].receive().wait(TIMEOUT_S) as update:
            (change,) = update.changes()
            if not update.base:
                self._model = torch.empty_like(dict(update)["w"])
            update.load_into({"w": self._model}, changed_only=update.base > 0)
            places = change.positions.tolist() if change.whole is None else None
            right = torch.equal(self._model, dict(update)["w"])
            return {"version": update.version, "base": update.base, "places": places, "right": right}

    def publish(self, seed: int, part: int = 0, parts: int = 1) -> dict[str, Any]:
        """Tensors that follow from ``seed``; of several parts, the rows of one."""

        weights: dict[str, Any] = {}
        for number in range(TENSORS):
            whole = torch.arange(ELEMENTS, dtype=torch.int32).add_(seed + number).view(1 << 10, -1)
            rows = whole.tensor_split(parts)[part]
            first = sum(len(other) for other in whole.tensor_split(parts)[:part])
            weights[f"w{number}"] = replicas.Shard(rows, (first, 0), tuple(whole.shape)) if parts > 1 else whole
        receipt = self._channels["policy"].publish(weights).wait(TIMEOUT_S)
        return {
            "version": receipt.version,
            "lost": receipt.lost,
            "reasons": receipt.reasons,
            "nbytes": receipt.nbytes,
            "phases": receipt.phases,
        }

    def receive(self) -> dict[str, Any]:
        """The newest version, once it is there; ``seed``: that of its tensors, all of
        whose values have been looked at."""

        with self._channels["policy"].receive().wait(TIMEOUT_S) as update:
            found = dict(update)
            seed = int(found["w0"].flatten()[0])
            for number in range(TENSORS):
                expected = torch.arange(ELEMENTS, dtype=torch.int32).add_(seed + number).view(1 << 10, -1)
                if not torch.equal(found[f"w{number}"], expected):
                    raise RuntimeError(f"w{number} of version {update.version} has other values than those of {seed}")
            return {"version": update.version, "seed": seed}

    def steer(self, order: str, version: str) -> dict[str, Any]:
        """An order about the versions, such as ``promote``."""
        getattr(self._channels["policy"].versions, order)(version).wait(TIMEOUT_S)
        return {}

    def leave(self) -> dict[str, Any]:
        for channel in self._channels.values():
            channel.close()
        return {}


def _bytes(seed: int, nbytes: int, base: int = -1) -> torch.Tensor:
    """So many; the first one is ``seed``, up to 250."""
    found = torch.arange(nbytes, dtype=torch.int64).mul_(7).add_(seed if base < 0 else base).remainder_(251)
    found[:: 1 if base < 0 else FEW] += 0 if base < 0 else seed - base
    return found.to(torch.uint8)


def _main() -> None:
    rank = _Rank()
    for line in sys.stdin:
        command = json.loads(line)
        handler: Callable[..., dict[str, Any]] = getattr(rank, command.pop("do"))
        try:
            reply = handler(**command)
        except Exception as error:  # noqa: BLE001  # the test is told, and fails
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _main()
