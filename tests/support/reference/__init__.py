"""The reference in ``docs/reference``, made from the code.

``make docs-reference`` writes it; a unit test compares, and looks in the code for
things that no page names. The format of an archive is written by hand, and its own test
runs what is on the page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.reference import api, commands, config, environment, errors, events, exit_codes, metrics
from tests.support.reference.text import page

__all__ = ["FOLDER", "pages"]

FOLDER = Path(__file__).parents[3] / "docs" / "reference"

_BY_HAND = {"archive.md": "The format of an archive"}
_PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "api": ("Public names", api.body),
    "commands": ("Commands", commands.body),
    "config": ("Config keys", config.body),
    "environment": ("Environment variables", environment.body),
    "errors": ("Errors", errors.body),
    "events": ("Events", events.body),
    "exit-codes": ("Exit codes", exit_codes.body),
    "metrics": ("Metrics", metrics.body),
}


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    found = {f"{name}.md": page(title, body()) for name, (title, body) in _PAGES.items()}
    found |= {name: (FOLDER / name).read_text() for name in _BY_HAND}
    titles = {f"{name}.md": title for name, (title, _) in _PAGES.items()} | _BY_HAND
    contents = "\n".join(f"- [{titles[name]}]({name})" for name in sorted(found))
    return {"README.md": page("Reference", contents), **found}
