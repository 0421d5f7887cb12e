"""Files and folders that only this user can change, such as a run's state folder.

Standard library only. A path may lead through folders of other users (``/tmp``,
``/scratch``), who can put a symbolic link, or a folder of their own, in place of ours.
So every call here walks the path from the root by descriptors. A symbolic link on the
way must belong to us or root; the last folder must belong to us or root and not be
writable by others. A file in it is opened relative to the folder's descriptor, never
through a link, and must be a regular file of ours. New folders and files have the modes
0700 and 0600, whatever the mode of the parent folder.

No descriptor is kept between calls, so a folder that was moved or recreated is found
again, and a folder that another user put in its place is refused. Errors are
:class:`OSError`; :class:`NotPrivate` names the finding and the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_LINKS = 40  # the kernel's own limit


class NotPrivate(PermissionError):
    """A file or folder is another user's, or others can write it; with a ``hint``."""

    def __init__(self, path: Path, why: str, hint: str) -> None:
        """Make the error: ``why`` the path is refused, and a ``hint`` what to do."""
        super().__init__(errno.EPERM, why, str(path))
        self.hint = hint


@contextlib.contextmanager
def folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """Context manager: open a folder of this user or root; yield its descriptor.

    The descriptor (``O_PATH``) serves as ``dir_fd``, and is closed after the block.

    :param make: create missing folders of the path, with mode 0700.
    :raises NotPrivate: the folder, or a symbolic link on the way to it, belongs to
        another user, or others can write to the folder.
    :raises FileNotFoundError: it is missing, without ``make``.
    """
    with _walked(path, make=make) as descriptor:
        _check_folder(descriptor, path)
        yield descriptor


def make_folder(path: Path) -> None:
    """Create the folder and its missing parents, with mode 0700.

    An existing folder of this user or root is accepted, and not changed.

    :raises NotPrivate: an existing folder is another user's, or others can write to it.
    """
    with folder(path, make=True):
        pass


def check_folder(path: Path, *, once_ours: str) -> None:
    """Raise the OSError that :func:`make_folder` would raise; leave nothing behind.

    The check also opens a file without a name (O_TMPFILE), as a disk may be read-only.

    :param once_ours: name of a file. The owner and mode of a folder that has this file
        are not checked, as :func:`close_to_others` repairs the mode.
    """
    found = next(one for one in (path, *path.parents) if one.exists())
    with _walked(found) as descriptor:
        if found == path and not (path / once_ours).exists():
            _check_folder(descriptor, path)
        try:
            os.close(os.open(".", os.O_TMPFILE | os.O_WRONLY, dir_fd=descriptor))  # a file without a name
        except OSError as error:
            # not all file systems have these; /proc and /sys have no new folders either
            if error.errno != errno.EOPNOTSUPP or not os.fstatvfs(descriptor).f_blocks:
                error.filename = str(path)
                raise


def close_to_others(path: Path, *, once_ours: str) -> None:
    """Revoke the write permission of group and others on the folder ``path``.

    Only if this user owns the folder and the file ``once_ours`` in it; any other folder
    is left as it is, and :func:`folder` still refuses it. Kubernetes' ``fsGroup``
    grants the volume's group that permission at each mount.

    :param once_ours: name of a file that proves that this user has used the folder.
    """
    with _walked(path) as descriptor:
        found, us = os.fstat(descriptor), os.geteuid()
        if found.st_uid != us or not found.st_mode & _OTHERS_WRITE:
            return
        with contextlib.suppress(FileNotFoundError):
            file = os.stat(once_ours, dir_fd=descriptor, follow_symlinks=False)
            if not stat.S_ISREG(file.st_mode) or file.st_uid != us:
                return
            with contextlib.suppress(PermissionError):  # a file system without modes: opening it fails then
                Path(f"/proc/self/fd/{descriptor}").chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)


