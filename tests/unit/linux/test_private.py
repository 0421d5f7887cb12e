"""Folders and files of this user alone: what others have put in the way is neither
followed, believed nor written to.

Covers: linux/private.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.linux import private
from replicas.linux.private import NotPrivate
from tests.support.machine.users import ATTACKER, needs_users


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def create(path: Path) -> None:
    private.create(path, b"x")


def append(path: Path) -> None:
    os.close(private.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def write(path: Path) -> None:
    private.write(path, b"x")


def replace(path: Path) -> None:
    private.replace(path, b"x")


def rename(path: Path) -> None:
    private.rename(path, "other")


WRITERS = (create, append, write, replace)
ALL = (*WRITERS, private.read, private.remove, rename)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(0o755)
    (made / "file").write_bytes(b"old")
    return made


@pytest.mark.parametrize("call", WRITERS)
def test_what_is_made_is_closed_to_others_whatever_the_folder_shows(
    place: Path, call: Callable[[Path], object]
) -> None:
    (place / "file").chmod(0o644)
    old = os.umask(0)
    try:
        call(place / "file")
        call(place / "new")
        private.make_folder(place / "a" / "b")
    finally:
        os.umask(old)
    assert [mode(place / name) for name in ("file", "new", "a", "a/b")] == [0o600, 0o600, 0o700, 0o700]
    assert mode(place) == 0o755


@needs_users
@pytest.mark.parametrize("call", ALL)
def test_a_folder_of_another_user_is_refused(place: Path, call: Callable[[Path], object]) -> None:
    os.chown(place, ATTACKER, ATTACKER)
    before = descriptors()
    with pytest.raises(NotPrivate, match=f"user {ATTACKER}") as caught:
        call(place / "file")
    assert caught.value.filename == str(place)
    assert (place / "file").read_bytes() == b"old"
    assert descriptors() == before


@pytest.mark.parametrize("bits", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("call", ALL)
def test_a_folder_to_which_others_write_is_refused(place: Path, call: Callable[[Path], object], bits: int) -> None:
    place.chmod(bits)
    with pytest.raises(NotPrivate, match=rf"mode is {bits:04o}") as caught:
        call(place / "file")
    assert caught.value.hint.startswith(f"chmod go-w {place}")
    assert (place / "file").read_bytes() == b"old"


@pytest.mark.parametrize("call", [append, write, private.read])
def test_no_file_is_reached_through_a_link(place: Path, tmp_path: Path, call: Callable[[Path], object]) -> None:
    precious = tmp_path / "thesis"
    precious.write_bytes(b"my thesis")
    (place / "lock").symlink_to(precious)
    with pytest.raises(NotPrivate, match="it is a symbolic link"):
        call(place / "lock")
    assert precious.read_bytes() == b"my thesis"


@pytest.mark.parametrize("call", [create, replace])
def test_a_new_file_takes_the_place_of_a_link(place: Path, tmp_path: Path, call: Callable[[Path], object]) -> None:
    precious = tmp_path / "thesis"
    precious.write_bytes(b"my thesis")
    for name in ("token", "token.new"):
        (place / name).symlink_to(precious)
    call(place / "token")
    assert precious.read_bytes() == b"my thesis"
    assert (place / "token").read_bytes() == b"x"
    assert not (place / "token").is_symlink()


@needs_users
@pytest.mark.parametrize("call", [append, write, private.read])
def test_a_file_of_another_user_is_refused(place: Path, call: Callable[[Path], object]) -> None:
    os.chown(place / "file", ATTACKER, ATTACKER)
    with pytest.raises(NotPrivate, match=f"user {ATTACKER}"):
        call(place / "file")
    assert (place / "file").read_bytes() == b"old"


def test_a_pipe_in_the_place_of_a_file_blocks_nobody(place: Path) -> None:
    os.mkfifo(place / "pipe")
    with pytest.raises(NotPrivate, match="it is not a regular file"):
        private.read(place / "pipe")


def test_links_of_ours_on_the_way_are_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "absolute").symlink_to(place)
    (tmp_path / "relative").symlink_to("./absolute/../absolute")
    private.make_folder(tmp_path / "relative" / "deep" / "er")
    private.create(tmp_path / "relative" / "deep" / "er" / "new", b"x")
    assert (place / "deep" / "er" / "new").read_bytes() == b"x"


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        private.read(tmp_path / "a" / "file")


@needs_users
@pytest.mark.parametrize("call", ALL)
def test_links_of_others_on_the_way_are_not_followed(
    place: Path, tmp_path: Path, call: Callable[[Path], object]
) -> None:
    """Else one who plants ``.replicas`` or ``.replicas/run`` chooses which folder of
    ours is taken for the state."""
    (tmp_path / "link").symlink_to(place)
    os.chown(tmp_path / "link", ATTACKER, ATTACKER, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=f'"link" on the way to it is a symbolic link of user {ATTACKER}'):
        call(tmp_path / "link" / "file")
    assert (place / "file").read_bytes() == b"old"


def test_what_is_missing_or_no_folder_is_said_with_its_path(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(place / "none")):
        private.read(place / "none")
    with pytest.raises(FileNotFoundError, match=str(place / "none")):
        private.read(place / "none" / "file")
    with pytest.raises(NotADirectoryError, match=str(place / "file")):
        private.read(place / "file" / "file")
    private.remove(place / "none")
    private.remove_tree(place / "none")


def test_a_tree_is_removed_without_what_it_links_to(place: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"kept")
    (place / "link").symlink_to(kept)
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "b" / "file").symlink_to(kept / "file")
    private.remove_tree(place)
    assert not place.exists()
    assert (kept / "file").read_bytes() == b"kept"


def test_a_folder_of_ours_that_was_closed_once_is_closed_again(place: Path) -> None:
    """A volume's group may write to it after each mount; a folder that was never used
    is its owner's affair."""
    place.chmod(0o2770)
    private.close_to_others(place, once_ours="lock")
    assert mode(place) == 0o2770
    (place / "lock").touch(0o660)
    private.close_to_others(place, once_ours="lock")
    assert mode(place) == 0o2750


def test_a_folder_is_checked_as_it_would_be_made(place: Path) -> None:
    """In ``/proc`` nobody makes a folder, root neither."""
    place.chmod(0o777)
    for call in (private.make_folder, lambda path: private.check_folder(path, once_ours="lock")):
        for path, why in (
            (place, "others"),
            (place / "file" / "x", "Not a dir"),
            (Path("/proc/nowhere"), "No such|not s"),
        ):
            with pytest.raises(OSError, match=why):
                call(path)
    (place / "lock").touch()
    for path in (place, place / "a" / "b"):
        private.check_folder(path, once_ours="lock")
    assert {one.name for one in place.iterdir()} == {"file", "lock"}


@needs_users
def test_a_folder_in_which_this_user_can_make_none_is_said_before(place: Path) -> None:
    os.seteuid(ATTACKER)
    try:
        for call in (private.make_folder, lambda path: private.check_folder(path, once_ours="lock")):
            with pytest.raises(PermissionError, match="Permission denied"):
                call(place / "a")
    finally:
        os.seteuid(0)
