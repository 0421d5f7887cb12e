"""A fake GPU on whose memory Gloo cannot work, as on a real one: everything is
staged."""

from __future__ import annotations

from tests.support.devices.fake_accelerator import FakeAccelerator

__all__ = ["NAME", "FarAccelerator"]

NAME = f"{__name__}:FarAccelerator"


class FarAccelerator(FakeAccelerator):
    group_backend = "nccl"
