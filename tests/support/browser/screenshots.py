"""Pictures of the page for the docs: a run that is well, one that is not, a phone, and
reports.

    python -m tests.support.browser.screenshots docs/images [REPORT]

The run is the recorded one of ``replicas report --demo`` (:mod:`.record`), through the
real server and in a real browser. REPORT: the page that ``make demo`` has made, of
which another picture is taken.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from replicas.page.report import recorded, report
from replicas.status import ChannelStatus, GroupStatus, NodeStatus, PublishStatus, ReplicaStatus, RunStatus
from tests.support.browser import Chromium, Tab
from tests.support.browser.shown import ShownRun, served

WELL_S, BROKEN_S = 218.0, 183.0
"""How long before the end of the recorded run: before the loss of n3, and before it is
noticed."""
SILENT = "rollout/2"
"""On that node."""
_WIDE, _PHONE = (1280, 800), (390, 844)


def supervised(status: RunStatus, *, broken: bool = False) -> RunStatus:
    """What a supervisor knows beside the events: machines, pids, slots, budgets."""
    groups = tuple(_group(group, broken) for group in sorted(status.groups, key=lambda one: one.name != "trainer"))
    return replace(
        status,
        endpoint="10.0.0.1:9477",
        ready=not broken,
        groups=groups,
        nodes=tuple(_node(node) for node in status.nodes),
        channels=tuple(_channel(channel, broken) for channel in status.channels),
    )


def _group(group: GroupStatus, broken: bool) -> GroupStatus:
    left = 0.6 if broken and group.name == "rollout" else 0.9
    replicas = tuple(_replica(one) for one in group.replicas)
    return replace(group, launcher="torchrun", restart_budget_remaining_ratio=left, replicas=replicas, min_ready=None)


def _replica(one: ReplicaStatus) -> ReplicaStatus:
    pid = 4100 + 37 * one.replica
    slots = dict.fromkeys(one.versions, 2)
    return replace(one, pid=pid, pids={0: pid}, heartbeat_age_s=0.4, slots=slots, lived_s=200.0)


def _node(node: NodeStatus) -> NodeStatus:
    return replace(
        node, gpus=8, gpus_free=8 - 2 * len(node.replicas), cpus=96, memory_nbytes=1 << 40, local=node.name == "n1"
    )


def _channel(channel: ChannelStatus, broken: bool) -> ChannelStatus:
    members = tuple(replace(one, host=1, held=(channel.committed_version,)) for one in channel.members)
    version = channel.committed_version + 1
    waits = (f"{SILENT}/0",)
    publish = PublishStatus(
        version=version, publisher="trainer/0", state="moving", seconds=9.0, waits_for=waits, waiting=1
    )
    return replace(
        channel,
        slots=2,
        members=members,
        epoch=9,
        under_way=(publish,) if broken else (),
        version_nbytes=channel.last_sync.nbytes if channel.last_sync else 0,
    )


async def _shoot(tab: Tab, url: str, path: Path, until: str) -> None:
    await tab.open(url)
    await tab.until(until)
    await tab.until("document.querySelectorAll('rect.state').length > 5")
    await tab.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    if tab.errors:
        raise RuntimeError(f"the page complains: {tab.errors}")
    await tab.screenshot(path)
    print(path)


async def _live(
    browser: Chromium, folder: Path, name: str, left_s: float, change: Callable[[RunStatus], RunStatus]
) -> None:
    run = ShownRun(change=change)
    run.has_been(one for one in recorded(time.time() + left_s) if one.at < time.time())
    newest = max(one.version for one in (channel.last_sync for channel in run.status().channels) if one is not None)
    async with served(run) as url:
        tab = await browser.tab(*_WIDE)
        fragment = f"#sync/policy/{newest - 2}" if name == "broken" else ""
        await _shoot(tab, f"{url}{fragment}", folder / f"page-{name}.png", "document.querySelector('.l-live')")
        if name == "broken":
            phone = await browser.tab(*_PHONE, mobile=True)
            await phone.resize(*_PHONE, mobile=True, scale=2)
            await _shoot(phone, url, folder / "page-phone.png", "document.querySelector('.l-live')")


async def main(folder: Path, demo: Path | None) -> None:
    async with Chromium.start() as browser:
        await _live(browser, folder, "well", WELL_S, supervised)
        await _live(browser, folder, "broken", BROKEN_S, lambda status: supervised(status, broken=True))
        with tempfile.TemporaryDirectory() as scratch:
            page = Path(scratch) / "report.html"
            await asyncio.to_thread(page.write_text, report(recorded(1_790_000_000.0)))
            tab = await browser.tab(*_WIDE, dark=True)
            await _shoot(
                tab,
                f"{page.as_uri()}#replica/rollout/2",
                folder / "page-report.png",
                "document.querySelector('#panel h3')",
            )
        if demo is not None:
            await _shoot(await browser.tab(*_WIDE), demo.as_uri(), folder / "page-demo.png", "true")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None))
