"""Let SGLang's released wheel for GPUs start on a CPU: on ``PYTHONPATH`` of its
processes.

SGLang imports packages at its start that exist for GPUs only (``sgl_kernel``), or whose
wheels bring CUDA (``torchvision``), and calls nothing of them for a text model with
``--device cpu``. When SGLang itself asks for one of them it gets an empty stand-in;
everybody else gets what is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

NAMES = {"IPython", "IPython.display", "sgl_kernel", "torchvision", "torchvision.io", "torchvision.transforms"}
NAMES |= {"torchvision.transforms.functional"}


class _StandIn(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES:
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asks = "/sglang/" in frame.f_code.co_filename
        return ModuleSpec(fullname, _StandIn(), is_package=True) if asks else None


sys.meta_path.append(_Finder())
