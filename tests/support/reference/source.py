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

__all__ = ["ROOT", "attributes", "calls", "constants", "modules", "strings"]

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
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    makers = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    found: dict[str, str] = {}
    for body in (maker.body for maker in makers):
        for node, after in pairwise(body):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(target, ast.Attribute) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[target.attr] = text.value
    return {name: text for name, text in found.items() if not name.startswith("_")}


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
