"""With what the library's own processes are started.

Covers: common/own_code.py, linux/helpers.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from replicas.common import own_code
from replicas.errors import UsageError
from replicas.linux.helpers import interpreter, popen_arguments


@pytest.mark.parametrize("named", ["", "/usr/bin/uwsgi", None])
def test_a_program_that_has_python_in_it_is_no_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", named)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    with pytest.raises(UsageError, match=r"sys\.executable"):
        interpreter()
    for folder in (tmp_path / "base", tmp_path):  # that of a virtual environment is preferred
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / name).touch(mode=0o755)
        assert interpreter() == str(folder / "bin" / name)


def test_the_interpreter_that_runs_is_the_one() -> None:
    assert interpreter() == sys.executable


def test_a_helper_has_what_it_needs_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, given = str(Path(own_code.__file__).parents[2]), {"PYTHONPATH": "lib::/abs", "PET_MODULE": "1", "A": "b"}
    monkeypatch.chdir(tmp_path)
    found = popen_arguments(given)
    paths = [path for path in found["env"].pop("PYTHONPATH").split(os.pathsep) if path != home]
    assert paths == [str(tmp_path / "lib"), "", "/abs"]
    assert (found["cwd"], found["env"], found["start_new_session"]) == ("/", {"A": "b"}, True)
    assert popen_arguments(given, "/group")["env"]["PYTHONPATH"].endswith("/group/lib::/abs")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert own_code.rooted(given) == given
