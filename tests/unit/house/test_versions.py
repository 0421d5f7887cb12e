"""What ``make test-versions`` installs is what ``pyproject.toml`` says."""

from __future__ import annotations

import tomllib

import pytest

from tests.support import versions
from tests.support.root import ROOT


def test_every_requirement_has_a_lower_bound() -> None:
    found = versions.bounds(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().split())
    assert {"torch", "typer", "hatchling", "pytest"} <= found.keys()
    assert not {"coverage", "mypy", "pyright", "ruff"} & found.keys()
    assert all(name.replace("-", "_") in pinned or name in pinned for name in found)


def test_a_requirement_without_one_is_refused() -> None:
    extras: dict[str, list[str]] = {"demo": [], "dev": []}
    project = {"dependencies": ["torch"], "optional-dependencies": extras}
    with pytest.raises(ValueError, match="'torch' is not of the form name>=version"):
        versions.bounds({"build-system": {"requires": []}, "project": project})


def test_torch_can_be_another_build() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "torch==9.9+cpu" in versions.lowest(pyproject, "9.9+cpu")
    assert f"torch=={versions.bounds(pyproject)['torch']}" in versions.lowest(pyproject)


def test_a_python_that_is_not_here_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "interpreter", lambda python: None)
    assert versions.main(["newest", "3.99"]) == 0
    assert versions.main(["lowest"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert (
        told[0]
        == "newest versions on Python 3.99: DID NOT RUN, there is no python3.99 with venv here (on PATH or in pyenv)"
    )
    assert told[1].startswith("lowest versions on Python 3.11: DID NOT RUN")


def test_the_oldest_python_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions.OLDEST}"
    assert [f"Programming Language :: Python :: {one}" in project["classifiers"] for one in versions.PYTHONS] == [
        True
    ] * 3
