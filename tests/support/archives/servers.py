"""A server of S3 in this process (moto's), for archives."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer

__all__ = ["ENVIRONMENT", "make_bucket", "serving"]

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextmanager
def serving() -> Iterator[tuple[str, str, int]]:
    """An empty server: its URL, host and port."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    ask = urllib.request.Request(f"{url}/moto-api/reset", method="POST")  # servers of one process share their objects
    urllib.request.urlopen(ask).close()
    try:
        yield url, host, port
    finally:
        server.stop()


def make_bucket(server: str, name: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
