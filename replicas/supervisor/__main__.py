"""``python -m replicas.supervisor CONFIG``: supervise one run until it is over."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import anyio

from replicas import errors
from replicas.config import Config
from replicas.supervisor.state import AlreadySupervised
from replicas.supervisor.supervisor import Supervisor

__all__ = ["supervise"]

CANNOT_START = 2
ALREADY_SUPERVISED = 3


def supervise(config: Config) -> int:
    """Run ``config`` to its end in this process, with lines for people on stderr.

    SIGTERM, SIGINT and SIGHUP drain; a second one kills at once.

    :return: 0 done or drained, 1 a group failed past its budget, 2 the machine does not let it start (such as a port that
        is in use), 3 this run is already supervised.
    :raises replicas.errors.UsageError: it cannot be started so.
    """
    try:
        return anyio.run(_supervise, config)
    except AlreadySupervised as error:
        say(str(error))
        return ALREADY_SUPERVISED
    except errors.WorldError as error:
        say(str(error))
        return CANNOT_START


async def _supervise(config: Config) -> int:
    supervisor = Supervisor(config, report=say)
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    def drain(name: str) -> None:
        hurry = bool(drains)
        say(f"{name}: {'killing what is left' if hurry else 'draining; once more to kill at once'}")
        drains.append(loop.create_task(supervisor.drain(hurry=hurry)))

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for signum in signals:
        loop.add_signal_handler(signum, drain, signum.name)
    try:
        async with supervisor:
            say(f"run {config.run.name}: control at http://{supervisor.endpoint}, state in {config.run.state_dir}")
            code = await supervisor.run_until_done()
            await asyncio.gather(*drains)
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
    say(f"run {config.run.name}: over, exit code {code}")
    return code


def say(text: str) -> None:
    """One line on stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} replicas: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from replicas.control.cli import supervisor_main

    sys.exit(supervisor_main())
