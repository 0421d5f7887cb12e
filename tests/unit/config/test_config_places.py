"""Configs behind symbolic links that are switched: what is read again, and where the
state of the run lies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from replicas.cli import find_run as find
from replicas.config.file import channels_from, load, parse, read
from replicas.errors import BadConfig, UsageError

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


@pytest.mark.parametrize("name", ["real/run.toml", "link/run.toml", "link/folder/run.toml", "map/run.toml"])
@pytest.mark.parametrize("head", ["", '\nstate_dir = "state"'])
def test_a_run_is_looked_up_where_it_keeps_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: str
) -> None:
    write(tmp_path / "real", 1)
    write(tmp_path / "map/..v1", 1)
    for config in (tmp_path / "real/run.toml", tmp_path / "map/..v1/run.toml"):
        config.write_text(config.read_text().replace('name = "x"', f'name = "x"{head}'))
    (tmp_path / "link").mkdir()
    (tmp_path / "link/run.toml").symlink_to("../real/run.toml")
    (tmp_path / "link/folder").symlink_to("../real")
    (tmp_path / "map/..data").symlink_to("..v1")
    (tmp_path / "map/run.toml").symlink_to("..data/run.toml")
    config = tmp_path / name
    monkeypatch.chdir(config.parent)
    monkeypatch.setenv("PWD", str(config.parent))
    state_dir = load("run.toml").run.state_dir
    assert find.state_dir_of(Path("run.toml")) == find.state_dir_of(config) == state_dir
    if not head:  # one run has one state, and so one supervisor
        assert state_dir == tmp_path / ("map" if name.startswith("map") else "real") / ".replicas/x"


def test_a_mark_of_the_order_of_bytes_is_no_statement(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    config = tmp_path / "a/run.toml"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert load(config).groups["a"].replicas == 3
    assert find.state_dir_of(config) == load(config).run.state_dir


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths go into messages and states, which are JSON."""
    odd = tmp_path / os.fsdecode(b"a\xff")
    write(odd, 1)
    says = r"the name of .*a\\udcff.* is not UTF-8 text; rename it"
    with pytest.raises(BadConfig, match=says):
        load(odd / "run.toml")
    monkeypatch.chdir(odd)
    with pytest.raises(BadConfig, match=says):
        parse({"schema_version": 1, "run": {"name": "x"}, "groups": {}})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(odd)
    write(tmp_path / "b", 1)
    config = tmp_path / "b/run.toml"
    config.write_text(config.read_text().replace('"x"', '"x"\nstate_dir = "../link/state"'))
    with pytest.raises(BadConfig, match=rf"run.state_dir: {says}"):
        load(config)
    good = load(write_again(config, 'state_dir = "../link/state"\n', ""))
    with pytest.raises(BadConfig, match=says):
        read(replace(good, run=replace(good.run, state_dir=odd)))


def write_again(config: Path, old: str, new: str) -> Path:
    config.write_text(config.read_text().replace(old, new))
    return config


def test_a_config_that_a_program_has_made_has_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers have another working folder."""
    write(tmp_path / "a", 1)
    config = load(tmp_path / "a/run.toml")
    monkeypatch.chdir(tmp_path)
    groups = {"a": replace(config.groups["a"], cwd=Path("a"))}
    control = replace(config.control, socket=Path("s"))
    found = read(replace(config, run=replace(config.run, state_dir=Path("b")), control=control, groups=groups))
    assert (found.run.state_dir, found.control.socket) == (tmp_path / "b", tmp_path / "s")
    assert found.groups["a"].cwd == tmp_path / "a"


def test_commands_work_in_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 1)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert find.RunAddress(tmp_path / "a/run.toml").named_dir == tmp_path / "a/.replicas/x"
    assert channels_from({"c": {"sources": ["a"]}}, {})["c"].sources
    with pytest.raises(UsageError, match="the current folder has been removed"):
        _ = find.RunAddress().named_dir
    with pytest.raises(BadConfig, match="the current folder"):
        parse({})
