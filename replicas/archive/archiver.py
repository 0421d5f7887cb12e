"""Archive the versions of a channel, as a target of it.

A version is copied out of its slot at memory speed, and counts as loaded then: however
slow the storage, no publish waits for it. One version is written at a time, until the
storage takes it; of those that are committed meanwhile only the newest is written.
The version that was written last is the *step* of the replica, so that the run shows
how far the archive is behind. Labels, scores and leases are looked at every 5 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_random_exponential,
)

from replicas import errors
from replicas.archive.writer import Facts, Version, Writer
from replicas.channel.channel import Channel
from replicas.channel.versions.update import Update
from replicas.common.logs import Log

T = TypeVar("T")
logger = Log("replicas.archive")
LOOK_S, WAIT_S = 5.0, 1.0
"""Between looks at labels, scores and leases; and longest wait for a version."""
FIRST_S, LAST_S = 0.5, 30.0
"""Longest pauses after a failure of the storage: the first one, and any."""


def archive_versions(channel: Channel, writer: Writer, ask: Callable[[], Facts], told: Event, owner: str) -> None:
    """Archive each version of a channel until told to stop; blocks.

    If a writer of another owner takes the archive over, wait until told to stop, or the
    session is over: a supervisor that started this one again would take it back, and
    so on.

    :param channel: a target. :param ask: asks the run for labels, scores and leases.
    :param told: set once the caller is told to stop. Then the newest version is still
        written, but a failure of the storage is not waited out.
    :param owner: as the writer's.
    :raises replicas.errors.ReplicasError: the session is over, the archive is another
        run's, or an earlier life of this writer has written to it.
    """
    taken, look_at, facts, over = 0, 0.0, ask(), False
    while not over:
        update: Update | None = None
        with suppress(TimeoutError):
            update = channel.receive().wait(WAIT_S)
        if update is not None or time.monotonic() > look_at:
            look_at = time.monotonic() + LOOK_S
            with suppress(errors.ReplicasError):  # a run that is busy keeps its facts
                facts = ask()
        version, over = _copy(update), told.is_set()
        taken = taken if update is None else update.version
        try:
            if version is not None:
                link = until_stored(partial(writer.write, version, facts), told)
                channel.progress(version.version)
                print(f"version {version.version} is archived as version {link.version}", flush=True)
                over = told.is_set() and channel.latest <= taken
            elif taken:
                until_stored(partial(writer.describe, facts), told)
        except errors.Fenced as error:
            if owner in error.message:
                raise
            logger.error("this writer stops, until it is restarted: %s", error)
            while not (over := told.wait(LOOK_S)):
                channel.progress(writer.newest)  # ends this, too, once the session is over


def _copy(update: Update | None) -> Version | None:
    """Return a copy of the version; None without one, or if no target may load it."""
    with suppress(errors.NotAdopted):
        if update is not None:
            with update:
                return Version.of(update)
    return None


def until_stored(call: Callable[[], T], told: Event) -> T:
    """Call a function until the storage does not fail; return its result.

    :param told: set: its next failure is raised.
    """
    pauses, failed = wait_random_exponential(FIRST_S, LAST_S), retry_if_exception_type(errors.ArchiveError)
    again = Retrying(retry=failed, wait=pauses, sleep=sleep_using_event(told), before_sleep=_log, reraise=True)
    return again.copy(stop=stop_when_event_set(told))(call)


def _log(state: RetryCallState) -> None:
    """Log why the storage is asked again (tenacity's callback)."""
    error = None if state.outcome is None else state.outcome.exception()
    logger.warning("the storage fails, try %d: %s", state.attempt_number, getattr(error, "message", error))
