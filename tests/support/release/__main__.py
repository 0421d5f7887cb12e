"""Build a release and check it: ``python -m tests.support.release`` (``make dist``)."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.release import SERVICE_FILES, relative_links, requirements, wrong_in_sdist
from tests.support.root import ROOT

DIST = ROOT / "dist"
TOOLS, USER = ROOT / ".venv" / "dist", ROOT / ".venv" / "user"
TOOL_NAMES = ("build", "twine", "auditwheel", "hatchling", "editables")
PROGRAM = ROOT / "tests" / "support" / "release" / "user_program.py"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
STARTS = 15
IMPORT_MS = 50.0
_TIMEOUT_S = 600.0
IMPORT = """
import sys, time
wall, cpu = time.perf_counter(), time.process_time()
import replicas
print((time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000)
assert "torch" not in sys.modules and "numpy" not in sys.modules, "an import of replicas alone"
"""
HELPER = "from replicas.memory.lines import _library as helper; assert helper is not None, 'the helper is not loaded'"


def say(text: str) -> None:
    print(f"dist: {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Its output, or the end of this program with what it said."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(f"dist: {' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def need(problems: Sequence[str]) -> None:
    if problems:
        sys.exit("dist: " + "\ndist: ".join(problems))


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """The Python of an environment that has these packages, in the pinned versions."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", "--without-pip", folder)
    run(*PIP, "--python", python, "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)
    return python


def build(python: Path) -> tuple[Path, Path]:
    """The sdist and the wheel that was made from it."""
    for old in DIST.glob("torch_replicas-*"):
        old.unlink()
    run(python, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def look_into(sdist: Path, wheel: Path) -> str:
    """The metadata, when sdist and wheel have what they should."""
    with tarfile.open(sdist) as archive:
        names = [one.name.partition("/")[2] for one in archive.getmembers()]
    need(wrong_in_sdist(names))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        outside = {one.partition("/")[0] for one in archive.namelist()} - {"replicas", name.partition("/")[0]}
    need([f"{one} is in the wheel" for one in sorted(outside)])
    need([f"{link} is no absolute link" for link in relative_links(metadata)])
    say(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size // 1024} KiB; no tests")
    return metadata


def check_platform(python: Path, wheel: Path) -> bool:
    """Whether the wheel has the helper; if it has, for which Linux is checked."""
    if wheel.name.endswith("-any.whl"):
        say(f"{wheel.name}: WITHOUT the compiled helper, as there is no C compiler here: not to be uploaded")
        return False
    told = " ".join(run(python, "-m", "auditwheel", "show", wheel).split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', told)
    tag = wheel.stem.rpartition("-")[2]
    expected = f"manylinux_2_17_{sysconfig.get_platform().removeprefix('linux-').replace('-', '_')}"
    if found is None or not (found[1] == tag == expected):
        need([f"{wheel.name} is for {tag}, auditwheel says: {told}; expected is {expected}"])
    say(f"{wheel.name}: for each Linux from glibc 2.17 on")
    return True


def install(wheel: Path, metadata: str) -> Path:
    """The Python of an environment with the wheel, and what it requires but torch."""
    shutil.rmtree(USER, ignore_errors=True)
    python = environment(USER, [one for one in requirements(metadata) if not one.startswith("torch")])
    run(*PIP, "--python", python, "install", "--quiet", "--no-deps", wheel)
    return python


def check_import(python: Path, folder: Path) -> None:
    """Bounded is the time on a core: other programs of the machine hardly change it."""
    times = [tuple(map(float, run(python, "-c", IMPORT, cwd=folder).split())) for _ in range(STARTS)]
    wall_ms, cpu_ms = (statistics.median(one) for one in zip(*times, strict=True))
    say(f"import replicas: {wall_ms:.0f} ms, {cpu_ms:.0f} ms of a core (medians of {STARTS} starts)")
    need([f"an import may take {IMPORT_MS:.0f} ms of a core"] if cpu_ms > IMPORT_MS else [])


def check_program(python: Path, folder: Path) -> None:
    """A user's program, with torch: its types, and what it does."""
    here = Path(sysconfig.get_path("purelib"))
    there = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(there) / "torch-of-the-project.pth").write_text(f"{here}\n")
    shutil.copy(PROGRAM, folder)
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--config-file", "/dev/null"]
    mypy += ["--python-executable", python, "--cache-dir", TOOLS / "mypy"]
    say(f"mypy --strict {PROGRAM.name}: {run(*mypy, PROGRAM.name, cwd=folder).strip()}")
    where = run(python, "-c", "import replicas; print(replicas.__file__)", cwd=folder).strip()
    need([] if where.startswith(there) else [f"replicas was imported from {where}"])
    say(f"{PROGRAM.name}: {run(python, PROGRAM.name, cwd=folder).strip()}")


def main() -> None:
    tools = environment(TOOLS, TOOL_NAMES)
    sdist, wheel = build(tools)
    metadata = look_into(sdist, wheel)
    run(tools, "-m", "twine", "check", "--strict", sdist, wheel)
    say("twine check --strict: passed")
    helper = check_platform(tools, wheel)
    python = install(wheel, metadata)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if helper:
            run(python, "-c", HELPER, cwd=folder)
        check_import(python, folder)
        shown = run(USER / "bin" / "replicas", "--help", cwd=folder)
        need([] if "replicas [OPTIONS] COMMAND" in shown else [f"replicas --help says: {shown}"])
        services = Path(run(USER / "bin" / "replicas", "--services", cwd=folder).strip())
        need([f"{one} is not in {services}" for one in SERVICE_FILES if not (services / one).is_file()])
        need([] if services.is_relative_to(USER) else [f"replicas --services names {services}"])
        run(USER / "bin" / "replicas", "report", "--demo", cwd=folder)
        say("replicas --help, report --demo: work without torch")
        check_program(python, folder)
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    if ".example/" in source:
        say(f"before an upload: {source} in pyproject.toml and services/supervisor is a placeholder")


if __name__ == "__main__":
    main()
