"""Check a commit message: ``python -m tests.support.house.commit_message FILE``.

The subject names the place and says in the imperative what the commit does, as in
``coordinator: close idle connections``. Standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["main", "problems"]

COLUMNS = 72
_SUBJECT = re.compile(r"(?P<place>[\w.,/ -]+(?:: [\w.,/ -]+)*): (?P<words>\S.*)")
_NO_VERBS = """
a all an and any as at both by each every for from how if in it its more no nobody nothing of on one some that the
their there they this to two what when where which while who whoever with
"""
_END_IN_S = "access address assess bypass canvas compress cross discuss express focus miss pass press process"
_END_IN_ED_OR_ING = "bring embed exceed feed need proceed seed shed speed wed"
_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def _is_imperative(verb: str) -> bool:
    """Return whether the first word of a subject may be a verb in the imperative."""
    word = verb.lower()
    if word in _NO_VERBS.split() or not word.isalpha():
        return False
    if word.endswith("s"):
        return word in _END_IN_S.split()
    return not word.endswith(("ed", "ing")) or word in _END_IN_ED_OR_ING.split()


def problems(message: str) -> list[str]:
    """Return what is wrong with a commit message, in words; empty if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    found = [f"a line has more than {COLUMNS} columns: {line}" for line in lines if len(line) > COLUMNS]
    if subject.startswith(_GIT):
        return found
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        found.append(f"the subject does not name its place, as in `coordinator: close idle connections`: {subject}")
    elif not _is_imperative(verb := match["words"].split()[0].rstrip(",:")):
        found.append(f"the subject does not begin with a verb in the imperative, but with `{verb}`: {subject}")
    if len(lines) > 1 and lines[1]:
        found.append("the line below the subject is not empty")
    return found


def main(arguments: list[str]) -> int:
    found = problems(Path(arguments[0]).read_text())
    print(*found, sep="\n", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
