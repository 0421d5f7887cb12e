"""Test programs that use channels: a run without processes, sockets or torchrun."""

from replicas.testing.fake_run import FakeRun
from replicas.testing.virtual_target import VirtualTarget

__all__ = ["FakeRun", "VirtualTarget"]
