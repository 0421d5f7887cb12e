"""An environment for what the library is compared with: torchft, Ray, supervisord and
circus.

``python -m bench.peers`` makes it inside the project's own environment
(``.venv/peers``), with the packages of ``peers.txt``. It sees the project's packages
too, so that everybody runs the same torch, and it keeps those of the peers away from
the project.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

__all__ = ["HOW", "PEERS", "install", "python_with"]

HOW = "make bench-peers"
FOLDER = Path(__file__).resolve().parent
PEERS = Path(sys.prefix) / "peers"


def python_with(module: str, peers: Path = PEERS) -> str | None:
    """The interpreter that can import ``module``: this one, or that of the peers; None:
    it is not installed."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    found = _packages(peers) / module
    return str(peers / "bin" / "python") if found.is_dir() else None


def _packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))


def install() -> None:
    """Make the environment, or bring it up to date."""
    venv.create(PEERS, with_pip=True, symlinks=True)
    own = sysconfig.get_path("purelib")
    (_packages(PEERS) / "project.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    pip = (str(PEERS / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    constraints, requirements = FOLDER.parent / "constraints.txt", FOLDER / "peers.txt"
    subprocess.run((*pip, "--constraint", str(constraints), "--requirement", str(requirements)), check=True)


if __name__ == "__main__":
    install()
