"""Each alert has a page, whose commands exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
import typer.main
import yaml

from replicas.cli import main as cli
from replicas.telemetry.events import Event
from tests.support.root import ROOT

PAGES = {path.stem: path for path in (ROOT / "docs" / "alerts").glob("Replicas*.md")}
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "services" / "supervisor" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
HEADS = ["What users see", "Find the cause", "What to do"]
COMMANDS: Any = typer.main.get_command(cli.app)
TYPES = {one.__name__ for one in get_args(Event.__value__ if hasattr(Event, "__value__") else Event)}
INTEGRATED = {"curl", "journalctl", "ss", "systemctl", "top", "uptime"}
"""Commands of the system that pages name."""


def commands(page: str) -> Iterator[list[str]]:
    """Words of each command: of a line of a console, or between backticks."""
    for line in re.findall(r"^\$ (.*)$", page, re.M):
        yield shlex.split(line.partition(" |")[0], comments=True)
    for text in re.findall(r"`(replicas [^`]+)`", " ".join(page.split())):
        yield shlex.split(text)


def test_alerts_and_pages_are_one_to_one() -> None:
    assert set(PAGES) == set(RULES)
    index = (ROOT / "docs" / "alerts" / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \|", index, re.M) == list(RULES), "in the order of the rules"


def test_the_how_to_has_every_alert_once() -> None:
    table = (ROOT / "docs" / "howto" / "alert.md").read_text()
    assert sorted(re.findall(r"`(Replicas\w+)`", table)) == sorted(RULES)


def test_an_alert_links_to_its_page() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"] == f"{urls['Source']}/blob/main/docs/alerts/{name}.md"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_says_what_it_means_and_what_to_do(name: str) -> None:
    title, *sections = re.split(r"^## ", PAGES[name].read_text(), flags=re.M)
    assert title.startswith(f"# {name}\n")
    severity = RULES[name]["labels"]["severity"].capitalize()
    assert title.splitlines()[2].startswith(f"{severity}. "), "how urgent it is"
    assert [one.partition("\n")[0] for one in sections] == HEADS
    assert "```console\n$ " in sections[1], "commands that show the cause"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_commands_of_a_page_exist(name: str) -> None:
    for program, *words in commands(PAGES[name].read_text()):
        if program != "replicas":
            assert program in INTEGRATED, program
            continue
        assert words[0] in COMMANDS.commands, words
        known = {option for parameter in COMMANDS.commands[words[0]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, words
        types = {after for word, after in pairwise(words) if word == "--type"}
        assert types <= TYPES, words


def test_the_page_of_refusals_has_every_reason() -> None:
    from replicas.coordinator.limits import REASONS

    assert set(REASONS) <= set(re.findall(r"`(\w+)`", PAGES["ReplicasRefused"].read_text()))
