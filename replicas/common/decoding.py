"""The exceptions that msgspec raises for malformed input.

Three of them are not msgspec's own: for text that is not UTF-8, for nesting that is too
deep, and, up to msgspec 0.19, for a map whose key cannot be hashed.
"""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError)
