"""The page in a real browser, over the real server, of a run made of events: what it
shows, says and obeys, and what it never does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replicas.core.base.effects import MemberJoined, ReplicaLoaded, SyncEnded
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.messages.identity import Member
from replicas.page.report import recorded, report
from replicas.status import LeaseStatus, RunStatus, SyncRecord, VersionStatus
from replicas.telemetry.events import RankEnd, ReplicaExited, RunStarted
from tests.support.browser import Chromium, Tab
from tests.support.browser.shown import TOKEN, ShownRun, served
from tests.support.root import ROOT

pytestmark = pytest.mark.anyio

AXE = ROOT / ".venv" / "axe.min.js"
HOSTILE = '<img src=x onerror="document.title=1">\u202e</script><b>'


def moved(group: str, index: int, event: ReplicaEvent, before: str, after: str, **more: Any) -> Transition:
    about = {"group": group, "replica": index, "generation": 1, "reason": "", **more}
    return Transition(event=event, before=before, after=after, **about)  # type: ignore[arg-type]  # fields by name


def a_run(rollouts: int = 3, **about: Any) -> ShownRun:
    """A trainer and its rollouts, all ready, with one version."""
    run = ShownRun(**about)
    run.tell(RunStarted(run="grpo", pid=7, version="0.3"))
    for group, count in (("trainer", 1), ("rollout", rollouts)):
        for index in range(count):
            run.tell(moved(group, index, ReplicaEvent.START, "pending", "starting"))
            run.tell(MemberJoined("policy", Member(group, index, 0, "n")))
            run.tell(moved(group, index, ReplicaEvent.READY, "starting", "ready", start_s=0.1))
    commit(run, 1)
    return run


def commit(run: ShownRun, version: int, **more: Any) -> None:
    about: dict[str, Any] = {
        "outcome": "committed",
        "seconds": 0.4,
        "nbytes": 1 << 20,
        "phases": {"pack": 0.1, "transfer": 0.3},
        "members": 4,
    }
    run.tell(SyncEnded("policy", SyncRecord(version=version, publisher="trainer/0", **(about | more))))
    for replica in run.past.status(time.time()).groups:
        for one in replica.replicas:
            if one.group == "rollout" and one.state == "ready":
                run.tell(ReplicaLoaded("policy", "rollout", one.replica, version, 0.05))


def kill(run: ShownRun, index: int, reason: str = "rank 0 was killed by SIGKILL") -> None:
    ranks = (RankEnd(rank=0, code=-9, text="bye"),)
    run.tell(ReplicaExited(group="rollout", replica=index, generation=1, outcome="failed", reason=reason, ranks=ranks))
    run.tell(moved("rollout", index, ReplicaEvent.RETRY, "ready", "backoff", reason=reason, restart_reason="signal"))


@asynccontextmanager
async def opened(chromium: Chromium, url: str, **about: Any) -> AsyncIterator[Tab]:
    """A tab with the page, live; nothing may have gone wrong in it at the end."""
    tab = await chromium.tab(**about)
    try:
        await tab.open(url)
        await tab.until("document.querySelector('.l-live')")
        yield tab
        assert tab.errors == []
    finally:
        await tab.close()


async def test_first_view_is_small(chromium: Chromium) -> None:
    run = ShownRun()
    run.has_been(one for one in recorded(time.time() + 40) if one.at < time.time())
    async with served(run) as url, opened(chromium, url) as tab:
        await tab.until("document.querySelectorAll('rect.state').length > 10 && document.querySelector('.syncs')")
        assert tab.nbytes < 120_000
        assert {one.partition("/page/")[2].partition("?")[0] for one in tab.requests} == {
            "", "page.css", "page.js", "icon.svg", "document", "changes",
        }  # fmt: skip
        assert all(one.startswith(url) for one in tab.requests), "nothing comes from elsewhere"


async def test_a_kill_and_its_recovery_are_shown_live(chromium: Chromium) -> None:
    run = a_run()
    async with served(run) as url, opened(chromium, url) as tab:
        assert "All is well: 4 replicas ready, policy at version 1." in await tab.text("#verdict")
        kill(run, 1)
        await tab.until("document.querySelector('#verdict').innerText.includes('rollout/1 has ended, and waits')", 2.0)
        await tab.until("document.querySelector('[data-lane=\"replica rollout/1\"] .mark.bad')", 2.0)
        assert (await tab.js("document.title")).startswith("! grpo")
        run.tell(moved("rollout", 1, ReplicaEvent.BACKOFF_ELAPSED, "backoff", "starting", generation=2))
        run.tell(
            moved("rollout", 1, ReplicaEvent.READY, "starting", "ready", generation=2, start_s=1.0, recovery_s=2.0)
        )
        await tab.until("document.querySelector('#verdict').innerText.includes('All is well')", 2.0)
        commit(run, 2, lost=("rollout/1/0",), reasons={"rollout/1/0": "its process has ended"})
        await tab.until("document.querySelector('.syncs').innerText.includes('rollout/1/0')", 2.0)


async def test_a_kill_is_listed_however_many_versions_come_after_it(chromium: Chromium) -> None:
    run = a_run()
    async with served(run) as url, opened(chromium, url) as tab:
        kill(run, 1)
        for version in range(2, 120):
            commit(run, version)
        await tab.until("document.querySelector('#verdict').innerText.includes('rollout/1 has ended')")
        await tab.until("document.querySelector('.events').innerText.includes('was killed by SIGKILL')")


async def test_who_holds_up_a_version_is_named(chromium: Chromium) -> None:
    run = a_run()
    run.tell(
        SyncEnded("policy", SyncRecord(version=2, outcome="committed", seconds=0.2, nbytes=9, publisher="trainer/0"))
    )
    run.tell(ReplicaLoaded("policy", "rollout", 0, 2, 0.1))
    run.tell(ReplicaLoaded("policy", "rollout", 2, 2, 0.1))
    async with served(run) as url, opened(chromium, url) as tab:
        text = (await tab.text("#channels .hold")).replace("\n", " ")
        assert text.startswith("Version 2 is not loaded by rollout/1 (at 1: has not loaded it yet"), text


async def test_links_open_a_sync_an_event_and_a_replica(chromium: Chromium) -> None:
    run = a_run()
    commit(run, 2, pulled={"rollout/0/0": {"trainer/0/0": 1 << 20}}, moved_nbytes=1 << 20, held={"rollout/0": 0.3})
    async with served(run) as url, opened(chromium, f"{url}#group/trainer") as tab:
        await tab.until("document.querySelector('#panel').innerText.includes('group trainer')")  # by its first URL
        for fragment, words in (
            ("#sync/policy/2", ("version 2 of policy", "transfer", "300 ms", "trainer/0 → rollout/0", "after 300 ms")),
            ("#replica/rollout/2", ("rollout/2", "generation 1", "ready after 100 ms")),
            ("#group/rollout", ("group rollout", "rollout/2")),
            ("#event/1", ("event 1", '"RunStarted"')),
            ("#sync/policy/99", ("Not found",)),
        ):
            await tab.js(f"location.hash = {json.dumps(fragment)}")
            for text in words:
                await tab.until(f"document.querySelector('#panel').innerText.includes({json.dumps(text)})")
        await tab.js("location.hash = ''")
        await tab.click(".syncs a", text="2")
        assert await tab.js("location.hash") == "#sync/policy/2"
        await tab.press("Escape")
        await tab.until("document.querySelector('#panel').hidden")


async def test_an_order_says_what_it_does_and_needs_the_token(chromium: Chromium) -> None:
    run = a_run()
    async with served(run) as url, opened(chromium, f"{url}#group/rollout") as tab:
        await tab.click("#panel button", text="scale")
        await tab.js("document.querySelector('dialog input').select()")
        await tab.write("5")
        await tab.until("document.querySelector('.says').innerText.startsWith('rollout goes from 3 to 5: 2 replicas')")
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog input[type=password]')")
        await tab.write("wrong")
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog [role=alert]')?.innerText.includes('token')")
        assert run.orders == []
        tab.errors.clear()  # the browser tells of the status 401
        await tab.click("dialog button", text="Scale")
        await tab.until("document.querySelector('dialog input[type=password]')")
        await tab.write(f"R1{'ab' * 32}.{TOKEN}")  # as `replicas token` prints it
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog .good')")
        assert run.orders == [("scale", {"group": "rollout", "replicas": 5})]
        stored = await tab.js(
            "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}])"
        )
        assert TOKEN not in stored
        assert TOKEN not in await tab.js("document.documentElement.outerHTML")
        assert not any(TOKEN in one for one in tab.requests)
        await tab.open(url)
        await tab.until("document.querySelector('#head button').innerText === 'give token'")  # and is gone


@pytest.mark.parametrize(
    ("fragment", "button", "says", "order"),
    [
        ("replica/rollout/1", "restart", "generation 2", ("restart", {"target": "rollout/1", "rolling": False})),
        ("replica/rollout/1", "drain", "until restarted", ("drain", {"target": "rollout/1", "hurry": False})),
        ("group/rollout", "restart, rolling", "max_unavailable", ("restart", {"target": "rollout", "rolling": True})),
        ("group/rollout", "reset failed", "budgets are full", ("reset_failed", {"target": "rollout"})),
        ("run", "reload config", "config file again", ("reload", {})),
        ("run", "drain the run", "4 replicas end", ("drain", {"target": None, "hurry": False})),
    ],
)
async def test_each_order_is_given_as_it_says(
    chromium: Chromium, fragment: str, button: str, says: str, order: tuple[str, dict[str, Any]]
) -> None:
    run = a_run()
    async with served(run) as url, opened(chromium, f"{url}#{fragment}") as tab:
        await tab.click("#panel button", text=button)
        await tab.until(f"document.querySelector('.says').innerText.includes({json.dumps(says)})")
        await give_order(tab)
        assert run.orders == [order]


async def give_order(tab: Tab) -> None:
    """Confirm the order of the open dialog with the token, and wait for success."""
    await tab.click("dialog button.main")
    await tab.until("document.querySelector('dialog input[type=password]')")
    await tab.write(TOKEN)
    await tab.press("Enter")
    await tab.until("document.querySelector('dialog .good')")


def steered(status: RunStatus) -> RunStatus:
    """With versions that somebody steers."""
    versions = (
        VersionStatus(number=7, labels=("candidate",), held=4, serving=("rollout/0",), scores={"reward": 0.25}),
        VersionStatus(number=6, labels=("current",), content_of=3, held=4, serving=("rollout/1", "rollout/2")),
        VersionStatus(number=5, rejected=f"reward 0.1 is below 0.5 {HOSTILE}", held=4),
        VersionStatus(number=3, held=4, leases=(LeaseStatus(name="evaluation", version=3),)),
        VersionStatus(number=2),
    )
    (policy,) = status.channels
    policy = msgspec.structs.replace(policy, versions=versions, follow="promoted", canary=("rollout/0",))
    return msgspec.structs.replace(status, channels=(policy,))


@pytest.mark.parametrize(
    ("version", "button", "says", "order"),
    [
        ("7", "promote", "load version 7", ("promote", {"channel": "policy", "version": "7"})),
        ("7", "reject", "never served", ("reject", {"channel": "policy", "version": "7", "why": ""})),
        ("3", "rollback", "served again", ("rollback", {"channel": "policy", "to": "3"})),
        ("3", "hold", "10 minutes", ("hold", {"channel": "policy", "version": "3", "seconds": 600.0, "name": ""})),
    ],
)
async def test_versions_are_steered_from_the_panel_of_their_channel(
    chromium: Chromium, version: str, button: str, says: str, order: tuple[str, dict[str, Any]]
) -> None:
    run = a_run(change=steered)
    async with served(run) as url, opened(chromium, f"{url}#channel/policy") as tab:
        rows = "[...document.querySelectorAll('#panel [aria-label=Versions] tbody tr')]"
        text = await tab.js(f"{rows}.map((one) => one.innerText).join('|')")
        for said in (
            "candidate",
            "current",
            "content of 3",
            "reward 0.25",
            "rejected: reward 0.1",
            "gone",
            "evaluation",
        ):
            assert said in text, said
        assert await tab.js(f"{rows}.map((one) => one.querySelectorAll('button').length)") == [3, 1, 1, 2, 0]
        row = f"{rows}.find((one) => one.cells[0].innerText === '{version}')"
        await tab.js(f"[...{row}.querySelectorAll('button')].find((one) => one.innerText === '{button}').click()")
        await tab.until(f"document.querySelector('.says').innerText.includes({json.dumps(says)})")
        await give_order(tab)
        assert run.orders == [order]


async def test_hostile_texts_stay_texts(chromium: Chromium, tmp_path: Path) -> None:
    """In a replica's name, a reason, an event, and lines of a log."""
    log = tmp_path / "rollout" / "0" / "gen-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"\x1b[31m{HOSTILE}\x1b[0m\n\x1b]0;title\x07second\n")

    def renamed(status: RunStatus) -> RunStatus:
        *others, trainers = status.groups
        name = f"g{HOSTILE}"
        (replica,) = trainers.replicas
        replica = msgspec.structs.replace(replica, group=name, name=f"{HOSTILE}/0")
        group = msgspec.structs.replace(trainers, name=name, replicas=(replica,))
        return msgspec.structs.replace(status, groups=(*others, group))

    run = a_run(logs=tmp_path, change=renamed)
    kill(run, 1, HOSTILE)
    async with served(run) as url, opened(chromium, f"{url}#replica/rollout/0") as tab:
        await tab.click("#panel button", text="show log")
        await tab.until("document.querySelector('dialog input[type=password]')")
        await tab.write(TOKEN)
        await tab.press("Enter")
        await tab.until("document.querySelector('pre.log')?.innerText.includes('second')")
        assert (
            await tab.js("document.querySelector('pre.log').textContent")
            == f"{HOSTILE.replace(chr(0x202E), '')}\nsecond\n"
        )
        for text in (HOSTILE, f"{HOSTILE}/0"):
            await tab.until(f"document.body.textContent.includes({json.dumps(text)})")
        assert await tab.js("document.querySelectorAll('img, b:empty').length") == 0
        assert await tab.js("document.title") == "! grpo"
        await tab.click("#panel button", text="stacks now")
        await tab.until("document.querySelector('#panel').innerText.includes('train.py')")


async def test_a_lost_connection_is_said_and_comes_back_to_a_new_supervisor(chromium: Chromium) -> None:
    run = a_run()
    tab = await chromium.tab()
    async with served(run) as url:
        await tab.open(url)
        await tab.until("document.querySelector('.l-live')")
    await tab.until("document.querySelector('.l-lost')")
    assert "The supervisor has not answered" in await tab.text("#verdict")
    assert "rollout/1" in await tab.text("#time"), "what was last known stays"
    another = a_run(rollouts=5)
    kill(another, 4)
    async with served(another, int(url.rstrip("/").rpartition(":")[2])):
        await tab.until("document.querySelector('.l-live')")
        await tab.until("document.querySelector('#verdict').innerText.includes('rollout/4 has ended')")
        commit(another, 2)
        await tab.until("document.querySelector('.syncs a').innerText === '2'", 2.0)
    await tab.close()


async def test_the_keyboard_alone_suffices(chromium: Chromium) -> None:
    run = a_run()
    async with served(run) as url, opened(chromium, url) as tab:
        await tab.js("document.querySelector('.lanes').focus()")
        await tab.press("ArrowDown", "ArrowDown")
        focused = await tab.js("document.activeElement.textContent")
        await tab.press("Enter")
        await tab.until(f"document.querySelector('#paneltitle')?.innerText.includes({json.dumps(focused)})")
        await tab.until("document.activeElement.id === 'paneltitle'")
        await tab.press("Escape")
        await tab.until("document.querySelector('#panel').hidden")
        await tab.until("document.activeElement.classList.contains('name')")  # the focus returns to where it was
        await tab.js("document.querySelector('.lanes').focus()")
        before = await tab.text(".readout")
        await tab.press("-", "ArrowLeft")
        await tab.until(f"document.querySelector('.readout').innerText !== {json.dumps(before)}")
        await tab.press("End")
        for _ in range(3):  # a redraw takes no focus away
            commit(run, run.past.status(0).channels[0].committed_version + 1)
            await asyncio.sleep(0.3)
        assert await tab.js("document.activeElement.className") == "lanes"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (375, True)])
