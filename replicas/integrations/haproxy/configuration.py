"""The text of HAProxy's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from replicas.engine.demands import VERSION_HEADER

BACKENDS = 8
"""Number of versions that can be told apart at a time."""
TABLES = ("labels", "versions", "state")
"""``state`` has the versions that :class:`Routes` names, and ``served``, a text."""


class Options(NamedTuple):
    """Options of HAProxy.

    :ivar servers: number of servers that there may be at a time.
    :ivar session: header of the conversations that stay with their server.
    :ivar timeout_s: for which an answer may pause, and a client.
    :ivar paths: prefixes of the paths that are passed on; others are answered with 404.
    """

    servers: int = 64
    session: str = "x-session-id"
    timeout_s: float = 600.0
    paths: Sequence[str] = ("/v1/",)


def text_of(options: Options, tables: Mapping[str, str], listener: int, connections: int) -> str:
    """Return the text of a configuration: listener, rules by version, and backends.

    :param tables: path of each of ``TABLES`` (HAProxy's maps, in files in memory).
    :param listener: descriptor of the bound socket, which haproxy inherits.
    :param connections: descriptor of the socket over which haproxy is sent connected
        sockets, for commands to its runtime API.
    """
    labels, versions, state = (tables[table] for table in TABLES)
    milliseconds = round(1000 * options.timeout_s)
    session = f"req.fhdr({options.session}) table sessions"
    stick = f"stick match {session}\n    stick store-request {session} unless {{ var(txn.demand) -m found }}"
    servers = f"server-template s 1-{options.servers} 127.0.0.1:1 disabled"
    backends = "\n".join(
        f"backend {name}\n    {stick}\n    {servers}"
        for name in ("any", *(f"version_{number}" for number in range(BACKENDS)))
    )
    return f"""\
global
    stats socket sockpair@{connections} level admin
    stats timeout 24d
    tune.bufsize 65536
defaults
    mode http
    balance roundrobin
    timeout connect 2s
    timeout queue 10s
    timeout client {milliseconds}
    timeout server {milliseconds}
    option http-buffer-request
    option abortonclose
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response 503
    http-error status 502 content-type application/json string '{_error(502, "the server ended before it answered")}'
    http-error status 504 content-type application/json string '{_error(504, "the server did not answer in time")}'
    http-error status 503 content-type application/json string '{_error(503, "no server is ready")}' hdr retry-after 1
frontend requests
    bind fd@{listener}
    acl is_ready nbsrv(any) gt 0
    http-request return status 200 content-type text/plain string ready if {{ path /readyz }} is_ready
    http-request return status 503 content-type text/plain string "no server is ready" if {{ path /readyz }}
    http-request return status 404 content-type application/json string '{
        _error(404, "this path is not passed on; name its prefix with --path")
    }' unless {{ path_beg {" ".join(options.paths)} }}
    http-request return status 503 content-type application/json string '{
        _error(503, "no server is ready")
    }' hdr retry-after 1 unless is_ready
    http-request set-var(txn.demand) req.fhdr({VERSION_HEADER})
    acl demands var(txn.demand) -m found
    acl is_least var(txn.demand) -m reg ^>=\\s*[1-9][0-9]{{0,15}}$
    acl is_number var(txn.demand) -m reg ^[1-9][0-9]{{0,15}}$
    acl has_version var(txn.version) -m found
    http-request set-var(txn.least) var(txn.demand),regsub(^>=\\s*,) if is_least
    http-request set-var(txn.oldest) str(oldest),map_str({state})
    http-request set-var(txn.current) str(current),map_str({state})
    http-request set-var(txn.settled) str(settled),map_str({state})
    http-request set-var(txn.newest) str(newest),map_str({state})
    http-request set-var(txn.backend) str(any) if is_least {{ var(txn.least),sub(txn.oldest) le 0 }}
    acl is_served var(txn.backend) -m found
    acl settled_is_enough var(txn.least),sub(txn.settled) le 0
    acl newest_is_enough var(txn.least),sub(txn.newest) le 0
    http-request set-var(txn.version) var(txn.settled) if is_least !is_served settled_is_enough
    http-request set-var(txn.version) var(txn.newest) if is_least !is_served !has_version newest_is_enough
    http-request set-var(txn.version) var(txn.demand),map_str({labels}) unless is_least
    http-request set-var(txn.version) var(txn.demand) if is_number
    http-request set-var(txn.backend) var(txn.version),map_str({versions}) if has_version
    http-request return status 503 content-type application/json string '{
        _error(503, "no server has loaded the current version yet")
    }' hdr retry-after 1 if has_version !is_served {{ var(txn.version),sub(txn.current) eq 0 }}
    http-request return status 409 content-type application/json lf-string '{
        _error(409, f"no server has version %[var(txn.demand),json(utf8s)]; served: %[str(served),map_str({state})]")
    }' if has_version !is_served
    http-request return status 409 content-type application/json lf-string '{
        _error(409, f"no server has version %[var(txn.demand),json(utf8s)]; served: %[str(served),map_str({state})]")
    }' if is_least !has_version !is_served
    use_backend %[var(txn.backend)] if is_served
    default_backend any
    http-response return status 409 content-type application/json string '{
        _error(409, "the server does not tell its version")
    }' if demands {{ status lt 400 }} !{{ res.hdr({VERSION_HEADER}) -m found }}
backend sessions
    stick-table type string len 128 size 100k expire 1h
{backends}
"""


def _error(code: int, text: str) -> str:
    """Return the JSON of an error with this HTTP status and text."""
    return f'{{"error": {{"message": "replicas: {text}", "code": {code}}}}}'
