"""Test programs that use channels, without processes, sockets or torchrun:
:class:`FakeRun` is a run in the test's own process. It does not fake deaths of
processes, process groups and sidecars."""

from replicas.testing.fake_run import FakeRun
from replicas.testing.virtual_target import VirtualTarget

__all__ = ["FakeRun", "VirtualTarget"]
