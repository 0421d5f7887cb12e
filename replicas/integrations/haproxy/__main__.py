"""``python -m replicas.integrations.haproxy``: see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from replicas import errors
from replicas.integrations.haproxy.configuration import Options
from replicas.integrations.haproxy.proxy import Haproxy
from replicas.integrations.haproxy.routes import routes_of
from replicas.integrations.router import command_line, keep_in_step, stop_by_signal


def main(arguments: Sequence[str] | None = None) -> int:
    """Start haproxy as a child, and keep it in step with a channel until SIGTERM or
    SIGINT or its end. Then end it, and return 0, or 1 after an error.

    :param arguments: of the command line; default: those of this process.
    """
    options = _parser().parse_args(arguments)
    stop = stop_by_signal()
    try:
        more = Options(
            options.servers, options.session_header.lower(), options.timeout, options.path or Options().paths
        )
        with Haproxy(options.host, options.port, more) as proxy:
            print(f"{proxy.url} leads to the servers of channel {options.channel}", flush=True)
            keep_in_step(
                lambda status: proxy.bring_to(routes_of(status, options.channel)),
                endpoint=options.endpoint,
                stop=stop,
                is_gone=proxy.is_gone,
            )
    except (errors.ReplicasError, OSError) as error:  # OSError: haproxy ended, or hung, as it started
        print(f"replicas: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    default = Options()
    parser = command_line("haproxy")
    parser.add_argument("--servers", type=int, default=default.servers, help="at most so many servers at a time")
    parser.add_argument(
        "--session-header", default=default.session, help="conversations stay with their server by this header"
    )
    parser.add_argument(
        "--timeout", type=float, default=default.timeout_s, help="seconds for which an answer may pause"
    )
    parser.add_argument(
        "--path", action="append", metavar="PREFIX", help="of the paths that are passed on (default: /v1/); repeat it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
