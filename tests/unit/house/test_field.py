"""The table of the field suite, docs/field.md, and its tests name each other, and every
report of the list has a verdict."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.root import ROOT

LIST = [
    "NVIDIA-NeMo/RL#4018",
    "NovaSky-AI/SkyRL#2246",
    "vllm-project/vllm#42695",
    "radixark/miles#2783",
    "radixark/miles#2372",
    "verl-project/verl#7846",
    "NVIDIA-NeMo/RL#3612",
    "areal-project/AReaL#1160",
    "ai-dynamo/dynamo#9131",
    "vllm-project/vllm#57854",
    "vllm-project/vllm#55510",
    "NVIDIA-NeMo/RL#3592",
    "PrimeIntellect-ai/prime-rl#2331",
    "pytorch/pytorch#185414",
    "pytorch/pytorch#119856",
    "NovaSky-AI/SkyRL#1688",
    "verl-project/verl#6468",
    "radixark/miles#3147",
    "PrimeIntellect-ai/prime-rl#3016",
    "intelligent-machine-learning/dlrover#1749",
    "verl-project/verl#6677",
    "areal-project/AReaL#1385",
    "huggingface/trl#7017",
    "ROCm/ATOM#2028",
    "alibaba/ROLL#485",
]
"""Reports of users of other systems that are on the list."""
VERDICTS = ("held", "partly", "refused", "not tried")
ROW = re.compile(
    r"^\| \[(?P<report>[^\]]+)\]\((?P<link>[^)]+)\)[^|]*\| (?P<there>[^|]+) \| (?P<answer>[^|]+)"
    r" \| \*\*(?P<verdict>[^*]+)\*\*(?P<here>[^|]+) \| (?P<tests>[^|]+) \|$",
    re.MULTILINE,
)


NAMED = re.compile(r"`([\w/]+\.py)`:? `(test_\w+)`")
"""A test, in the last column."""


class Report(NamedTuple):
    """One row: of which report, with which verdict, and the tests that it names."""

    name: str
    link: str
    verdict: str
    here: str
    tests: list[tuple[str, str]]

    @property
    def word(self) -> str:
        """With which the names of its tests begin."""
        _, _, rest = self.name.rpartition("/")
        project, _, number = rest.partition("#")
        owner = self.name.split("/")[0].lower()
        project = {"RL": "nemo"}.get(project, project.lower().replace("-", "_"))
        assert owner
        return f"test_{project}_{number}_"


def reports() -> list[Report]:
    text = (ROOT / "docs/field.md").read_text()
    found = []
    for row in ROW.finditer(text):
        tests = NAMED.findall(row["tests"])
        found.append(Report(row["report"], row["link"], row["verdict"], row["here"], tests))
    assert len(found) == len(re.findall(r"^\| \[", text, re.MULTILINE)), "each row has five columns and a verdict"
    return found


def functions_of(path: Path) -> set[str]:
    """Names of the tests in a file."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_report_of_the_list_has_a_row() -> None:
    assert [one.name for one in reports()] == LIST


@pytest.mark.parametrize("report", reports(), ids=lambda one: one.name)
def test_a_row_has_a_verdict_and_names_tests_that_there_are(report: Report) -> None:
    assert report.verdict in VERDICTS
    assert report.link == f"https://github.com/{report.name.replace('#', '/issues/')}"
    assert len(report.here) > 40, "what happens here, or why it was not tried"
    assert report.tests or report.verdict == "not tried"
    for path, name in report.tests:
        assert name in functions_of(ROOT / path), f"{path}: {name}"
        if path.startswith("tests/field/"):
            assert name.startswith(report.word)


def test_every_test_of_the_suite_is_in_the_table() -> None:
    named = {(path, name) for one in reports() for path, name in one.tests}
    files = sorted((ROOT / "tests/field").rglob("test_*.py"))
    there = {(str(path.relative_to(ROOT)), name) for path in files for name in functions_of(path)}
    assert len(there) > 15
    assert there - named == set()


def test_make_field_runs_all_tests_that_the_page_names() -> None:
    named = set(NAMED.findall((ROOT / "docs/field.md").read_text()))
    assert {path: name for path, name in named if name not in functions_of(ROOT / path)} == {}
    elsewhere = {path for path, _ in named if not path.startswith(("tests/field/", "tests/engines/"))}
    command = re.search(r"^FIELD_ALSO := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command is not None
    assert set(re.findall(r"tests/\S+", command[1])) == elsewhere
