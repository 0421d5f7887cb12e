"""A frozen replica on the page: one sentence, its state, and the age of its silence."""

from __future__ import annotations

import pytest

from replicas.core.lives.lifecycle import ReplicaEvent
from tests.browser.test_page import a_run, moved, opened
from tests.support.browser import Chromium
from tests.support.browser.shown import served

pytestmark = pytest.mark.anyio

LANE = "document.querySelector('[data-lane=\"replica rollout/1\"]')"


async def test_a_silent_replica_is_told_with_the_age_of_its_silence(chromium: Chromium) -> None:
    run = a_run()
    why = "no heartbeat from rank 0 (limit: 30 s)"
    async with served(run) as url, opened(chromium, url) as tab:
        run.tell(moved("rollout", 1, ReplicaEvent.SILENT, "ready", "silent", reason=why, silent_s=64.0))
        await tab.until(f"{LANE}.querySelector('rect.s-silent')", 2.0)
        assert (await tab.text("#verdict")).startswith(f"rollout/1 is silent: {why}")
        assert "silent 1m" in await tab.js(f"{LANE}.parentElement.querySelector('.meta').innerText")
        assert f"silent: {why}" in await tab.text(".events")
        run.tell(moved("rollout", 1, ReplicaEvent.READY, "silent", "ready", reason="heard after 66.0 s"))
        await tab.until("document.querySelector('#verdict').innerText.includes('All is well')", 2.0)
        assert await tab.js(f"{LANE}.querySelectorAll('rect.s-silent').length") == 1, "it stays in the lane"
