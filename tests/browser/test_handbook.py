"""The handbook in a real browser: its search answers newcomers, code is copied and not
cut, and the first page leads on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode

import pytest

from tests.support.browser import Chromium, Tab
from tests.support.root import ROOT

pytestmark = pytest.mark.anyio

BUILT = ROOT / "docs" / "_build" / "html"
FIRST = 4
QUESTIONS = {
    "smallest example": {"start/quickstart"},
    "how do I install it": {"start/install"},
    "which way is mine": {"start/ways"},
    "how much memory": {"howto/memory"},
    "how big may my model be": {"questions"},
    "how do I debug a hang": {"questions", "howto/stuck"},
    "my sync is stuck": {"howto/stuck"},
    "is it safe on a shared machine": {"questions", "security"},
    "which models are supported": {"questions", "models"},
    "vLLM": {"integrations"},
    "SGLang": {"sglang"},
    "OpenRLHF": {"frameworks"},
    "engines that somebody else starts and scales": {"howto/engines-of-others"},
    "autoscaler": {"howto/engines-of-others"},
    "Supervisor in my own program": {"howto/embed"},
    "asyncio": {"howto/embed"},
    "hot reload without a trainer": {"howto/serve"},
    "evaluate while training": {"howto/evaluate"},
    "staleness": {"howto/staleness"},
    "resume from a checkpoint": {"howto/resume"},
    "LoRA adapter": {"howto/lora"},
    "test without a GPU": {"howto/testing"},
    "wandb": {"howto/wandb"},
    "compare with torchft": {"comparison"},
}
"""What is typed into the search, and the pages that answer."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def handbook() -> Iterator[str]:
    """The URL of its pages, built as ``make docs`` does."""
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-b", "html", "-c", "docs", ".", BUILT], cwd=ROOT, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(BUILT))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def found(tab: Tab, handbook: str, question: str) -> list[str]:
    """The pages that the search shows, best first, each once."""
    await tab.open(f"{handbook}/search.html?{urlencode({'q': question})}")
    await tab.until("/(found|not match)/.test(document.querySelector('#search-results .search-summary')?.textContent)")
    links = await tab.js("[...document.querySelectorAll('#search-results li a')].map((one) => one.pathname)")
    return list(dict.fromkeys(str(link).removeprefix("/docs/").removesuffix(".html") for link in links))


async def test_the_search_answers_newcomers(chromium: Chromium, handbook: str) -> None:
    assert len(QUESTIONS) == 24
    tab = await chromium.tab()
    shown = {question: (await found(tab, handbook, question))[:FIRST] for question in QUESTIONS}
    missed = {question: shown[question] for question, pages in QUESTIONS.items() if not pages & set(shown[question])}
    assert missed == {}


@pytest.mark.parametrize(
    "page", ["ARCHITECTURE", "docs/howto/embed", "docs/howto/fsdp2-to-vllm", "docs/integrations", "docs/reference/api"]
)
async def test_no_line_of_code_is_cut(chromium: Chromium, handbook: str, page: str) -> None:
    tab = await chromium.tab(1280, 800)
    await tab.open(f"{handbook}/{page}.html")
    blocks = await tab.js(
        "[...document.querySelectorAll('article pre')].map((one) => [one.scrollWidth - one.clientWidth, one.innerText])"
    )
    assert blocks
    assert [text for over, text in blocks if over > 0] == []


async def test_a_block_is_copied_without_its_prompts(chromium: Chromium, handbook: str) -> None:
    tab = await chromium.tab(1280, 800)
    await tab.open(f"{handbook}/docs/start/quickstart.html")
    await tab.js("document.addEventListener('copy', (event) => { window.copied = event.target.value; })")
    button = "document.querySelector('.highlight-console button.copybtn')"
    await tab.until(button)
    await tab.js(f"{button}.click()")  # not with the mouse: the theme scrolls slowly
    assert await tab.until("window.copied") == "replicas run run.toml\nreplicas logs"


async def test_the_first_page_says_where_to_begin_before_its_list(chromium: Chromium, handbook: str) -> None:
    tab = await chromium.tab(1280, 800)
    await tab.open(f"{handbook}/docs/README.html")
    ways = await tab.js(
        "[...document.querySelectorAll('article tbody tr')].map((one) => one.querySelectorAll('a').length)"
    )
    assert len(ways) == 4
    assert all(ways)
    bottom = await tab.js("document.querySelector('article table').getBoundingClientRect().bottom")
    assert bottom < 800, "all four are on the first screen"
