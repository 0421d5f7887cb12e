"""Configs behind symbolic links that are switched: what is read again, and where the
state of the run lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from replicas.cli import find_run as find
from replicas.config.file import load

CONFIG = (
    'schema_version = 1\n[run]\nname = "x"\n[groups.a]\nlauncher = "exec"\ncommand = ["sleep", "1"]\nreplicas = {}\n'
)


def write(folder: Path, replicas: int) -> None:
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(CONFIG.format(replicas))


def switch(link: Path, target: str) -> None:
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def test_a_release_that_is_switched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in (1, 2):
        write(tmp_path / f"releases/{release}", release)
    config = tmp_path / "current/run.toml"
    for release in (1, 2):
        switch(tmp_path / "current", f"releases/{release}")
        loaded = load(config)
        assert loaded.groups["a"].replicas == release
        assert loaded.groups["a"].cwd == tmp_path / f"releases/{release}"
        assert loaded.source == config
        assert loaded.run.state_dir == tmp_path / ".replicas/x"
        monkeypatch.chdir(tmp_path / "current")
        monkeypatch.setenv("PWD", str(tmp_path / "current"))
        assert load("run.toml").run.state_dir == tmp_path / ".replicas/x"
    (tmp_path / ".replicas/x").mkdir(parents=True)
    (tmp_path / ".replicas/x/lock").touch()
    assert find.RunAddress().state_dir == tmp_path / ".replicas/x"
    monkeypatch.setenv("PWD", str(tmp_path))  # of another program's: it is not where this one is
    assert load("run.toml").run.state_dir == tmp_path / "releases/2/.replicas/x"


def test_a_config_map_that_is_switched(tmp_path: Path) -> None:
    """As kubelet does it: the files are links through ``..data``, and the old folder
    goes."""
    (tmp_path / "run.toml").symlink_to("..data/run.toml")
    for version in (1, 2):
        write(tmp_path / f"..v{version}", version)
        switch(tmp_path / "..data", f"..v{version}")
        if version == 2:
            shutil.rmtree(tmp_path / "..v1")
        loaded = load(tmp_path / "run.toml")
        assert loaded.groups["a"].replicas == version
        assert (loaded.source, loaded.groups["a"].cwd) == (tmp_path / "run.toml", tmp_path)
        assert loaded.run.state_dir == tmp_path / ".replicas/x"


def test_a_link_that_leads_elsewhere_stands_for_what_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path / "disk/data/project", 1)
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine/data").symlink_to(tmp_path / "disk/data")
    assert load(tmp_path / "machine/data/project/run.toml").run.state_dir == tmp_path / "disk/data/project/.replicas/x"
