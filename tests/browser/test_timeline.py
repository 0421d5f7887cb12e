"""The timeline of the page in a real browser: what it draws first, what it folds, and
what it says of what is not known or no longer kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replicas.core.base.effects import LoadFailed, MemberJoined, ReplicaLoaded, SyncEnded, VersionDecided
from replicas.core.lives.lifecycle import ReplicaEvent
from replicas.messages.identity import Member
from replicas.page import live
from replicas.page.report import report
from replicas.status import RunStatus, SyncRecord, VersionStatus
from replicas.telemetry.events import RunEnded
from tests.browser.test_page import a_run, check, commit, kill, moved, opened
from tests.support.browser import Chromium, Tab
from tests.support.browser.shown import ShownRun, served

pytestmark = pytest.mark.anyio

SIZES = [(1280, 800, False), (390, 844, True)]
LANES = "[...document.querySelectorAll('[data-lane^=\"replica \"]')].map((one) => one.dataset.lane.slice(8))"


def came_back(run: ShownRun, index: int) -> None:
    run.tell(moved("rollout", index, ReplicaEvent.BACKOFF_ELAPSED, "backoff", "starting", generation=2))
    about: dict[str, Any] = {"generation": 2, "start_s": 1.0, "recovery_s": 2.1}
    run.tell(moved("rollout", index, ReplicaEvent.READY, "starting", "ready", **about))


def many(rollouts: int) -> ShownRun:
    """A run whose healthy group of judges comes before its rollouts, and whose newest
    version has phases of less than half a millisecond."""
    run = a_run(rollouts)
    for index in range(8):
        run.tell(moved("judge", index, ReplicaEvent.START, "pending", "starting"))
        run.tell(moved("judge", index, ReplicaEvent.READY, "starting", "ready", start_s=0.1))
    commit(run, 2, phases={"pack": 0.1, "map": 0.0002, "transfer": 0.3, "commit": 0.0001})
    return run


def promoted(status: RunStatus) -> RunStatus:
    """With version 2 served, and a candidate on its canary."""
    (policy,) = status.channels
    versions = (
        VersionStatus(number=3, labels=("candidate",), at=time.time() - 5.0, held=4, serving=("rollout/1",)),
        VersionStatus(number=2, labels=("current",), held=4, serving=("rollout/0", "rollout/2")),
    )
    steered = {"follow": "promoted", "current": 2, "canary": ("rollout/1",), "versions": versions}
    return msgspec.structs.replace(status, channels=(msgspec.structs.replace(policy, **steered),))


async def test_a_lane_has_which_version_is_served_and_the_candidate_while_it_lasts(
    chromium: Chromium, tmp_path: Path
) -> None:
    """And nobody is behind a candidate that it is not to load."""
    run = a_run(change=promoted)
    run.tell(VersionDecided("policy", 1, "promoted"))
    commit(run, 2)
    run.tell(VersionDecided("policy", 2, "promoted"))
    run.tell(
        SyncEnded("policy", SyncRecord(version=3, outcome="committed", seconds=0.4, nbytes=8, publisher="trainer/0"))
    )
    titles = "[...document.querySelectorAll('[data-lane=\"served policy\"] title')].map((one) => one.textContent)"
    meta = "document.querySelector('[data-lane=\"served policy\"]').parentElement.innerText"
    async with served(run) as url, opened(chromium, url) as tab:
        await tab.until(f"{titles}.length === 3")
        found = "|".join(await tab.js(titles))
        for said in (
            "version 1 of policy is served",
            "version 2 of policy",
            "version 3 is the candidate, on rollout/1",
        ):
            assert said in found, found
        assert "v2 v3 on rollout/1" in " ".join((await tab.js(meta)).split())
        whole = await tab.text("body")
        assert "is not loaded by" not in whole
        assert "\u22121" not in whole
        await check(tab)
    run.tell(RunEnded(exit_code=0, reason="done"))
    page = tmp_path / "report.html"
    page.write_text(report(run.log.after(0)))
    tab = await chromium.tab(1280, 800)
    await tab.open(page.as_uri())
    await tab.until(f"{titles}.length === 2")


async def bottom(tab: Tab, selector: str) -> float:
    """Where the element ends, in pixels from the top of the first screen."""
    return float(await tab.js(f"document.querySelector({selector!r}).getBoundingClientRect().bottom + scrollY"))


@pytest.mark.parametrize(("width", "height", "mobile"), SIZES)
async def test_of_fifty_replicas_the_ill_ones_are_on_the_first_screen(
    chromium: Chromium, tmp_path: Path, width: int, height: int, mobile: bool
) -> None:
    run = many(41)
    ill = [7, 23, 38]
    for index in ill:
        kill(run, index)
    size = {"width": width, "height": height, "mobile": mobile}
    async with served(run) as url, opened(chromium, url, **size) as tab:
        await tab.until(f"{LANES}.join() === 'rollout/7,rollout/23,rollout/38'")
        assert "47 healthy" in await tab.text("button.name")
        for selector in ("[data-lane='replica rollout/38']", "[data-lane=healthy]", "[data-lane='channel policy']"):
            assert await bottom(tab, selector) < height, selector
        assert await uncut(tab)
        await check(tab)
        await tab.until("document.querySelectorAll('[data-lane=healthy] rect.state').length >= 47")
        await tab.click("button.name")
        await tab.until(f"{LANES}.length === 50")
        assert (await tab.js(LANES))[:4] == ["rollout/7", "rollout/23", "rollout/38", "rollout/0"]
        assert await tab.js("document.querySelector('button.name').ariaExpanded") == "true"
        await check(tab)
    for index in ill:
        came_back(run, index)
    run.tell(RunEnded(exit_code=0, reason="done"))
    page = tmp_path / "report.html"
    page.write_text(report(run.log.after(0)))
    tab = await chromium.tab(width, height, mobile=mobile)
    await tab.open(page.as_uri())
    await tab.until(f"{LANES}.join() === 'rollout/7,rollout/23,rollout/38'")
    assert await bottom(tab, "[data-lane=healthy]") < height
    assert await uncut(tab)
    await tab.close()


async def uncut(tab: Tab) -> bool:
    """Whether no name and no label of a lane is cut, and all of them fit the lane."""
    return not await tab.js(
        "[...document.querySelectorAll('.lane .meta, .lane .name')].filter((one) =>"
        " one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight).map((one) => one.innerText)"
    )


@pytest.mark.parametrize(("width", "height", "mobile"), SIZES)
async def test_few_replicas_have_a_lane_each_and_an_ill_group_is_first(
    chromium: Chromium, width: int, height: int, mobile: bool
) -> None:
    run = many(3)
    kill(run, 1)
    run.tell(moved("rollout", 2, ReplicaEvent.STOP, "ready", "draining", reason="restart requested"))
    async with served(run) as url, opened(chromium, url, width=width, height=height, mobile=mobile) as tab:
        await tab.until(f"{LANES}.length === 12")
        assert (await tab.js(LANES))[:4] == ["rollout/1", "rollout/2", "rollout/0", "judge/0"]
        assert await bottom(tab, "[data-lane='replica rollout/0']") < height
        assert await uncut(tab)
        assert await tab.js("document.querySelector('button.name') === null")


@pytest.mark.parametrize(("width", "height", "mobile"), SIZES)
async def test_the_colour_of_each_phase_that_is_drawn_is_told_beside_the_lanes(
    chromium: Chromium, width: int, height: int, mobile: bool
) -> None:
    run = many(3)
    async with served(run) as url, opened(chromium, url, width=width, height=height, mobile=mobile) as tab:
        await tab.until("document.querySelector('.syncs .p-map')")
        told = await tab.js("[...document.querySelectorAll('.legend li')].map((one) => one.textContent)")
        assert told == ["version", "pack", "map", "transfer", "commit"]
        drawn = await tab.js(
            "[...new Set([...document.querySelectorAll('#main .phase')].map((one) => one.classList[1].slice(2)))]"
        )
        assert set(drawn) <= set(told)
        assert await bottom(tab, ".legend") < min(height, await bottom(tab, "[data-lane='channel policy']"))


async def test_what_was_before_the_first_known_event_is_told_as_not_known(
    chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(3)
    for version in range(2, 12):
        commit(run, version)
    run.tell(MemberJoined("policy", Member("rollout", 0, 1, "n")))
    kill(run, 1)
    monkeypatch.setattr(live, "PAST", 3)
    async with served(run) as url, opened(chromium, url) as tab:
        lanes = "[...document.querySelectorAll('[data-lane]')]"
        await tab.until(f"{lanes}.length === 5 && {lanes}.every((one) => one.querySelector('.gap'))")
        assert "unknown" in await tab.js(f"{lanes}[0].querySelector('.gap title').textContent")
        for index, state, version in ((0, "ready", True), (1, "backoff", False), (2, "ready", True)):
            lane = f"document.querySelector('[data-lane=\"replica rollout/{index}\"]')"
            assert await tab.js(f"{lane}.querySelector('rect.s-{state} title').textContent")
            assert await tab.js(f"{lane}.querySelector('rect.version') !== null") is version
            gap, drawn = await tab.js(
                f"['.gap', '.state'].map((one) => {lane}.querySelector('rect' + one).getBBox())"
                ".map((one) => [one.x, one.x + one.width])"
            )
            assert gap[0] <= 0, "from the left edge on"
            assert drawn[0] >= gap[1] - 1.5, "nothing is drawn there"
    monkeypatch.undo()
    async with served(a_run(1)) as url, opened(chromium, url) as tab:
        await tab.until("document.querySelector('rect.state')")
        assert await tab.js("document.querySelector('.gap') === null")


async def test_marks_that_are_dropped_and_spans_beside_an_old_one_that_lasts_have_a_band(chromium: Chromium) -> None:
    run = a_run(1)
    run.tell(ReplicaLoaded("reference", "rollout", 0, 1, 0.1))
    for version in range(2, 330):
        run.tell(ReplicaLoaded("policy", "rollout", 0, version, 0.1))
        run.tell(LoadFailed("policy", "rollout", 0, version, "no", kept=True))
    lane = "document.querySelector('[data-lane=\"replica rollout/0\"]')"
    bands = f"[...{lane}.querySelectorAll('.older')].map((one) => one.textContent)"
    async with served(run) as url, opened(chromium, url) as tab:
        await tab.until(f"{bands}.some((one) => one.includes('older marks'))")
        assert any(" older versions" in one for one in await tab.js(bands))
        for version in range(330, 560):  # more than the page keeps; what goes on stays
            run.tell(ReplicaLoaded("policy", "rollout", 0, version, 0.1))
        await tab.until("document.querySelector('.lane .serves').innerText.includes('v559')")
        spans = "[...document.querySelectorAll('rect.version title')].map((one) => one.textContent)"
        assert any("of reference" in one for one in await tab.js(spans))


async def test_a_list_says_how_many_it_leaves_out(chromium: Chromium, tmp_path: Path) -> None:
    run = a_run(310, events=tmp_path / "events.jsonl")
    for index in range(7):
        kill(run, index, f"reason {index}")
    for version in range(2, 15):
        commit(run, version)
    for version in range(50):
        run.tell(LoadFailed("policy", "rollout", 8, version, "no", kept=True))
    async with served(run) as url, opened(chromium, f"{url}#replica/rollout/8") as tab:
        await tab.until("document.querySelector('#panel').innerText.includes('43 older not listed')")
        await tab.until("document.querySelector('.more').innerText.includes('7 older syncs not listed')")
        await tab.until("/reason 4.*; and 2 more/.test(document.querySelector('.hold').innerText)")
        await tab.js("location.hash = '#channel/policy'")
        await tab.until("document.querySelector('#panel').innerText.includes('11 more not listed')")


async def test_a_report_begins_with_how_the_run_went(chromium: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run = a_run(3)
    kill(run, 1)
    came_back(run, 1)
    commit(run, 2, outcome="peers_lost")
    for end, said in (
        (None, "Not over after "),
        (RunEnded(exit_code=0, reason="done: trainer finished"), "with exit code 0 (done: trainer finished): "),
    ):
        if end is not None:
            run.tell(end)
        page.write_text(report(run.log.after(0)))
        tab = await chromium.tab()
        await tab.open(page.as_uri())
        await tab.until("document.querySelectorAll('rect.state').length > 3")
        first = await tab.text("#verdict p")
        assert said in first
        assert first.endswith(": 1 version committed, 1 failed; 1 replica killed and back after 2.1 s.")
        await tab.close()


async def test_only_trouble_of_a_report_has_the_incident_and_no_drained_replicas(
    chromium: Chromium, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    run = a_run(3)
    kill(run, 1)
    commit(run, 2, lost=("rollout/1/0",))
    came_back(run, 1)
    run.tell(moved("rollout", 2, ReplicaEvent.SILENT, "ready", "silent", silent_s=0.001))
    run.tell(moved("rollout", 2, ReplicaEvent.READY, "silent", "ready"))
    for index in range(3):
        run.tell(moved("rollout", index, ReplicaEvent.STOP, "ready", "draining", reason="stop requested"))
        run.tell(moved("rollout", index, ReplicaEvent.STOPPED, "draining", "drained", reason="stopped"))
    run.tell(RunEnded(exit_code=0, reason="done"))
    page.write_text(report(run.log.after(0)))
    tab = await chromium.tab()
    await tab.open(page.as_uri())
    await tab.until(f"{LANES}.length === 4")
    await tab.js("document.querySelector('.tick input').click()")
    await tab.until(f"{LANES}.join() === 'rollout/1,rollout/2'")
    assert await tab.js("document.querySelector('[data-lane=\"channel policy\"]') !== null"), "it lost a member"
    await tab.close()


async def test_two_hundred_replicas_and_many_versions_are_readable(chromium: Chromium, tmp_path: Path) -> None:
    run = a_run(rollouts=200, events=tmp_path / "events.jsonl")
    for version in range(2, 20):
        commit(run, version)
    async with served(run) as url, opened(chromium, url) as tab:
        print(f"{tab.nbytes} bytes")
        assert "201 healthy replicas" in await tab.text("button.name")
        await tab.click("button.name")
        await tab.until("document.querySelectorAll('.lane').length > 200")
        drawn = await tab.js("document.querySelectorAll('.track > svg').length")
        assert drawn < 80, "lanes out of sight are not drawn"
        of_one = "document.querySelectorAll('[data-lane=\"replica rollout/0\"] rect.version').length"
        await tab.until(of_one)
        kept = await tab.js("fetch('page/document').then((one) => one.json()).then((one) => one.kept)")
        assert kept < 20, "fewer than the versions to come"
        for version in range(20, 40):
            commit(run, version)
        await tab.until("document.querySelector('.lane .serves').innerText.includes('v39')", 10.0)
        assert 0 < await tab.js(of_one) <= kept, "a page that stays open does not grow"
        kill(run, 173)
        await tab.until("document.querySelector('#verdict').innerText.includes('rollout/173 has ended')", 10.0)
        await tab.click(".tick", text="only trouble")
        await tab.until("document.querySelectorAll('.lane a.name').length === 1")
        await tab.until("document.querySelector('[data-lane=\"replica rollout/173\"] .mark')")
        await tab.click(".tick", text="only trouble")
        await tab.click("input[type=search]")
        await tab.write("rollout/19")
        await tab.until("document.querySelectorAll('.lane a.name').length === 11")


async def test_versions_that_are_kept_no_longer_are_one_band(chromium: Chromium) -> None:
    run = a_run(1)
    for version in range(2, 330):
        commit(run, version)
    async with served(run) as url, opened(chromium, url) as tab:
        for track, text in (("channel policy", "older version"), ("replica rollout/0", "older version")):
            await tab.until(f"document.querySelector('[data-lane=\"{track}\"] .older')")
            title = await tab.js(f"document.querySelector('[data-lane=\"{track}\"] .older title').textContent")
            assert text in title


async def test_ill_replicas_are_first_and_only_trouble_has_past_trouble(chromium: Chromium) -> None:
    run = a_run(6)
    tracks = "document.querySelectorAll('[data-lane^=\"replica rollout/\"]')"
    lanes = f"[...{tracks}].map((one) => one.dataset.lane.slice(-1)).join('')"
    async with served(run) as url, opened(chromium, url) as tab:
        kill(run, 4)
        await tab.until(f"{lanes} === '401235'")
        run.tell(moved("rollout", 4, ReplicaEvent.BACKOFF_ELAPSED, "backoff", "starting", generation=2))
        run.tell(moved("rollout", 4, ReplicaEvent.READY, "starting", "ready", generation=2, start_s=1.0))
        run.tell(moved("rollout", 2, ReplicaEvent.STOPPED, "ready", "drained"))
        await tab.until(f"{lanes} === '012345'")
        await tab.js("document.querySelector('.tick input').click()")
        await tab.until(f"{lanes} === '4'")
