"""How the command line finds and asks a running supervisor."""

from __future__ import annotations

import http.client
from pathlib import Path

import msgspec

from replicas.config import Config
from replicas.errors import Disconnected, UsageError
from replicas.status import RunStatus

__all__ = ["ENDPOINT_FILE", "EndpointFile", "fetch_status", "find_endpoint", "read_endpoint"]

ENDPOINT_FILE = "endpoint.json"
"""Name of the file in a run's state folder that says where its supervisor listens."""

_MAX_ANSWER_NBYTES = 64 * 2**20


class EndpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """``endpoint``: ``host:port`` of the control port. ``pid``: the supervisor's."""

    endpoint: str
    pid: int
    run: str


def read_endpoint(state_dir: Path) -> EndpointFile:
    """Where the supervisor of this state folder listens.

    :raises Disconnected: when no supervisor has written it, or the file is damaged.
    """
    path = state_dir / ENDPOINT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=EndpointFile)
    except FileNotFoundError as error:
        raise Disconnected(
            f'run "{state_dir.name}" is not running: {path} does not exist', hint="start it with: replicas run CONFIG"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise Disconnected(f"{path} cannot be read: {error}", hint="give --endpoint HOST:PORT instead") from error


def find_endpoint(config: Config | None, *, folder: Path) -> EndpointFile:
    """The supervisor of ``config``; without one, that of the only run that has its state below ``folder``.

    :raises UsageError: when several runs have their state below ``folder``.
    :raises Disconnected: when there is none.
    """
    if config is not None:
        return read_endpoint(config.run.state_dir)
    found = sorted(folder.glob(f".replicas/*/{ENDPOINT_FILE}"))
    if len(found) > 1:
        runs = ", ".join(path.parent.name for path in found)
        raise UsageError(f"several runs have their state here: {runs}", hint="name the CONFIG of one")
    if not found:
        raise Disconnected(
            f"no run has its state in {folder / '.replicas'}", hint="name its CONFIG, or give --endpoint HOST:PORT"
        )
    return read_endpoint(found[0].parent)


def fetch_status(endpoint: str, *, timeout_s: float = 5.0) -> RunStatus:
    """Ask ``GET /status`` at ``host:port``; proxies of the environment are not used.

    :raises UsageError: when ``endpoint`` is not ``host:port``.
    :raises Disconnected: when nobody answers within ``timeout_s`` for each step, or it is no supervisor of replicas.
    """
    connection = _connection(endpoint, timeout_s)
    try:
        connection.request("GET", "/status", headers={"Accept": "application/json", "Connection": "close"})
        with connection.getresponse() as response:
            body = response.read(_MAX_ANSWER_NBYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Disconnected(
            f"nobody answers at {endpoint}: {error or type(error).__name__}", hint="is the supervisor still running?"
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise Disconnected(
            f"{endpoint} answered GET /status with {response.status}", hint="is it a replicas supervisor?"
        )
    try:
        return msgspec.json.decode(body, type=RunStatus)
    except msgspec.DecodeError as error:
        raise Disconnected(f"{endpoint} sent no status of a run: {error}", hint="is it of the same release?") from error


def _connection(endpoint: str, timeout_s: float) -> http.client.HTTPConnection:
    host, _, port = endpoint.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise UsageError(f'"{endpoint}" is not HOST:PORT', hint='for example "127.0.0.1:9477"')
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