async def test_the_rules_of_accessibility_hold(chromium: Chromium, width: int, dark: bool) -> None:
    assert AXE.exists(), "make test-browser fetches axe-core"
    run = a_run()
    commit(run, 2, lost=("rollout/1/0",))
    kill(run, 1)
    async with (
        served(run) as url,
        opened(chromium, f"{url}#replica/rollout/1", width=width, dark=dark, mobile=width < 500) as tab,
    ):
        await tab.until("document.querySelector('#panel h3')")
        await check(tab)
        await tab.click("#panel button", text="restart")
        await tab.until("document.querySelector('dialog').open")
        await check(tab)
        await tab.press("Escape")
        await tab.js("location.hash = ''")
        await tab.until("document.querySelector('#panel').hidden")
        await check(tab)
        assert await tab.js("document.documentElement.scrollWidth") <= width, "nothing sticks out"


async def check(tab: Tab) -> None:
    await tab.call("Page.setBypassCSP", enabled=True)
    await tab.js(AXE.read_text())
    found = await tab.js("""axe.run(document, {resultTypes: ["violations"]}).then((all) => all.violations.flatMap(
      (rule) => rule.nodes.map((node) => [rule.id, node.html.slice(0, 200), node.failureSummary])))""")
    assert found == []


async def test_a_phone_can_read_it(chromium: Chromium) -> None:
    run = ShownRun()
    run.has_been(one for one in recorded(time.time() + 15) if one.at < time.time())
    async with served(run) as url, opened(chromium, url, width=375, height=800, mobile=True) as tab:
        assert await tab.js("document.documentElement.scrollWidth") == 375
        small = await tab.js(
            "[...document.querySelectorAll('button')].filter((one) => one.offsetHeight && one.offsetHeight < 34).length"
        )
        assert small == 0
        await tab.click(".lane a.name", text="rollout/4")
        await tab.until("document.querySelector('#panel').getBoundingClientRect().width === 375")
        assert await tab.js("document.documentElement.scrollWidth") == 375


async def test_a_report_works_without_a_network(chromium: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    records = recorded(1_790_000_000.0)
    path.write_text(report(records))
    syncs = [record.event.record for record in records if isinstance(record.event, SyncEnded)]
    failed = next(sync for sync in syncs if sync.outcome == "peers_lost")
    tab = await chromium.tab()
    await tab.open(f"{path.as_uri()}#sync/policy/{failed.version}")
    await tab.until("document.querySelectorAll('rect.state').length > 10")
    first = await tab.text("#verdict .sentence")
    assert first.startswith("Over after ")
    for text in (
        "with exit code 0 (done: trainer finished)",
        "versions committed, 1 failed",
        "1 killed",
        "node n3 lost",
    ):
        assert text in first
    assert "peers lost" in await tab.text("#panel")
    assert failed.error
    assert failed.error in await tab.text("#panel")
    assert (
        await tab.js(
            "[...document.querySelectorAll('button')].some((one) => /drain|scale|restart|token/.test(one.innerText))"
        )
        is False
    )
    assert [one for one in tab.requests if not one.startswith("file:")] == []
    assert tab.errors == []
    await tab.close()
