"""The version that a request demands of a server, and the one that its answer names.

A request may carry ``X-Replicas-Version: 7``, ``>=7`` or a label, such as ``current``;
each answer carries the header with the version that the server serves, or with two
(``7-8``) if a load has begun before the answer did. What cannot be answered as demanded
is refused: 409 with what is served, or 503 while a load decides it. No byte of another
version is sent: an answer that a load interrupts is cut off, without its end. The
demand of a websocket is checked once, as it opens.

A load makes both versions possible from before the engine pauses until after it has
resumed. So a version counts for an answer if it was possible at any time from the
arrival of the request until the byte in question.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Set
from typing import Any, NamedTuple

VERSION_HEADER = "x-replicas-version"
"""Header of a demand, and of the version that answers."""
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_NUMBER = re.compile(r"(>=)?\s*([1-9][0-9]{0,15})\Z")


class CutOff(Exception):
    """A load has begun while an answer was sent that demanded the version before it."""


class Demand(NamedTuple):
    """The versions that may answer: from ``least`` to ``most`` (None: all above)."""

    text: str
    least: int
    most: int | None

    def admits(self, version: int) -> bool:
        """Return True if this version is one of those that may answer.

        Change nothing.
        """
        return self.least <= version and (self.most is None or version <= self.most)


def demand_of(text: str, labels: Mapping[str, int]) -> Demand:
    """Return the demand that a request's header expresses; change nothing.

    :param text: the header's value: a number, ``>=`` and a number, or a label.
    :param labels: the version that each label points to now; a demand by label is for
        that version.
    :raises ValueError: ``text`` is none of these; the error names the labels.
    """
    text = text.strip()
    if found := _NUMBER.match(text):
        number = int(found[2])
        return Demand(text, number, None if found[1] else number)
    if text in labels:
        return Demand(text, labels[text], labels[text])
    known = ", ".join(sorted(labels)[:9])
    raise ValueError(
        f"{VERSION_HEADER} is a number, >= and a number, or a label ({known or 'there is none'}), not {text[:64]!a}"
    )


class Answer:
    """One answer (HTTP response or websocket) of the server, and its possible versions.

    :param possible: returns the versions with which the server may answer now.
    :param demand: None: any version will do.
    :ivar began: its status was sent.
    :ivar cut: it was cut off, as a version that is not demanded could answer.
    """

    def __init__(self, possible: Callable[[], Set[int]], demand: Demand | None) -> None:
        """Call ``possible`` once, to note the versions at the request's arrival.

        Send nothing.

        :param possible: returns the versions with which the server may answer now.
            Called again, by the sender, before each message of the answer.
        :param demand: the versions that the request accepts; None: any.
        """
        self._possible_now, self._demand = possible, demand
        self._possible = set(possible())
        self.began = self.cut = False

    @property
    def text(self) -> str:
        """The header's value: the version of the answer, ``7``, or ``7-8`` if it may be
        of two."""
        return "-".join(str(version) for version in sorted({min(self._possible), max(self._possible)}))

    @property
    def refusal(self) -> tuple[int, str] | None:
        """HTTP status and text to refuse the request with; None if the demand is met.

        Judged by the versions that were possible since the request came: 503 if only
        some of them are demanded (a load decides it), 409 if none is.
        """
        demand = self._demand
        if demand is None or all(map(demand.admits, self._possible)):
            return None
        text = f"this server answers with version {self.text}, and {demand.text} is demanded"
        return (503, f"{text}: it is loading") if any(map(demand.admits, self._possible)) else (409, text)

    def to(self, send: Send) -> Send:
        """Wrap an ASGI ``send`` so that it adds the version header, and stops the
        answer once another version than those demanded may be in it.

        The wrapped function then raises :class:`CutOff`, and sends nothing. The demand
        of a websocket is checked only when it is accepted.
        """

        async def sent(message: MutableMapping[str, Any]) -> None:
            """Send an ASGI ``message``, the first one with the version header.

            :raises CutOff: a version that is not demanded may answer now; nothing was
                sent.
            """
            if self.began and message["type"].startswith("websocket."):
                await send(message)
                return
            self._possible |= self._possible_now()
            if self.refusal is not None:
                self.cut = True
                raise CutOff
            if message["type"] in ("http.response.start", "websocket.accept"):
                headers = [*message.get("headers", ()), (VERSION_HEADER.encode(), self.text.encode())]
                message = {**message, "headers": headers}
                self.began = True
            await send(message)

        return sent
