"""What the random calls of the public API are made of is complete."""

from __future__ import annotations

import pytest

import replicas
from tests.support.channel.call_pools import unknown


def test_something_can_be_drawn_for_every_public_parameter() -> None:
    assert not unknown()


def test_a_new_method_or_parameter_must_be_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def anew(self: replicas.Channel, what: int) -> None: ...

    def receive(self: replicas.Channel, *, sooner: bool) -> None: ...

    monkeypatch.setattr(replicas.Channel, "anew", anew, raising=False)
    monkeypatch.setattr(replicas.Channel, "receive", receive)
    assert unknown() == {
        *("Channel.anew", "Channel.anew(what)", "Channel.receive(sooner)"),
        *("Channel.receive(deadline)", "Channel.receive(at_least)"),
    }
