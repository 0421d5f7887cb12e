"""Chromium without a window, as far as tests of the page need it: tabs, keys, the
mouse, screenshots, and what went wrong.

It is spoken to by its DevTools protocol over a WebSocket, for which the package has a
client anyway; a driver (Selenium, Playwright) would bring a dozen more requirements.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

START_S = 60.0
CALL_S = 30.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en-GB",
)
_KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "End": 35,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def find_chromium() -> str | None:
    """The path of a Chromium; None: there is none."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Chromium:
    """One browser process, with its folder; leave the block to end it.

    :ivar pid: of its main process.
    """

    def __init__(self, connection: ClientConnection, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._next = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    @classmethod
    @asynccontextmanager
    async def start(cls) -> AsyncIterator[Chromium]:
        path = find_chromium()
        assert path is not None, "there is no Chromium"
        with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
            root = ("--no-sandbox",) if os.geteuid() == 0 else ()
            process = await asyncio.create_subprocess_exec(
                path,
                *_FLAGS,
                *root,
                f"--user-data-dir={folder}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "HOME": folder, "TZ": "UTC"},
            )
            try:
                async with asyncio.timeout(START_S):
                    url = await _address(process)
                drain = asyncio.create_task(_drain(process))
                async with connect(url, max_size=None, ping_interval=None, proxy=None) as connection:
                    browser = cls(connection, process.pid)
                    reading = asyncio.create_task(browser._read())
                    try:
                        yield browser
                    finally:
                        with contextlib.suppress(Exception):
                            await browser.call("Browser.close")
                        for task in (reading, drain):
                            task.cancel()
            finally:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._next += 1
        number = self._next
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._connection.send(json.dumps(message))
        async with asyncio.timeout(CALL_S):
            return await answer

    async def _read(self) -> None:
        async for text in self._connection:
            message = json.loads(text)
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    answer.set_result(message["result"])
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.note(message["method"], message["params"])

    async def tab(self, width: int = 1280, height: int = 800, *, mobile: bool = False, dark: bool = False) -> Tab:
        """A new tab with a window of that size."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        await tab.resize(width, height, mobile=mobile)
        await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await tab.call("Emulation.setEmulatedMedia", features=features)
        return tab


class Tab:
    """One page.

    :ivar errors: what its console and its network complained of. :ivar nbytes: bytes
        that came over the network, heads included.
    """

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self._loaded = asyncio.Event()
        self.errors: list[str] = []
        self.nbytes = 0
        self.requests: list[str] = []
        self.on_dialog: Callable[[str], None] = self.errors.append

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    def note(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Page.javascriptDialogOpening":
                self.on_dialog(f"a dialog: {about['message']}")
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Network.loadingFinished":
                self.nbytes += int(about["encodedDataLength"])

    async def resize(self, width: int, height: int, *, mobile: bool = False, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(CALL_S):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """The value of an expression, which may be a promise, as JSON."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "it failed"))
        return found["result"].get("value")

    async def until(self, expression: str, within_s: float = 10.0) -> Any:
        """Wait until an expression is true, at each frame; returns its value. One that
        throws, as what it reads is not there yet, is not true."""
        code = f"""new Promise((resolve, reject) => {{
          const until = performance.now() + {within_s * 1000};
          (function look() {{
            let found = null, thrown = "";
            try {{ found = (() => {expression})(); }} catch (error) {{ thrown = " (" + error + ")"; }}
            if (found) resolve(found);
            else if (performance.now() > until)
              reject(new Error("not within {within_s} s: " + {json.dumps(expression)} + thrown));
            else setTimeout(look, 15);
          }})();
        }})"""
        return await self.js(code)

    async def text(self, selector: str = "body") -> str:
        return str(await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str, *, text: str = "") -> None:
        """Click in the middle of the first element that fits, with the mouse."""
        all_of_it, fits = f"[...document.querySelectorAll({json.dumps(selector)})]", f"includes({json.dumps(text)})"
        find = f"{all_of_it}.find((one) => one.textContent.{fits})"
        box = await self.until(
            f"(() => {{ const one = {find}; if (!one) return null; one.scrollIntoView({{block: 'center'}});"
            " const b = one.getBoundingClientRect(); return b.width ? [b.x + b.width / 2, b.y + b.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def press(self, *keys: str) -> None:
        """Press keys by name, one after another; a character is itself."""
        for key in keys:
            about: dict[str, Any] = {"key": key}
            if key in _KEYS:
                about |= {"code": key, "windowsVirtualKeyCode": _KEYS[key]}
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
            await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path, *, whole: bool = False) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", targetId=self._target)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found[1].decode()
    raise RuntimeError(f"Chromium ended with code {await process.wait()}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(1 << 16):
        pass