@contextlib.contextmanager
def _walked(path: Path, *, make: bool = False) -> Iterator[int]:
    """Context manager: open a folder; yield its descriptor, closed after the block.

    The owner of the folder itself is not checked.

    :param make: create missing folders of the path.
    :raises NotPrivate: a symbolic link on the way is not this user's or root's.
    """
    descriptor = _walk(path, make=make)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _walk(path: Path, *, make: bool) -> int:
    """Open a folder, step by step from the root; return its descriptor (O_PATH).

    The caller closes it. The owner of the folder itself is not checked.

    :param make: create missing folders of the path.
    :raises NotPrivate: a symbolic link on the way is not this user's or root's.
    """
    todo = list(reversed(path.absolute().parts))
    links = 0
    descriptor = os.open(todo.pop(), _FOLDER)
    try:
        while todo:
            name = todo.pop()
            try:
                below = _step(descriptor, name, path, make=make)
            except NotADirectoryError:  # a link: _step() follows none
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
                target = _link(descriptor, name, path)
                todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                below = os.open("/" if target.is_absolute() else ".", _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _step(descriptor: int, name: str, path: Path, *, make: bool) -> int:
    """Open the folder ``name`` in an open folder; return its descriptor.

    :param descriptor: of the open folder. :param path: the whole path, for errors.
    :param make: create the folder if it is missing.
    :raises NotADirectoryError: it is a link or a file.
    """
    flags = _FOLDER | os.O_NOFOLLOW  # O_DIRECTORY triggers automounts
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except FileNotFoundError:
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.mkdir(name, 0o700, dir_fd=descriptor)
    return os.open(name, flags, dir_fd=descriptor)


def _link(descriptor: int, name: str, path: Path) -> Path:
    """Return the path to which the symbolic link ``name`` in an open folder leads.

    :param descriptor: of the open folder. :param path: the whole path, for errors.
    :raises NotPrivate: the link is of a user other than this one and root.
    :raises NotADirectoryError: it is not a link.
    """
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if found.st_uid not in (os.geteuid(), 0):
            raise NotPrivate(
                path, f'"{name}" on the way to it is a symbolic link of user {found.st_uid}', "have the link removed"
            )
        return Path(os.readlink("", dir_fd=link))  # by descriptor: another link may have its name by now
    finally:
        os.close(link)


def _check_folder(descriptor: int, path: Path) -> None:
    """Raise NotPrivate if an open folder is another user's, or others can write to it.

    A folder of root passes.

    :param path: of the folder, for the error.
    """
    found, us = os.fstat(descriptor), os.geteuid()
    if found.st_uid not in (us, 0):
        raise NotPrivate(path, f"it belongs to user {found.st_uid}, and this is user {us}", "have it removed")
    if found.st_mode & _OTHERS_WRITE:
        raise NotPrivate(
            path,
            f"others can write to it (its mode is {stat.S_IMODE(found.st_mode):04o})",
            f"chmod go-w {path}, or name a folder in it, which will be made",
        )


def open_file(path: Path, flags: int, *, make_folder: bool = False) -> int:
    """Open a regular file of this user or root; return a descriptor to be closed.

    Its folder must be private, as for :func:`folder`. A file of this user that is
    opened for writing gets the mode 0600.

    :param flags: as for :func:`os.open`.
    :param make_folder: create missing folders of the path.
    :raises NotPrivate: the file or its folder is another user's, or the file is a link.
    """
    with folder(path.parent, make=make_folder) as parent:
        return _open_in(parent, path, flags)


def _open_in(parent: int, path: Path, flags: int) -> int:
    """Open a file of this user or root in an open folder; return a descriptor.

    It may not be a link. Opened for writing, a file of this user gets the mode 0600.

    :param parent: descriptor of the folder. :param path: of the file: its name is
        opened, all of it is for errors. :param flags: as for :func:`os.open`.
    :raises NotPrivate: it is another user's, or not a regular file.
    """
    # Truncate only after the check; a pipe in its place must not block.
    careful = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path.name, careful, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(path, "it is a symbolic link", "remove it") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
            raise NotPrivate(path, f"it is not a regular file of this user (owner: user {found.st_uid})", "remove it")
        if flags & (os.O_WRONLY | os.O_RDWR):
            if found.st_mode & _OTHERS and found.st_uid == os.geteuid():
                os.fchmod(descriptor, 0o600)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(path: Path) -> bytes:
    """Return the content of a file of this user.

    :raises NotPrivate: the file or its folder is another user's, or the file is a link.
    :raises OSError: it is missing, or cannot be read.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Replace the whole content of the file by ``data``, in place, or create the file.

    Not atomic: a process that is killed meanwhile leaves a part of ``data``. For a file
    or folder that is not private to this user, raise as :func:`open_file` does.
    """
    _fill(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), data)


