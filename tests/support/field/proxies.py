"""A proxy between a follower and its server, which does something between two control
calls."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["ControlProxy"]


class ControlProxy(ThreadingHTTPServer):
    """Forwards each request to the server at ``url`` while its ``with`` block is open.

    :ivar before: what to do once, by path, before the request is forwarded.
    :ivar calls: paths and queries of all requests, but those that ask for health.
    """

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(url).netloc
        self.before: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> ControlProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ControlProxy

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        if path not in ("/health", "/is_paused"):
            self.server.calls.append(self.path)
        if (act := self.server.before.pop(path, None)) is not None:
            act()
        connection = http.client.HTTPConnection(self.server.behind, timeout=300)
        try:
            connection.request(self.command, self.path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException):  # the server has died: the follower sees that, too
            self.close_connection = True
            return
        finally:
            connection.close()
        try:
            self.send_response(response.status)
            self.send_header("content-type", response.getheader("content-type", "text/plain"))
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the follower has been killed
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
