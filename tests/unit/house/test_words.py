"""Plain words: rules of prose for the texts that users and newcomers read first.

Those are docstrings' first lines, the texts of log calls and errors, and the pages of
the handbook. Each rule has a remedy, and each exception a reason.

Covers: nothing of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.root import ROOT


class Rule(NamedTuple):
    """What must not be written, and what to write."""

    pattern: re.Pattern[str]
    remedy: str


RULES = {
    "vague subject": Rule(
        re.compile(
            r"(?:^|[.;:] |, (?:and|but) )(?:who|whoever|what|nobody|one (?:that|which|is|was|has|had|can|may|must|does))\b"
            r"(?![^.]*\?)",
            re.IGNORECASE,
        ),
        "name the thing that acts: a process, a member, a caller",
    ),
    "value and colon": Rule(
        re.compile(r"(?:^|[.;,] )(?:True|False|None): "), 'write "Return False if ..."; a colon is for tables'
    ),
    "negated noun": Rule(
        re.compile(
            r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|later|earlier|older|newer)\b", re.IGNORECASE
        ),
        "negate the verb: is not a valid name",
    ),
    "phrase": Rule(
        re.compile(r"\bany more\b|\bso long(?! as\b)|\bby itself\b|\banew\b|\bsome \d", re.IGNORECASE),
        "no longer; until then; alone or on its own; again or new; about N",
    ),
}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
EXCEPTIONS: dict[str, str] = {}
"""Texts that break a rule for a reason: a part of the text, and the reason."""


def _first_lines(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, " ".join(text.split("\n\n")[0].split())


def _literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of log calls and errors: arguments of classes, ``text = ...``."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in LOGGING or name[:1].isupper():
                found = [*node.args, *(one.value for one in node.keywords)]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = [node.value] if node.targets[0].id in ("text", "hint", "why", "reason") else []
        for one in found:
            if isinstance(one, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp):
                for text in _texts(one):
                    yield one.lineno, text


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and " " in node.value:
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _texts(child)


def _paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Sentences of a page, without code, headings and tables' first rows."""
    text = re.sub(
        r"^( *)```.*?^\1```", lambda match: "\n" * match.group().count("\n"), path.read_text(), flags=re.S | re.M
    )
    line = 1
    for block in text.split("\n\n"):
        words = " ".join(re.sub(r"`[^`]*`", "`x`", block).split())
        if not words.startswith(("#", "|", "<", "```{")):
            yield line, words
        line += block.count("\n") + 2


SENTENCE = re.compile(r"(?:^|\. )(?:Who|Whoever|What|Nobody|One (?:that|which|is|was|has|can|may|must))\b(?![^.]*[?:])")
"""In pages, noun clauses are fine within a sentence."""


def _found(texts: Iterator[tuple[int, str]], path: Path) -> list[str]:
    found: list[str] = []
    for line, text in texts:
        if any(part in text for part in EXCEPTIONS):
            continue
        for name, rule in RULES.items():
            pattern = SENTENCE if name == "vague subject" and path.suffix == ".md" else rule.pattern
            if (match := pattern.search(text)) is not None:
                shown = text[max(0, match.start() - 40) : match.end() + 50]
                found.append(f"{path.relative_to(ROOT)}:{line}: {name}: ...{shown}... ({rule.remedy})")
    return found


MODULES = [*(ROOT / "replicas").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
FOLDERS = ("docs", "docs/howto", "docs/start", "docs/alerts")
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += [page for folder in FOLDERS for page in (ROOT / folder).glob("*.md")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("What is asked of the coordinator.", "vague subject"),
        ("Stop: nobody waits for it", "vague subject"),
        ("Save the state; False: the disk is full.", "value and colon"),
        ("'x y' is no channel", "negated noun"),
        ("the slot is not needed any more", "phrase"),
        ("it takes some 64 MiB", "phrase"),
    ],
)
def test_a_rule_finds_what_it_is_for(text: str, name: str) -> None:
    assert [rule for rule, (pattern, _) in RULES.items() if pattern.search(text)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "What does a fault cost?",
        "Return False if the disk is full.",
        "there is no such channel",
        "it is no longer needed, as long as the lease runs",
        "one of the holders",
    ],
)
def test_a_rule_leaves_plain_text_alone(text: str) -> None:
    assert [rule for rule, (pattern, _) in RULES.items() if pattern.search(text)] == []


@pytest.mark.slow
def test_first_lines_of_docstrings_are_plain() -> None:
    found = [one for path in MODULES for one in _found(_first_lines(ast.parse(path.read_text())), path)]
    assert found == []


@pytest.mark.slow
def test_texts_of_logs_and_errors_are_plain() -> None:
    found = [one for path in MODULES for one in _found(_literals(ast.parse(path.read_text())), path)]
    assert found == []


def test_pages_are_plain() -> None:
    assert [one for path in PAGES for one in _found(_paragraphs(path), path)] == []
