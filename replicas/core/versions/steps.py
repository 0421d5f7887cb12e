"""Steps of the training, as publishers give them in ``meta["step"]``.

They grow with the versions. A trainer that restarts without its checkpoint continues
with the next version and an early step: its untrained weights are committed and loaded
like any others. The coordinator cannot refuse them, as they may be intended, but it
reports them once. A trainer that has loaded its checkpoint says so with
``meta["resumed"] = True``.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicas.core.base.effects import StepFell


def number_in(meta: Mapping[str, object] | None, key: str) -> int | float | None:
    """Return the number under ``key`` in a publisher's ``meta``; None if there is
    none."""
    found = (meta or {}).get(key)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None  # True is an int


class Steps:
    """Watches the training steps of one channel's versions, to report a fall once.

    :ivar reached: the highest step so far, since a resume, or since steps last passed
        it.
    :ivar fell: the event of a fall that the steps have not made up for; else None.
    """

    def __init__(self, channel: str) -> None:
        """Start without a step; the channel's name is for the event."""
        self._channel = channel
        self.reached: int | float | None = None
        self.fell: StepFell | None = None

    def committed(self, version: int, meta: Mapping[str, object] | None) -> StepFell | None:
        """Store the step of a committed version.

        Return an event, for the caller to emit, if it is lower than an earlier one, the
        first time; else None.

        :param meta: what the publisher said of the version, with ``step`` in it.
        """
        step = number_in(meta, "step")
        if step is None:
            return None
        if self.reached is None or step >= self.reached or (meta or {}).get("resumed") is True:
            self.reached, self.fell = step, None
            return None
        if self.fell is not None:
            return None
        self.fell = StepFell(self._channel, version, step, self.reached)
        return self.fell
