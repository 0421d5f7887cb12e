#!/usr/bin/env bash
# uvicorn 0.54.0 on asyncio's loop: connections to a socket of Config.bind_socket(), which it uses with workers or with
# reload, do not have TCP_NODELAY; those of a single process have it. Expected: the same options, however many workers.
#
# asyncio sets the option where socket.proto is IPPROTO_TCP: so it is on sockets from getaddrinfo (loop.create_server
# with a host), while socket.socket(family) has proto 0, and accepted connections inherit that. A streamed answer on a
# connection that is kept then waits for the client's delayed acknowledgement.
# Seen (proto, TCP_NODELAY), and the median of 20 answers in three chunks over loopback: one process (6, 1), 0.3 ms;
# bind_socket() (0, 0), 44 ms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import asyncio
import socket
import statistics
import time

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

found: list[tuple[int, int]] = []


class Watching(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:
        connection = transport.get_extra_info("socket")
        found.append((connection.proto, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        super().connection_made(transport)


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for body in (b"one", b"two", b"end"):
        await send({"type": "http.response.body", "body": body, "more_body": body != b"end"})
        await asyncio.sleep(0)


async def serve(bound: bool) -> None:
    options = {"host": "127.0.0.1", "port": 0, "http": Watching, "loop": "asyncio", "log_level": "error"}
    config = uvicorn.Config(app, lifespan="off", **options)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[config.bind_socket()] if bound else None))
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    times = []
    for _ in range(20):
        began = time.perf_counter()
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await reader.readuntil(b"end\r\n0\r\n\r\n")
        times.append(time.perf_counter() - began)
    writer.close()
    server.should_exit = True
    await serving
    print(f"{'bind_socket()' if bound else 'one process'}: {found[-1]}, {statistics.median(times) * 1000:.1f} ms")


for bound in (False, True):
    asyncio.run(serve(bound))
assert found == [(6, 1), (0, 0)], "the option is set otherwise now"
PY
