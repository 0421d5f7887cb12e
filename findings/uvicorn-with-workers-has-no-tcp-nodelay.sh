#!/usr/bin/env bash
# uvicorn 0.54.0 on asyncio's loop: connections to a socket of Config.bind_socket(), which it uses with workers or with
# reload, do not have TCP_NODELAY; those of a single process have it. An answer in two writes, such as a streamed one,
# then waits for the client's delayed acknowledgement. Expected: the same options, however many workers.
#
# asyncio sets the option where socket.proto is IPPROTO_TCP: so it is on sockets from getaddrinfo (loop.create_server
# with a host), while socket.socket(family) has proto 0, and accepted connections inherit that.
# Seen (proto, TCP_NODELAY): one process (6, 1); bind_socket() (0, 0).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
import asyncio
import socket

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
    await send({"type": "http.response.body", "body": b""})


async def serve(bound: bool) -> None:
    options = {"host": "127.0.0.1", "port": 0, "http": Watching, "loop": "asyncio", "log_level": "error"}
    config = uvicorn.Config(app, lifespan="off", **options)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[config.bind_socket()] if bound else None))
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    await reader.read()
    writer.close()
    server.should_exit = True
    await serving


for bound in (False, True):
    asyncio.run(serve(bound))
print("(proto, TCP_NODELAY): one process", found[0], "bind_socket()", found[1])
assert found == [(6, 1), (0, 0)], "the option is set otherwise now"
PY
