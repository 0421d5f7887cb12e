"""Write the reference: ``python -m tests.support.reference``."""

from __future__ import annotations

from tests.support.reference import FOLDER, pages

FOLDER.mkdir(parents=True, exist_ok=True)
current = pages()
for stale in {path.name for path in FOLDER.iterdir()} - set(current):
    (FOLDER / stale).unlink()
for name, text in current.items():
    (FOLDER / name).write_text(text)
