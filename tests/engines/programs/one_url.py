"""One URL for the servers of a run, whichever of them live: what a router is for."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

__all__ = ["one_url"]

PATIENCE_S = 240.0
ASK_S = 0.1


class _Forwarder(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted: more are dropped, and tried again after seconds

    def __init__(self, urls: Callable[[], list[str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._ask = urls
        self._urls: list[str] = []
        self._asking, self._asked_at = Lock(), -ASK_S
        self.patience_s = PATIENCE_S

    def forward(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """A server's answer; while none has one: asked again and again."""
        deadline = time.monotonic() + self.patience_s
        while True:
            for url in self._urls:
                request = urllib.request.Request(url + path, body, {"content-type": "application/json"}, method=method)
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        return response.status, response.read()
                except urllib.error.HTTPError as error:
                    if error.code != 503:
                        return error.code, error.read()
                except OSError:
                    continue  # this one has just died
            if time.monotonic() > deadline:
                return 504, b"{}"
            time.sleep(ASK_S)
            self._refresh()

    def _refresh(self) -> None:
        """Ask for the URLs, once for all requests that wait."""
        with self._asking:
            if time.monotonic() >= self._asked_at + ASK_S:
                self._urls = self._ask()
                self._asked_at = time.monotonic()


class _Handler(BaseHTTPRequestHandler):
    server: _Forwarder
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        self._forward(self.rfile.read(int(self.headers.get("content-length") or 0)))

    def _forward(self, body: bytes | None) -> None:
        status, content = self.server.forward(self.command, self.path, body)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def one_url(urls: Callable[[], list[str]]) -> Iterator[str]:
    """Forward what comes to the URL to the first of ``urls`` that answers."""
    server = _Forwarder(urls)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.patience_s = 0.0
        server.shutdown()
        thread.join()
        server.server_close()