def create(path: Path, data: bytes) -> None:
    """Create a file with the content ``data`` and mode 0600; remove an old one first.

    :raises NotPrivate: the folder is another user's, or others can write to it.
    """
    with folder(path.parent) as parent:
        _create_in(parent, path, data)


def _create_in(parent: int, path: Path, data: bytes, *, sync: bool = False) -> None:
    """Create a file with this content in an open folder; remove an existing one first.

    :param parent: descriptor of the folder. :param path: of the file: its name is
        used, all of it is for errors. :param sync: wait until the data is on the disk.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path.name, dir_fd=parent)
    # O_EXCL: no other process has it open yet
    _fill(_open_in(parent, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), data, sync=sync)


def _fill(descriptor: int, data: bytes, offset: int = 0, *, sync: bool = False) -> None:
    """Write all of ``data`` at byte ``offset`` of an open file, and close the file.

    :param sync: wait until it is on the disk.
    :raises OSError: the disk is full; the descriptor is closed even then.
    """
    try:
        if os.pwrite(descriptor, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace a file atomically: write a new one beside it, ``PATH.new``, then rename.

    A write that fails leaves the old file as it was.

    :param sync: return when it would survive a crash of the machine. Blocks.
    :raises NotPrivate: the folder is another user's, or others can write to it.
    """
    beside = path.with_name(f"{path.name}.new")
    with folder(path.parent) as parent:
        _create_in(parent, beside, data, sync=sync)
        os.rename(beside.name, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        if sync:
            # the folder's entry must reach the disk, too
            here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
            try:
                os.fsync(here)
            finally:
                os.close(here)


def overwrite(path: Path, data: bytes, offset: int) -> None:
    """Overwrite bytes of an existing file from ``offset`` on, in place.

    That needs no room on the disk. For a file or folder that is not private to this
    user, raise as :func:`open_file` does.
    """
    _fill(open_file(path, os.O_WRONLY), data, offset)


def rename(path: Path, name: str) -> None:
    """Rename the file ``path`` to ``name`` in its folder; replace a file of that name.

    :raises NotPrivate: the folder is another user's, or others can write to it.
    """
    with folder(path.parent) as parent:
        os.rename(path.name, name, src_dir_fd=parent, dst_dir_fd=parent)


def remove(path: Path) -> None:
    """Remove the file at ``path``; do nothing if it is missing.

    :raises NotPrivate: its folder is another user's, or others can write to it.
    """
    with contextlib.suppress(FileNotFoundError), folder(path.parent) as parent:
        os.unlink(path.name, dir_fd=parent)


def remove_tree(path: Path) -> None:
    """Remove a folder of this user with its content, as far as that is possible.

    Links in it are removed, not followed. Never raise OSError.
    """
    with contextlib.suppress(OSError), folder(path) as root:
        # Not os.walk, which works by paths; not shutil, which is slow to import.
        for _, folders, files, here in os.fwalk(".", topdown=False, dir_fd=root):
            for name in (*files, *folders):
                with contextlib.suppress(OSError):  # not empty: part of its content could not be removed
                    try:
                        os.unlink(name, dir_fd=here)  # also a link to a folder
                    except IsADirectoryError:
                        os.rmdir(name, dir_fd=here)
    with contextlib.suppress(OSError):
        path.rmdir()
