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
from typing import Any, TypeVar

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
from replicas.common.logs import Log

T = TypeVar("T")
logger = Log("replicas.archive")
LOOK_S, WAIT_S = 5.0, 1.0
"""Between looks at labels, scores and leases; and longest wait for a version."""
FIRST_S, LAST_S = 0.5, 30.0
"""Longest pauses after a failure of the storage: the first one, and any."""


class Archiver:
    """A target that archives versions; for one thread.

    :param channel: a target. :param facts: asks the run for labels, scores and leases.
    :param told: set once the caller is told to stop. Then the newest version is still
        written, but a failure of the storage is not waited out.
    """

    def __init__(self, channel: Channel, writer: Writer, facts: Callable[[], Facts], told: Event) -> None:
        """Begin with what the archive has."""
        self._channel, self._writer, self._facts, self._told = channel, writer, facts, told
        self._taken, self._look_at, self._known = 0, 0.0, Facts()

    def run(self) -> None:
        """Archive each version until told to stop.

        :raises replicas.errors.ReplicasError: the session is over, another writer has
            taken the archive over, or it is another run's.
        """
        over = False
        while not over:
            version, over = self._next(), self._told.is_set()
            if version is not None:
                until_stored(partial(self._writer.write, version, self._known), self._told)
                self._channel.progress(version.version)
                logger.info("version %d is archived", version.version)
                over = self._told.is_set() and self._channel.latest <= self._taken
            elif self._taken:
                until_stored(partial(self._writer.describe, self._known), self._told)

    def _next(self) -> Version | None:
        """Return a copy of a newer version; None if there is none within a second."""
        update = None
        with suppress(TimeoutError):
            update = self._channel.receive().wait(WAIT_S)
        if update is not None or time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            with suppress(errors.ReplicasError):  # a run that is busy keeps its facts
                self._known = self._facts()
        if update is not None:
            self._taken = update.version
            with suppress(errors.NotAdopted), update:
                return Version.of(update)
        return None


def until_stored(call: Callable[[], T], told: Event) -> T:
    """Call a function until the storage does not fail; return its result.

    :param told: set: its next failure is raised.
    """
    pauses, failed = wait_random_exponential(FIRST_S, LAST_S), retry_if_exception_type(errors.ArchiveError)
    asked: dict[str, Any] = {"sleep": sleep_using_event(told), "stop": stop_when_event_set(told), "before_sleep": _log}
    return Retrying(retry=failed, wait=pauses, reraise=True, **asked)(call)


def _log(state: RetryCallState) -> None:
    """Log why the archive is behind (tenacity's callback)."""
    error = None if state.outcome is None else state.outcome.exception()
    logger.warning("the archive is behind, try %d: %s", state.attempt_number, error)
