"""Logs of other nodes: what a reply may weigh, and nodes that do not answer.

Covers: supervisor/agent/log_reader.py, supervisor/fleet/node_logs.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from replicas import errors
from replicas.control.log_files import LogLine, Selection
from replicas.messages.bounds import FRAME_NBYTES
from replicas.supervisor.agent import log_reader
from replicas.supervisor.agent.log_reader import NodeLogReaders
from replicas.supervisor.agent.messages import LogQuery, LogReply, encode
from replicas.supervisor.fleet import node_logs
from replicas.supervisor.fleet.cluster import Cluster
from replicas.supervisor.fleet.node_logs import NodesReader
from tests.unit.control.test_log_files import texts, write


def within(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


class Nodes:
    """The agents of some nodes, each with its logs; those of ``frozen`` are mute."""

    def __init__(self, folders: dict[str, Path], frozen: frozenset[str] = frozenset()) -> None:
        self.agents = {node: NodeLogReaders(folder) for node, folder in folders.items()}
        self.frozen = frozen
        self.replies: list[LogReply] = []

    def others(self) -> list[str]:
        return [*self.agents]

    async def ask(self, node: str, query: LogQuery, kind: type[LogReply]) -> LogReply:
        if node in self.frozen:
            await asyncio.Event().wait()
        plain = msgspec.msgpack.decode(encode(query), type=LogQuery)
        self.replies.append(await self.agents[node].answer(plain))
        return self.replies[-1]


def reader_of(folder: Path, nodes: Nodes, selection: Selection | None = None) -> NodesReader:
    return NodesReader(folder, cast("Cluster", nodes), selection or Selection(), lambda: {"a/0": 1, "a/1": 1})


async def all_of(reader: NodesReader) -> list[LogLine]:
    found: list[LogLine] = []
    while lines := await reader.poll():
        found += lines
    return [*found, *await reader.aclose()]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param("\n" * 60_000, 60_000, id="blank"),
        pytest.param("\0" * 600_000 + "\n", 1, id="control characters"),
        pytest.param("\x01\n" * 30_000, 30_000, id="short"),
        pytest.param("ä" * 300_000, 1, id="no end"),
    ],
)
def test_a_reply_has_a_bound_in_bytes(tmp_path: Path, text: str, lines: int) -> None:
    async def story() -> None:
        write(tmp_path / "far", "a/0/gen-1/rank-0", text)
        nodes = Nodes({"far": tmp_path / "far"})
        found = await all_of(reader_of(tmp_path / "here", nodes))
        assert "\n".join(texts(found)) == text.removesuffix("\n")
        assert len(found) == lines
        most = max(log_reader.REPLY_NBYTES, 6 * len(text) // lines)
        assert max(len(encode(reply)) for reply in nodes.replies) <= most + 1000 < FRAME_NBYTES

    within(story())


def test_the_last_lines_of_many_ranks_come_one_after_the_other(tmp_path: Path) -> None:
    async def story() -> None:
        for rank in range(12):
            write(tmp_path / "far", f"a/0/gen-1/rank-{rank}", str(rank) + "\0" * 60_000)
        nodes = Nodes({"far": tmp_path / "far"})
        found = await all_of(reader_of(tmp_path / "here", nodes))
        assert sorted(line.rank for line in found) == [*range(12)]
        assert max(len(encode(reply)) for reply in nodes.replies) <= log_reader.REPLY_NBYTES + 1000
        assert not nodes.agents["far"]._readers

    within(story())


def test_a_frozen_node_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_logs, "POLL_S", 0.01)

    async def story() -> None:
        path = write(tmp_path / "good", "a/0/gen-1/rank-0", "one\n")
        nodes = Nodes(dict.fromkeys(("bad", "good", "worse"), tmp_path / "good"), frozenset({"bad", "worse"}))
        reader = reader_of(tmp_path / "here", nodes)
        assert texts(await reader.poll()) == ["one"]
        for _ in range(3):
            with path.open("a") as file:
                file.write("more\n")
            assert texts(await reader.poll()) == ["more"]
        await reader.aclose()

    within(story())


def test_following_goes_on_when_the_last_node_has_no_such_log_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent was replaced by one with an empty folder."""
    monkeypatch.setattr(node_logs, "POLL_S", 0.01)

    async def story() -> None:
        write(tmp_path / "far", "a/0/gen-1/rank-0", "one\n")
        nodes = Nodes({"far": tmp_path / "far"})
        reader = reader_of(tmp_path / "here", nodes)
        assert texts(await reader.poll()) == ["one"]
        for one in nodes.agents["far"]._readers.values():
            one.follower.close()
        nodes.agents["far"] = NodeLogReaders(tmp_path / "empty")
        assert [await reader.poll() for _ in range(3)] == [[], [], []]
        write(tmp_path / "empty", "a/0/gen-2/rank-0", "two\n")
        assert texts(await reader.poll()) == ["two"]
        await reader.aclose()

    within(story())


def test_logs_that_are_nowhere_are_refused_by_this_machine(tmp_path: Path) -> None:
    async def story() -> None:
        write(tmp_path / "far", "a/0/gen-1/rank-0", "one\n")
        reader = reader_of(tmp_path / "here", Nodes({"far": tmp_path / "far"}), Selection(target="b"))
        with pytest.raises(errors.UsageError, match=r"there is no log of b in .*here"):
            await reader.poll()
        await reader.aclose()

    within(story())
