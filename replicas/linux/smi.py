"""Query the NVIDIA driver by subprocesses with a time limit, as a call may hang.

Run as a program, this file prints NVML's number of GPUs, or its error text with exit
code 1. Standard library only.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading

NVML = "libnvidia-ml.so.1"
_KILL_S = 0.2
_lock = threading.Lock()
_stuck: list[subprocess.Popen[str]] = []


def gpu_processes(timeout_s: float) -> list[tuple[int, str, str, str]]:
    """Ask nvidia-smi which processes use GPUs; return a row for each. Blocks.

    :returns: ``(pid, UUID of the GPU, MiB as text, command)`` each.
    :raises OSError: there is no nvidia-smi.
    :raises subprocess.CalledProcessError: it failed.
    :raises subprocess.TimeoutExpired: it does not answer within ``timeout_s``, or one
        started by an earlier call still hangs.
    """
    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise FileNotFoundError("nvidia-smi is not on PATH")
    command = [smi, "--query-compute-apps=pid,gpu_uuid,used_memory,process_name", "--format=csv,noheader,nounits"]
    with _lock:
        _stuck[:] = [one for one in _stuck if one.poll() is None]
        if _stuck:
            raise subprocess.TimeoutExpired(command, timeout_s)
    code, text = ask(command, timeout_s)
    if code != 0:
        raise subprocess.CalledProcessError(code, command)
    found = (([word.strip() for word in line.split(",", 3)] + [""] * 4)[:4] for line in text.splitlines())
    return [(int(pid), gpu, used, command) for pid, gpu, used, command in found if pid.isdigit()]


def ask(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Run a command and wait for its end; return its exit code and output.

    Its stdin is empty, and its stderr is dropped.

    :raises subprocess.TimeoutExpired: it took longer than ``timeout_s``; it was sent
        SIGKILL.
    """
    null = subprocess.DEVNULL
    asked = subprocess.Popen(command, cwd="/", stdin=null, stdout=subprocess.PIPE, stderr=null, errors="replace")
    assert asked.stdout is not None
    try:
        text, _ = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.stdout.close()
        try:
            asked.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            with _lock:
                _stuck.append(asked)  # a later call reaps it, once the driver returns
        raise
    return asked.returncode, text


def main() -> int:
    """Print the number of GPUs, or NVML's error; return the exit code, 0 or 1.

    :raises OSError: there is no NVML library.
    """
    nvml = ctypes.CDLL(NVML)
    count = ctypes.c_uint()
    code = nvml.nvmlInit_v2()
    if code == 0:
        code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    if code != 0:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        print(nvml.nvmlErrorString(code).decode())
        return 1
    print(count.value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
