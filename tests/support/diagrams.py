"""The state tables of the code as they stand in docs/protocol.md: ``make diagrams``
writes them, a unit test compares."""

from __future__ import annotations

from pathlib import Path

from replicas.core.lives.lifecycle import REPLICA
from replicas.core.membership import diagrams

__all__ = ["PAGE", "with_tables"]

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
BEGIN, END = "<!-- tables -->\n", "\n<!-- end of tables -->"


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    replica = f"A replica:\n\n```mermaid\n{REPLICA.diagram()}\n```"
    return f"{before}{BEGIN}{replica}\n\n{diagrams()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
