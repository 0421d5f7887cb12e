"""A server of S3 that is not moto's: SeaweedFS, a process of its own on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.waits import eventually

__all__ = ["seaweed"]

WEED = Path(sys.executable).with_name("weed")
PORTS = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
START_S = 60.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def seaweed(folder: Path) -> Iterator[str]:
    """An empty server with its data in ``folder``: its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    options = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false", "s3": "true"}
    options |= {
        "filer": "true",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.volumeSizeLimitMB": 64,
        "volume.max": 200,
        **ports,
    }
    url, log = f"http://127.0.0.1:{ports['s3.port']}", folder / "weed.log"
    command = [str(WEED), "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]
    with log.open("wb") as output, subprocess.Popen(command, cwd=folder, stdout=output, stderr=output) as process:

        def serves() -> bool:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except (urllib.error.URLError, OSError):
                return False
            return True

        try:
            eventually(serves, "SeaweedFS serves", timeout_s=START_S)
            yield url
        finally:
            process.kill()
