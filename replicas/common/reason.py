"""Why something is not so: a sentence for people, or None where nothing is wrong."""

from __future__ import annotations

from typing import TypeAlias

Reason: TypeAlias = str
"""One clause for a log line or an error, without a full stop. Functions that check
something return ``Reason | None``."""
