"""The rules of the house: who may import what, and what the package shows to the outside."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import replicas

ROOT = Path(replicas.__file__).parent

TORCH_ROOMS = ("sidecar", "weights", "channel")
TORCH_FILES = ("coordinator/store_process.py", "supervisor/launcher.py")

# Each room may import these rooms (and itself); what is not a room is shared: errors, config, status, environ.
WAYS = {
    "messages": set(),
    "core": {"messages"},
    "memory": {"messages", "core"},
    "weights": {"messages", "core", "memory"},
    "sidecar": {"messages", "core", "memory", "weights"},
    "channel": {"messages", "core", "memory", "weights", "sidecar"},
    "coordinator": {"messages", "core", "memory"},
    "supervisor": {"messages", "core", "coordinator", "control"},
    "control": {"messages", "core", "coordinator", "supervisor"},
}


@pytest.fixture(scope="module", autouse=True)
def _without_collections() -> Iterator[None]:
    """Trees of a whole package are much to look through for garbage, here and in all tests that follow."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements, of functions and classes too; expressions, which are many, hold no import."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield from statements(inner)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of everything that the file imports, wherever in it."""
    names: set[str] = set()
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def test_imports_go_one_way() -> None:
    for path in modules():
        here = room(path)
        if not here:
            continue
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("replicas.")}
        foreign = {other for other in rooms if other in WAYS and other != here}
        assert foreign <= WAYS[here], f"{path}: {here} may not import {sorted(foreign - WAYS[here])}"


def test_only_some_import_torch_and_prometheus_and_nobody_pickle() -> None:
    for path in modules():
        name = str(path.relative_to(ROOT))
        heads = {imported.split(".")[0] for imported in imports(path)}
        if "torch" in heads:
            assert room(path) in TORCH_ROOMS or name in TORCH_FILES, name
        if "prometheus_client" in heads:
            assert name == "metrics.py", name
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & heads, name


def test_nobody_signals_by_pid() -> None:
    """A pid may be somebody else's by then: signals go through pidfds, or to a child that was not yet waited for."""
    for path in modules():
        found = re.search(r"\bos\.(kill|killpg|system|popen)\(|from os import", path.read_text())
        assert found is None, f"{path}: {found}"


def test_every_module_says_what_it_is_and_what_it_exports() -> None:
    for path in modules():
        tree = parsed(path)
        assert ast.get_docstring(tree), f"{path}: no docstring"
        exported = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        bare = path.name == "__main__.py" or (path.name == "__init__.py" and len(tree.body) == 1)
        assert exported or bare, f"{path}: no __all__"


def test_no_torch_outside_the_ranks() -> None:
    names = [
        "replicas",
        "replicas.messages",
        "replicas.config_file",
        "replicas.core.channel",
        "replicas.coordinator.coordinator",
        "replicas.supervisor.supervisor",
        "replicas.supervisor.shim",
        "replicas.control.cli",
        "replicas.metrics",
    ]
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy'} & set(sys.modules)\n    assert not heavy, (name, heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_shim_loads_nothing_that_takes_long() -> None:
    todo, seen = ["replicas.supervisor.shim"], set[str]()
    while todo:
        name = todo.pop()
        path = ROOT.parent / f"{name.replace('.', '/')}.py"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        heavy = {"argparse", "asyncio", "dataclasses", "inspect", "logging", "msgspec"} & imports(path)
        assert not heavy, f"{path}: {sorted(heavy)}"
        todo += imports(path)
    assert len(seen) > 10


def test_importing_replicas_is_light() -> None:
    code = "import replicas, sys; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'replicas'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["replicas", "replicas.errors"]


def test_errors_form_the_tree_of_the_docstring() -> None:
    drawn = replicas.errors.__doc__ or ""
    for name in replicas.errors.__all__:
        if name[0].isupper():
            assert f" {name} " in drawn or f"\n{name}\n" in drawn.replace("    ", ""), f"{name} is not drawn"
