"""Output files that the user names; they are written by a new file and a rename."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def resolve_output(path: Path) -> Path:
    """Return the path, with links resolved, to which a new file may be renamed.

    Nothing is written or created.

    :param path: the output file that the user named; it need not exist.
    :raises OSError: something other than a regular file is there, such as a folder, a
        pipe or ``/dev/null``, which the rename would replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    return Path(os.path.realpath(path))
