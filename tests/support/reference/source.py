"""What stands in the source of the package: documented constants, and all its
strings."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import replicas

__all__ = ["ROOT", "attributes", "calls", "constants", "fields", "modules", "strings"]

ROOT = Path(replicas.__file__).parent


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def constants(path: Path) -> Iterator[tuple[str, object, str]]:
    """Name, value and docstring ("" without one) of each literal that a module
    names."""
    body = _parsed(path).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        target = node.targets[0]
        text = after.value if isinstance(after, ast.Expr) else None
        words = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
        if isinstance(target, ast.Name):
            yield target.id, node.value.value, words


def attributes(kind: type) -> dict[str, str]:
    """Docstring of each documented attribute that a class sets in ``__init__``."""
    makers = [node for node in ast.walk(_class(kind)) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    found = [pair for maker in makers for pair in _documented(maker.body)]
    return {target.attr: text for target, text in found if isinstance(target, ast.Attribute) and target.attr[0] != "_"}


def fields(kind: type) -> dict[str, str]:
    """Docstring of each documented field of a class."""
    return {target.id: text for target, text in _documented(_class(kind).body) if isinstance(target, ast.Name)}


def _class(kind: type) -> ast.ClassDef:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(found, ast.ClassDef)
    return found


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.expr | None, str]]:
    for node, after in pairwise(body):
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None), text.value


def strings(path: Path) -> Iterator[str]:
    """Every string literal of a module that is no docstring and no entry of
    ``__all__``."""
    tree = _parsed(path)
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            left_out |= {id(name) for name in ast.walk(node.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    """Every call of ``name`` (or of ``something.name``) in a module."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Call):
            called = node.func
            if (isinstance(called, ast.Name) and called.id == name) or (
                isinstance(called, ast.Attribute) and called.attr == name
            ):
                yield node
