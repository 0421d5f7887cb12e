"""Files that the user names: what a rename may replace.

Covers: common/outputs.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replicas.common.outputs import resolve_output


def test_a_file_is_itself_and_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/second")
    (tmp_path / "folder" / "second").symlink_to("file")
    target = tmp_path / "folder" / "file"
    assert resolve_output(tmp_path / "new") == tmp_path / "new"
    assert resolve_output(tmp_path / "link") == target
    target.touch()
    assert resolve_output(target) == resolve_output(tmp_path / "link") == target


def test_what_a_rename_would_destroy_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OSError, match="not a regular file"):
            resolve_output(path)
