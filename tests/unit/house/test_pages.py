"""The code on the pages of the handbook: it compiles, its names, options and keys are
public ones that exist, and every page is in the list of contents."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import replicas
from replicas import testing
from tests.support.house.pages import Block, blocks, commands
from tests.support.reference import commands as reference
from tests.support.reference.config import keys
from tests.support.root import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    {*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "services").rglob("*.md")} - {*(DOCS / "reference").iterdir()}
)
"""All but the reference, which shows signatures."""
LINK = re.compile(r"^- \[([^\]]+)\]\(([^)#:]+\.md)\)", re.MULTILINE)
LISTED_BY_PATTERN = ("alerts", "reference")
"""Folders whose pages are listed by the builder."""
MADE_OF = {
    "channel": replicas.Channel,
    "pending": replicas.Pending,
    "receipt": replicas.Receipt,
    "run": testing.FakeRun,
    "supervisor": replicas.Supervisor,
    "trainer": replicas.Channel,
    "update": replicas.Update,
}
"""What variables of these names are on the pages."""
OTHERS = {("trainer", "train"), ("trainer", "state"), ("trainer", "callback_handler")}
"""What is called so on a page and is somebody else's: a trainer of transformers."""
QUESTIONS = {
    "smallest": "start/quickstart.md",
    "Tutorial": "tutorial.md",
    "sync is stuck": "howto/stuck.md",
    "Which of the four ways": "start/ways.md",
    "How much memory": "howto/memory.md",
    "FSDP2 on eight GPUs to vLLM with tensor parallelism of 4": "howto/fsdp2-to-vllm.md",
    "NCCL, TCP and RDMA": "howto/gpus.md",
    "verl": "verl.md",
    "SGLang": "sglang.md",
    "OpenRLHF": "frameworks.md",
    "Bounded staleness": "howto/staleness.md",
    "Resume a trainer from a checkpoint": "howto/resume.md",
    "LoRA": "howto/lora.md",
    "FakeRun": "howto/testing.md",
    "W&B": "howto/wandb.md",
}
"""Words that newcomers looked for, and the page that answers. A search ranks titles
first."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def of(language: str) -> list[tuple[Path, Block]]:
    return [(page, one) for page in PAGES for one in blocks(page.read_text()) if one.language == language]


def shown(pair: Any) -> str:
    return name_of(pair) if isinstance(pair, Path) else ""


@pytest.mark.parametrize(("words", "page"), QUESTIONS.items())
def test_a_title_has_the_words_that_newcomers_look_for(words: str, page: str) -> None:
    title, _, rest = (DOCS / page).read_text().partition("\n")
    titles = [title, *re.findall(r"^## .*$", rest, re.MULTILINE)]
    assert any(words.lower() in one.lower() for one in titles)


def test_every_page_is_in_the_contents_once() -> None:
    listed = [(DOCS / link).resolve() for _, link in LINK.findall((DOCS / "README.md").read_text())]
    assert len(listed) == len(set(listed))
    pages = {page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in LISTED_BY_PATTERN}
    assert pages - set(listed) == {DOCS / "README.md"}
    assert DOCS / "reference" / "README.md" in listed


@pytest.mark.parametrize(("page", "block"), of("python"), ids=shown)
def test_code_compiles_and_names_what_exists(page: Path, block: Block) -> None:
    tree = ast.parse(block.text, name_of(page))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "replicas":
            check_import(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            check_attribute(node.value.id, node.attr, block.text)
    assert not unknown_names(tree), f"{name_of(page)} does not say what these are"


def check_import(node: ast.ImportFrom) -> None:
    """Frameworks are not installed here, so their integrations are read, not
    imported."""
    assert node.module is not None
    if ".integrations" in node.module:
        path = ROOT.joinpath(*node.module.split("."))
        found = [one.read_text() for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()]
        assert found, node.module
        for name in node.names:
            assert re.search(rf"\b{name.name}\b", found[0]), f"{node.module} has no {name.name}"
        return
    module = importlib.import_module(node.module)
    for name in node.names:
        assert hasattr(module, name.name), f"{node.module} has no {name.name}"
        assert name.name in getattr(module, "__all__", [name.name]), f"{node.module}.{name.name} is not public"


def check_attribute(variable: str, name: str, text: str) -> None:
    if variable == "replicas" and name != "integrations":
        assert name in {*replicas.__all__, "sources", "testing", "engine", "status"}, f"replicas.{name}"
    kind = MADE_OF.get(variable)
    if kind is None or (variable, name) in OTHERS or (variable == "trainer" and "Trainer(" in text):
        return
    known = {*dir(kind), *getattr(kind, "__annotations__", ()), *reference_attributes(kind)}
    assert name in known, f"{kind.__name__} has no {name}"


def reference_attributes(kind: type) -> set[str]:
    """Those that a class documents, beside what its methods and fields are."""
    return set(re.findall(r":ivar (\w+):", kind.__doc__ or ""))


def unknown_names(tree: ast.Module) -> set[str]:
    """Names of this library that a block uses and neither imports nor is given: a
    reader of a whole program could not run it."""
    if not any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body):
        return set()  # a fragment
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    ours = {"replicas", "hf", "errors", "FakeRun", "Supervisor"}
    return (used - bound - set(dir(builtins))) & ours


def leaves(table: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys of a config, with NAME for the name of a group or channel."""
    for key, value in table.items():
        name = "NAME" if above in (("groups",), ("channels",)) else key
        below = (*above, name)
        if isinstance(value, dict) and ".".join(below) not in KEYS:
            yield from leaves(value, below)
        else:
            yield ".".join(below)


KEYS = {key.name for key in keys()}


@pytest.mark.parametrize(("page", "block"), of("toml"), ids=shown)
def test_configs_have_keys_that_exist(page: Path, block: Block) -> None:
    assert set(leaves(tomllib.loads(block.text))) <= KEYS


def replicas_commands() -> list[tuple[Path, str]]:
    """Of console blocks, and of lines that are indented as code."""
    found = []
    for page in PAGES:
        text = page.read_text()
        typed = [one.text for one in commands(text)]
        typed += [
            line.strip().removeprefix("$ ") for line in re.findall(r"^ {4,}(?:\$ )?replicas \w.*$", text, re.MULTILINE)
        ]
        found += [(page, one) for line in typed for one in re.split(r" && | \| | \|\| ", line)]
    return [(page, re.sub(r"\s+#.*$", "", line)) for page, line in found if line.startswith("replicas ")]


@pytest.mark.parametrize(("page", "line"), replicas_commands(), ids=shown)
def test_commands_and_options_exist(page: Path, line: str) -> None:
    _, name, *words = shlex.split(line.partition(" > ")[0].rstrip("&"))
    if name == "--version":
        return
    command = reference.commands()[name]
    options = {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options | {"--help"}
