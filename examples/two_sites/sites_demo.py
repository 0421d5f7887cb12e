"""`make demo-archive`: train at one site, evaluate at another, an archive between them.

    python examples/two_sites/sites_demo.py [--out DIR]

Two supervisors on this machine that know nothing of each other: what they share is a
folder, in place of a bucket. The replica that writes the archive is killed on the way.
Exits with 1 if site b has not evaluated the last step, or got other bytes than site a
published under that step.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from replicas.archive import ArchiveKey

HERE = Path(__file__).resolve().parent
LIMIT_S = 90.0
STEPS, KILL_AT = 20, 5
T = TypeVar("T")


def until(found: Callable[[], T | None], what: str) -> T:
    """Return the first value of ``found`` that is true."""
    end = time.monotonic() + LIMIT_S
    while not (value := found()):
        if time.monotonic() > end:
            sys.exit(f"FAILED: not within {LIMIT_S:g} s: {what}")
        time.sleep(0.1)
    return value


@contextmanager
def site(folder: Path, name: str, text: str, *programs: str) -> Iterator[Path]:
    """Run a supervisor in a folder of its own; yield the folder of its logs."""
    place = folder / name
    place.mkdir(parents=True)
    for program in programs:
        shutil.copy(HERE / program, place)
    (place / "run.toml").write_text(text + '[control]\nlisten = "127.0.0.1:0"\n')
    with (place / "supervisor.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "replicas.supervisor", "run.toml"], cwd=place, stderr=log)
    try:
        yield place / ".replicas" / f"site-{name}" / "logs"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def steps(logs: Path, group: str) -> dict[int, str]:
    """Return the digest of each step that a replica's log names."""
    text = "".join(path.read_text() for path in logs.glob(f"{group}/0/gen-*/rank-0.log"))
    return {int(step): digest for step, digest in re.findall(r"step (\d+) is .*digest (\w+)", text)}


def writer_pid(logs: Path) -> int | None:
    """Return the pid of the process that writes the archive."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here, words = (path / "cwd").resolve() == logs.parents[2], (path / "cmdline").read_bytes()
        except OSError:
            continue
        if here and b"\0archive\0" in words and b"replicas" in words:
            return int(path.name)
    return None


def demo(out: Path) -> None:
    """Run both sites, and say what happens."""
    began, archive = time.monotonic(), out / "archive"

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)

    key, url = ArchiveKey.of_file(out / "archive.pem"), f"file://{archive}"
    known = {"file:///tmp/replicas-archive": url, '"archive.pem"': f'"{out}/archive.pem"'}
    texts = {name: (HERE / f"{name}.toml").read_text() for name in "ab"}
    known[re.findall(r"ed25519:\w+", texts["b"])[0]] = key.public
    for old, new in known.items():
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    with ExitStack() as stack:
        a = stack.enter_context(site(out, "a", texts["a"], "train.py"))
        b = stack.enter_context(site(out, "b", texts["b"], "evaluate.py"))
        say("two supervisors run: site a trains and archives, site b evaluates what is in the archive")
        first = until(lambda: steps(b, "evaluation"), "site b evaluates")
        say(f"site b has evaluated step {min(first)}")
        until(lambda: max(steps(b, "evaluation")) >= KILL_AT, f"site b evaluates step {KILL_AT}")
        os.kill(until(lambda: writer_pid(a), "a process that writes the archive"), signal.SIGKILL)
        say(f"kill -9 of the process that writes the archive, at step {max(steps(a, 'trainer'))}")
        until(lambda: STEPS in steps(a, "trainer"), "site a trains to its end")
        say(f"site a has trained {STEPS} steps, and was not held up")
        until(lambda: STEPS in steps(b, "evaluation"), "site b evaluates the last step")
        say(f"site b has evaluated step {STEPS}")
        published, evaluated = steps(a, "trainer"), steps(b, "evaluation")
    if wrong := {step for step, digest in evaluated.items() if published[step] != digest}:
        sys.exit(f"FAILED: site b got other bytes in steps {sorted(wrong)}")
    stored = sum(path.stat().st_size for path in archive.rglob("*") if path.is_file())
    whole = next(archive.rglob("*.safetensors")).stat().st_size
    say(f"{len(evaluated)} of {STEPS} versions were evaluated, each bit for bit what was published")
    say(f"the archive keeps 5 versions in {stored / whole:.2f} times the bytes of one")
    print(f"logs, the archive and its key are in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train at one site, evaluate at another.")
    parser.add_argument("--out", type=Path, default=Path("demo-output") / "two-sites")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    demo(out)


if __name__ == "__main__":
    main()
