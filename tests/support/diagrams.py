"""The state tables of the code as they stand in docs/protocol.md: ``make diagrams``
writes them, a unit test compares."""

from __future__ import annotations

from typing import Any

from replicas.common.child import CHILD
from replicas.common.table import Table
from replicas.core.base.membership import DELIVERY, LANE, MEMBER, OPERATION, PUBLISH, PUBLISH_JOB, ROUND, SLOT, TRANSFER
from replicas.core.lives.ending import ASKED, GENERATION
from replicas.core.lives.lifecycle import REPLICA
from replicas.core.lives.node_life import DUTY, NODE
from replicas.core.lives.tenancy import TENANCY
from replicas.supervisor.shim.phases import PHASES
from tests.support.root import ROOT

__all__ = ["PAGE", "TABLES", "with_tables"]

PAGE = ROOT / "docs" / "protocol.md"
BEGIN, END = "<!-- tables -->\n", "\n<!-- end of tables -->"
TABLES: tuple[Table[Any, Any], ...] = (
    REPLICA,
    ASKED,
    GENERATION,
    NODE,
    DUTY,
    TENANCY,
    PHASES,
    CHILD,
    MEMBER,
    PUBLISH,
    PUBLISH_JOB,
    TRANSFER,
    DELIVERY,
    OPERATION,
    LANE,
    ROUND,
    SLOT,
)


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = "\n\n".join(f"{one.what.capitalize()}:\n\n```mermaid\n{_diagram(one)}\n```" for one in TABLES)
    return f"{before}{BEGIN}{drawn}{END}{after}"


def _diagram(table: Table[str, str]) -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {state}" for state in table.start)]
    edges: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in table.rows.items():
        edges.setdefault((before, after), []).append(event)
    for (before, after), events in edges.items():
        lines.append(f"    {before} --> {after}: {', '.join(events).replace('_', ' ')}")
    lines += [f"    {state} --> [*]" for state in table.states if table.final(state)]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
