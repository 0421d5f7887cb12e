"""The exceptions that msgspec raises for malformed input.

Two of them are not msgspec's own: for text that is not UTF-8, and for nesting that is
too deep.
"""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
