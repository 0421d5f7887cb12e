"""LoRA adapters of a channel in a vLLM server: each version under a name of its own.

Each version is written as a PEFT checkpoint into a folder of its own, and loaded as
``NAME@VERSION``: vLLM keeps what it computed with an adapter by the adapter's name.
Nothing is paused. Requests that began with the version before end with it, so the name
before is unloaded, and its folder, which vLLM may read once more for them, stays until
the next version. An adapter that vLLM does not take is refused: the server goes on with
the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas import errors
from replicas.engine import PauseMode, Refused
from replicas.integrations.engine_server import NotDone
from replicas.integrations.vllm_verbs import VllmServer

if TYPE_CHECKING:
    from replicas.channel import Update

__all__ = ["VllmAdapters"]


class VllmAdapters(VllmServer):
    """A vLLM server started with ``--enable-lora``.

    :param folder: where adapters are written, which the server can read.
    :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
    """

    pauses = False

    def __init__(self, url: str, folder: Path, **more: Any) -> None:
        super().__init__(url, **more)
        self._folder = folder
        self._loaded: list[tuple[str, Path]] = []

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        pass

    def load(self, update: Update, timeout_s: float) -> None:
        name = f"{update.meta.get('adapter')}@{update.version}"
        folder = self._write(update, name)
        try:
            self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, timeout_s=timeout_s)
        except errors.SyncError as error:
            shutil.rmtree(folder)
            if isinstance(error, NotDone):
                self.raise_if_dying()
                raise Refused(error.message, phase="load", hint=error.hint) from error
            raise
        self._loaded.append((name, folder))

    def _write(self, update: Update, name: str) -> Path:
        """The adapter as PEFT saves it.

        :raises Refused: the version is no adapter.
        """
        from safetensors.torch import save_file

        config = update.meta.get("adapter_config")
        if not isinstance(config, str):
            raise Refused(f"version {update.version} is no adapter", phase="load", hint="publish(..., adapter=)")
        folder = self._folder / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        save_file({one: tensor.contiguous() for one, tensor in update}, folder / "adapter_model.safetensors")
        return folder

    def reset_caches(self, timeout_s: float) -> None:
        """Unload the version before: its name is what its memories are kept by."""
        for name, _ in self._loaded[:-1][-1:]:
            self.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s, serving=True)
        while len(self._loaded) > 2:
            shutil.rmtree(self._loaded.pop(0)[1])

    def resume(self, timeout_s: float) -> None:
        pass

    def model(self) -> str:
        return self._loaded[-1][0]
