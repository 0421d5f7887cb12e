"""Control groups, on folders that look like the kernel's.

Covers: linux/cgroups.py.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from replicas.linux import cgroups
from replicas.linux.cgroups import RunCgroups, find_own
from replicas.linux.processes import namespace, start_time


def process(folder: Path, *, cgroup: str, mounts: str) -> Path:
    """A folder like ``/proc/self``."""
    folder.mkdir()
    (folder / "cgroup").write_text(f"4:memory:/elsewhere\n{cgroup}\n")
    (folder / "mountinfo").write_text(mounts)
    return folder


def mount(root: str, point: Path, kind: str = "cgroup2") -> str:
    return f"41 31 0:38 {root} {point} rw,relatime shared:7 - {kind} none rw\n"


def group(path: Path, controllers: str = "cpu memory pids", handed_on: str = "") -> Path:
    """A folder like a control group, with the files that are written."""
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.subtree_control").write_text(handed_on)
    (path / "cgroup.procs").write_text("")
    return path


def test_the_own_group_is_found_below_whatever_is_mounted(tmp_path: Path) -> None:
    here = group(tmp_path / "unified" / "service")
    mounts = mount("/", tmp_path / "v1", "cgroup") + mount("/other", tmp_path / "no") + mount("/", tmp_path / "unified")
    assert find_own(process(tmp_path / "a", cgroup="0::/service", mounts=mounts)) == here
    mounts = mount("/slice", tmp_path / "unified")
    assert find_own(process(tmp_path / "b", cgroup="0::/slice/service", mounts=mounts)) == here


def test_mount_points_of_others_are_bytes(tmp_path: Path) -> None:
    """And only a newline ends a line: the kernel escapes spaces, tabs and newlines."""
    here = group(tmp_path / "a b\\c" / "service")
    others = (b"/mnt/\xff\xfe", "/mnt/\u2028\x0c\x85".encode(), b"/mnt/\r")
    folder = process(tmp_path / "p", cgroup="0::/service", mounts="")
    mounted = mount("/", Path(str(tmp_path / r"a\040b\134c")))
    lines = (b"40 31 0:37 / %b rw - tmpfs none rw\n" % one for one in others)
    (folder / "mountinfo").write_bytes(b"".join(lines) + mounted.encode())
    assert find_own(folder) == here


def test_a_group_whose_path_is_no_text_is_not_used(tmp_path: Path) -> None:
    """Messages and states, which are JSON, would have it."""
    folder = process(tmp_path / "p", cgroup="", mounts=mount("/", tmp_path / "unified"))
    (folder / "cgroup").write_bytes(b"0::/\xff\n")
    group(tmp_path / "unified" / os.fsdecode(b"\xff"))
    with pytest.raises(OSError, match=r"not plain text: .*\\udcff"):
        find_own(folder)


@pytest.mark.parametrize(
    ("cgroup", "root", "says"),
    [
        ("3:pids:/x", "/", "this kernel has no cgroup v2"),
        ("0::/missing", "/", "not mounted, or this process's group is not visible"),
        ("0::/../outside", "/", "not visible"),
        ("0::/service", "/other", "not visible"),
    ],
)
def test_why_there_is_none_is_said(tmp_path: Path, cgroup: str, root: str, says: str) -> None:
    group(tmp_path / "unified" / "service")
    with pytest.raises(OSError, match=says):
        find_own(process(tmp_path / "a", cgroup=cgroup, mounts=mount(root, tmp_path / "unified")))


def test_a_run_hands_its_controllers_on_and_limits_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = group(tmp_path / "own", handed_on="memory pids")
    here = namespace("pid")
    for dead in (f"replicas-x-4000001-5-{here}", f"replicas-grpo-4000001-6-{here}/a.0.1/0"):
        (own / dead).mkdir(parents=True)
    alive = own / f"replicas-y-{os.getpid()}-{start_time(os.getpid())}-{here}"
    other = own / f"replicas-y-4000001-5-{here + 1}"  # of a container with pids of its own
    for path in (alive, other):
        path.mkdir()
    made: list[str] = []
    real = cgroups._write

    def write(path: Path, value: str) -> None:
        made.append(f"{path.relative_to(tmp_path / 'own')}={value}")
        if path.exists():
            real(path, value)

    monkeypatch.setattr(cgroups, "_write", write)
    run = RunCgroups("grpo", own, limited=True)
    assert run.path is not None
    name = run.path.name
    assert run.limits == {"memory", "pids"}
    assert name.startswith(f"replicas-grpo-{os.getpid()}-")
    assert sorted(own.glob("replicas-*")) == sorted([alive, other, run.path])
    path = run.add("a.0.1", 3, memory_nbytes=1000, max_processes=7)
    assert path == run.path / "a.0.1" / "3"
    assert made == [
        f"{name}/cgroup.subtree_control=+memory +pids",
        f"{name}/a.0.1/memory.max=1000",
        f"{name}/a.0.1/memory.swap.max=0",
        f"{name}/a.0.1/memory.oom.group=1",
        f"{name}/a.0.1/pids.max=7",
    ]
    assert cgroups.members(path) == []
    (path / "made-by-a-rank" / "container").mkdir(parents=True)
    cgroups.leave(path)
    assert not path.exists()
    assert run.path.exists()
    assert run.close()
    assert not run.path.exists()


def test_a_later_run_of_this_process_begins_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_left", {})
    own = group(tmp_path / "own")
    refused = [True]

    def write(path: Path, value: str) -> None:
        if path == own / "cgroup.subtree_control" and refused.pop(0):
            raise OSError(errno.EBUSY, "busy")
        path.write_text(value.replace("+", ""))

    monkeypatch.setattr(cgroups, "_write", write)
    refused.append(False)
    first = RunCgroups("one", own, limited=True)
    leaf = own / "supervisor"
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    second = RunCgroups("two", leaf, limited=True)  # as find_own says now
    assert first.path is not None
    assert second.path is not None
    assert first.path.parent == second.path.parent == own
    assert second.limits == {"memory", "pids"}


def test_a_limit_without_its_controller_is_refused(tmp_path: Path) -> None:
    run = RunCgroups("grpo", group(tmp_path / "own", controllers="cpu pids", handed_on="pids"), limited=False)
    with pytest.raises(OSError, match="controller memory"):
        run.add("a.0.1", memory_nbytes=1000)
    assert run.add("a.0.1").is_dir()
    assert run.limits == frozenset()


def test_limits_that_cannot_be_set_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise OSError("this kernel has no cgroup v2")

    monkeypatch.setattr(cgroups, "find_own", nowhere)
    run = RunCgroups("r", limited=True)
    assert run.refused == "this kernel has no cgroup v2"
    with pytest.raises(OSError, match="no cgroup v2"):
        run.add("a.0.1", memory_nbytes=1 << 20)
    assert run.close()


def test_what_a_dead_one_left_is_removed_at_the_end_if_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last processes may take longer to die than the next one to start."""
    own = group(tmp_path / "own")
    left = own / f"replicas-grpo-999999999-1-{namespace('pid')}"
    (left / "a.0.1").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(cgroups, "remove", lambda group: False)
        run = RunCgroups("grpo", own, limited=False)
    assert left.exists()
    run.close()
    assert not left.exists()
