"""What a build does beside packing files.

``replicas/weights/copies/streaming.c`` is compiled where there is a C compiler; without
one the package works, and copies slower. A wheel has the folder ``services``, which
``replicas --services`` finds. And the README, whose links are relative to
the repository, gets absolute ones for the package index.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCE = Path("replicas/weights/copies/streaming.c")
LIBRARY = Path("replicas/weights/copies/_streaming.so")
TIMEOUT_S = 120.0
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)")


class AbsoluteLinks(MetadataHookInterface):
    """README.md as the package index shows it."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        text = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, source: str) -> str:
    """Markdown whose links lead to files of the repository that is at ``source``."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["picture"] else "tree" if found["path"].endswith("/") else "blob"
        return f"{found['picture']}[{found['text']}]({source}/{kind}/main/{found['path']})"

    return LINK.sub(link, text)


class StreamingCopies(BuildHookInterface):
    """A shared library without any dependency on Python, beside its source; also for
    editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version != "editable":  # an installation in place finds them beside the package
            build_data["force_include"][str(root / "services")] = "replicas/services"
        if not compiled(root / SOURCE, root / LIBRARY):
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag((root / LIBRARY).read_bytes())}"


def platform_tag(library: bytes) -> str:
    """The platforms on which the library can be loaded, as PEP 600 names them.

    It needs nothing but glibc, of the newest release among those that its symbols name:
    here that of 2014, whatever release it was linked with.
    """
    machine = sysconfig.get_platform().removeprefix("linux-").replace("-", "_")
    needs = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    if not needs or platform.libc_ver()[0] != "glibc":
        return f"linux_{machine}"
    return "manylinux_{}_{}_{}".format(*max((2, 17), *needs), machine)


def compiled(source: Path, library: Path) -> bool:
    """Whether ``library`` was made. A compiler that fails is told of, and is no failure
    of the installation."""
    library.unlink(missing_ok=True)
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return False
    fresh = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-o", str(fresh), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        fresh.rename(library)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{source} was not compiled, copies will be slower: {error}", file=sys.stderr)
        fresh.unlink(missing_ok=True)
        return False
    return True
