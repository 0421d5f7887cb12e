"""The documentation names only files, links and functions that exist."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from replicas.config.file import parse
from tests.support.house.pages import files
from tests.support.root import ROOT

PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "services").rglob("*.md")} - {ROOT / "CHANGELOG.md"}
)
"""All but the changelog, which tells of what was."""
PATH = re.compile(r"`([\w/]+\.(?:py|c|sh))`")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)")
CONFIG = re.compile(r"```toml\n(schema_version.*?)```", re.DOTALL)
STATION = re.compile(r"`([\w/]+\.py)`((?:,?\s+`(?!\w+\.py`)[\w.]+`)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for path in set(PATH.findall(text)) - set(files(text)):  # a file that the page itself has
        assert (ROOT / path).exists() or (ROOT / "replicas" / path).exists(), path
    for link in LINK.findall(text):
        assert (page.parent / link).exists(), link


def test_the_map_leads_to_functions_that_exist() -> None:
    stations = STATION.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(stations) > 15
    for path, names in stations:
        source = (ROOT / "replicas" / path).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"\b(def|class) {part}\b", source), f"{path}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_looks_like_a_whole_config_is_one(page: Path) -> None:
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        assert text.startswith("schema_version") or "[run]\nname" not in text, text


@pytest.mark.parametrize(
    "page", [page for page in PAGES if CONFIG.search(page.read_text())], ids=lambda page: page.name
)
def test_whole_configs_are_good(page: Path, tmp_path: Path) -> None:
    for name in ("token", "operator-token", "key.pem"):
        (tmp_path / name).write_text("secret")
    for text in CONFIG.findall(page.read_text()):
        programs = re.findall(r'command = \["([\w/]+\.py)"', text)
        for program in programs:
            (tmp_path / program).write_text("")
        parse(tomllib.loads(text.replace("/etc/replicas/", f"{tmp_path}/")), base=tmp_path)


def test_a_word_of_the_glossary_has_one_meaning() -> None:
    """A word with two has a noun behind it each time: part *of a replica*."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [term for term, _ in rows if term.startswith("*")]
    assert len(terms) > 100
    assert len(set(terms)) == len(terms)
    words = Counter(word for term in terms for word in re.findall(r"\*\*([^*]+)\*\*", term))
    assert [term for term in terms if words[term.strip("*")] > 1] == []
    assert [meaning for _, meaning in rows if "; also" in meaning] == []
