"""The page of a real supervisor and its processes: a kill is seen, an order obeyed."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.support.browser import Chromium
from tests.support.processes import kill
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

pytestmark = pytest.mark.anyio


def _kill(run: Run) -> None:
    victim = next(one for one in run.status().groups[0].replicas if one.name == "work/1")
    assert victim.pid is not None
    kill(victim.pid)


async def test_a_kill_is_shown_within_two_seconds_and_a_scale_is_obeyed(chromium: Chromium, tmp_path: Path) -> None:
    text = group("work", SLEEPS, 'replicas = 2\nrestart = { initial_delay = "3s" }')
    with running(tmp_path, text) as run:
        await asyncio.to_thread(
            eventually, lambda: run.endpoint() and run.status().ready, "2 ready replicas", timeout_s=60
        )
        tab = await chromium.tab()
        await tab.open(f"http://{run.endpoint()}/")
        for _ in range(3):  # each leaves the stream of the page before
            await tab.open(f"http://{run.endpoint()}/")
            await tab.until("document.querySelector('#verdict').innerText.includes('All is well')")
        began = time.monotonic()
        await asyncio.to_thread(_kill, run)
        await tab.until("document.querySelector('#verdict').innerText.includes('work/1 has ended')", 2.0)
        await tab.until("document.querySelector('[data-lane=\"replica work/1\"] .mark.bad')", 2.0)
        print(f"shown after {time.monotonic() - began:.2f} s")
        await tab.until("document.querySelector('#verdict').innerText.includes('All is well')", 20.0)

        await tab.js("location.hash = '#group/work'")
        await tab.click("#panel button", text="scale")
        await tab.js("document.querySelector('dialog input').select()")
        await tab.write("3")
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog input[type=password]')")
        await tab.write((run.state_dir / "operator-token").read_text().strip())
        await tab.press("Enter")
        await tab.until("document.querySelector('dialog .good')")
        await tab.until("document.querySelector('#time').innerText.includes('work/2')", 20.0)
        assert [one.name for one in run.status().groups[0].replicas] == ["work/0", "work/1", "work/2"]
        assert tab.errors == []
        refused = {reason: number for reason, number in run.status().refused.items() if number}
        assert refused == {}, "who looks is not refused"
        run.signal(signal.SIGTERM)  # an open page delays no end, and tells of it
        assert await asyncio.to_thread(lambda: run.wait(timeout_s=60)) == 0
        await tab.until("document.querySelector('#verdict').innerText.includes('The run is over, with exit code 0')")
        await tab.until("document.querySelector('.l-lost')")
        await tab.close()
        await asyncio.to_thread(run.assert_nothing_left)
