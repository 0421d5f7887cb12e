"""What `make gpu` does before the first test: says what this machine has, and unpacks
the wheels that came with the tree.

    python3 tests/gpu/prepare.py --site FOLDER [--wheels FOLDER]

It prints one line for each thing, and exits with 1 after all of them if something is
missing. Nothing of the machine's own Python is changed: packages go into ``--site``,
which the tests find through PYTHONPATH. A virtual environment would not do: one that is
made by the Python of another virtual environment, as images have it, does not see that
one's torch.

Standard library only, besides torch, which is asked what it can do.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["constraints", "main", "requirements", "unmet"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLDEST_TORCH = (2, 10)
FREE_GIB = 20
"""Some twenty processes that use the GPU at once, of which each takes half a gigabyte
for itself."""


def _names(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        name = line.partition("#")[0].strip()
        if name:
            yield name


def requirements() -> list[str]:
    """Distributions that the tests and the bench need beside torch and numpy."""
    return list(_names(HERE / "requirements.txt"))


def constraints() -> dict[str, str]:
    """The release of each that the project is tested with."""
    pins = (line.partition("==") for line in _names(ROOT / "constraints.txt"))
    return {_canonical(name): pin for name, _, pin in pins}


def _canonical(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def unmet(path: list[str]) -> list[str]:
    """Which of them are not to be found on ``path``."""
    found = {_canonical(one.name) for one in importlib.metadata.distributions(path=path) if one.name}
    return [name for name in requirements() if name not in found]


def install(wheels: Path, site: Path) -> str:
    """Unpack the wheels of this Python, unless they are there already. What is wrong,
    or an empty text."""
    names = sorted(path.name for path in wheels.glob("*.whl"))
    stamp, said = site / ".wheels", "\n".join((sys.version, *names))
    if stamp.is_file() and stamp.read_text() == said:
        return ""
    if importlib.util.find_spec("pip") is None:
        return f"{sys.executable} has no pip, which unpacks the wheels: name another one with make gpu GPU_PYTHON=..."
    pins = constraints()
    wanted = [f"{name}=={pins[name]}" for name in requirements()]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    where = ["--no-compile", "--upgrade", "--find-links", str(wheels), "--target", str(site)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run([*pip, *where, *wanted], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()
        return f"the wheels in {wheels} cannot be installed: {reason[-1] if reason else done.returncode}"
    stamp.write_text(said)
    return ""


def look(site: Path, wheels: Path) -> Iterator[tuple[str, str, str]]:
    """What, as it is found, and what is wrong with it (empty: nothing)."""
    fit = sys.version_info >= (3, 11)
    yield "python", sys.version.split()[0], "" if fit else "3.11 or newer is needed: make gpu GPU_PYTHON=..."
    yield from _look_at_packages(site, wheels)
    yield from _look_at_torch()


def _look_at_packages(site: Path, wheels: Path) -> Iterator[tuple[str, str, str]]:
    missing = unmet(sys.path)
    if wheels.is_dir():
        wrong = install(wheels, site)
        yield "wheels", str(wheels), wrong
        missing = unmet([str(site), *sys.path])
    elif missing:
        yield "wheels", f"no folder {wheels}", "make gpu-wheels fills it on a machine with a network"
    count = len(requirements())
    yield "packages", f"{count - len(missing)} of {count}", f"missing: {', '.join(missing)}" if missing else ""


def _look_at_torch() -> Iterator[tuple[str, str, str]]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a torch that is broken is as good as none; whatever it says is shown
        yield "torch", "none", f"this Python's torch cannot be imported: {error}"
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = f"{'.'.join(map(str, OLDEST_TORCH))} or newer is needed" if version < OLDEST_TORCH else ""
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}", old
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    release = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "none"  # type: ignore[no-untyped-call]  # torch leaves it untyped
    yield "NCCL", release, "" if nccl else "this torch is built without it"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        yield "driver", "none", str(error)
        return
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield (
            "GPU",
            "none",
            f"torch sees none; CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}",
        )
        return
    free, total = (nbytes / (1 << 30) for nbytes in torch.cuda.mem_get_info())
    properties = torch.cuda.get_device_properties(0)
    busy = "" if free >= FREE_GIB else f"{FREE_GIB} GiB must be free"
    yield "GPU", f"{properties.name} ({properties.uuid}), {free:.1f} of {total:.1f} GiB free", busy
    yield "cores", f"{len(os.sched_getaffinity(0))}", ""


def main() -> None:
    parser = argparse.ArgumentParser(description="What `make gpu` needs, and what of it is here.")
    parser.add_argument("--site", type=Path, required=True, help="where the packages go")
    parser.add_argument("--wheels", type=Path, default=ROOT / "gpu-wheels", help="default: gpu-wheels")
    options = parser.parse_args()
    wrong = 0
    for what, found, fault in look(options.site, options.wheels):
        wrong += bool(fault)
        print(f"{what:<10}{found}{f'  -- {fault}' if fault else ''}", flush=True)
    if wrong:
        sys.exit(f"make gpu: {wrong} thing{'s are' if wrong > 1 else ' is'} missing here; see tests/gpu/README.md")


if __name__ == "__main__":
    main()
