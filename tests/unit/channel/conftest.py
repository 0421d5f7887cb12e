"""Ranks of a channel whose coordinator is the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.channel.scripted import ScriptedWorld


@pytest.fixture
async def target() -> AsyncIterator[ScriptedWorld]:
    world = ScriptedWorld("target", 2)
    yield world
    await world.end()


@pytest.fixture
async def source() -> AsyncIterator[ScriptedWorld]:
    world = ScriptedWorld("source", 2)
    yield world
    await world.end()
