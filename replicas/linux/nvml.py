"""Program that prints NVML's number of GPUs, or its error text with exit code 1.

A process of its own, since a broken driver may never answer, and a call into it cannot
be cancelled. Standard library only.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["LIBRARY", "main"]

LIBRARY = "libnvidia-ml.so.1"


def main() -> int:
    nvml = ctypes.CDLL(LIBRARY)
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
