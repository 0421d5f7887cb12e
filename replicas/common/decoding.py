"""What msgspec raises for bytes that are not what they should be.

Two kinds are not its own: text that is not UTF-8, and nesting that is too deep.
"""

from __future__ import annotations

import msgspec

__all__ = ["MALFORMED"]

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
