"""State diagrams of Mermaid as tables.

A code host draws ``mermaid`` blocks; here no program of Mermaid's is loaded, so a state
diagram becomes a table with a row for each state: what it goes to, and by what. Another
kind of diagram is an error: draw it as SVG.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

_ARROW = re.compile(r"^\s*(\S+) --> (\S+?)(?:: (.+))?$", re.MULTILINE)
_END = "[*]"


def rows(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each state with the states that follow it and what leads there."""
    if not text.startswith("stateDiagram-v2"):
        raise ExtensionError(f"only state diagrams can be shown: {text[:40]!r}")
    found: dict[str, list[tuple[str, str]]] = {}
    for start, to, why in _ARROW.findall(text):
        found.setdefault(_named(start, "(begin)"), []).append((_named(to, "(end)"), why))
    return list(found.items())


def _named(state: str, at_an_end: str) -> str:
    return at_an_end if state == _END else state.replace("_", " ")


class StateTables(SphinxTransform):
    default_priority = 500

    def apply(self, **_: Any) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                block.replace_self(_table(rows(block.astext())))


def _table(found: list[tuple[str, list[tuple[str, str]]]]) -> nodes.table:
    body = nodes.tbody()
    for state, ways in found:
        for number, (to, why) in enumerate(ways):
            body += _row([state if not number else "", to, why])
    group = nodes.tgroup(cols=3)
    group += [nodes.colspec(colwidth=width) for width in (20, 20, 60)]
    group += [nodes.thead("", _row(["state", "goes to", "by"])), body]
    return nodes.table("", group, classes=["states"])


def _row(texts: list[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", text)) for text in texts))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(StateTables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
