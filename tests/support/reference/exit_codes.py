"""The page of exit codes, from their table."""

from __future__ import annotations

from pathlib import Path

from replicas.control import exit_codes
from tests.support.reference.source import constants
from tests.support.reference.text import markdown

__all__ = ["body", "codes"]


def codes() -> list[tuple[str, int, str]]:
    """Name, number and sentence of each."""
    found = constants(Path(exit_codes.__file__))
    return sorted(((name, int(str(value)), text) for name, value, text in found), key=lambda one: one[1])


def body() -> str:
    intro = markdown(
        """The codes of ``replicas`` and of ``python -m replicas.supervisor``. A rank whose
        program cannot be started ends with the codes of a shell: 126 (it cannot be run) or
        127 (it is not found)."""
    )
    return "\n\n".join([intro, *(f"## {code}: `{name}`\n\n{markdown(text)}" for name, code, text in codes())])
