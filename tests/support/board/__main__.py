"""Write the board: ``python -m tests.support.board``."""

from __future__ import annotations

from tests.support.board import PAGE, text

PAGE.parent.mkdir(parents=True, exist_ok=True)
PAGE.write_text(text())
