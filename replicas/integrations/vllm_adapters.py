"""LoRA adapters of a channel in a vLLM server: each version under a name of its own.

Each version is written as a PEFT checkpoint into its own folder, and loaded as
``NAME@VERSION``, as vLLM caches results by the adapter's name. Nothing is paused.
Requests that began with an older version end with it, so the previous name is unloaded,
but folders stay: a server with more adapters in use than ``--max-loras`` (1 by default)
reads a folder again at a later step, and its engine dies if it cannot. vLLM's metrics
say which adapters have requests in flight. An adapter that vLLM does not accept is
refused: the server keeps the previous one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas import errors
from replicas.engine import PauseMode, Refused
from replicas.integrations.engine_server import RequestRefused
from replicas.integrations.vllm_verbs import VllmServer

if TYPE_CHECKING:
    from replicas.channel import Update

__all__ = ["VllmAdapters"]

IN_FLIGHT = "vllm:lora_requests_info"
KEPT_UNSEEN = 32
"""Number of folders that stay if the server does not report which it needs."""


class VllmAdapters(VllmServer):
    """Loads LoRA adapters into a vLLM server started with ``--enable-lora``.

    :param folder: folder for the adapters, readable by the server.
    :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
    """

    pauses = False

    def __init__(self, url: str, folder: Path, **more: Any) -> None:
        """Store the server's address; send nothing yet.

        :param folder: folder for the adapters, readable by the server.
        :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
        """
        super().__init__(url, **more)
        self._folder = folder
        self._loaded: list[tuple[str, Path]] = []

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Do nothing: the server computes on during a load."""

    def load(self, update: Update, timeout_s: float) -> None:
        """Write the adapter of the version ``update`` to a new folder, have the server
        load it as ``NAME@VERSION``, and wait for its answer. If the server fails to,
        remove the folder.

        :param timeout_s: seconds for which the server may be idle before it answers.
        :raises Refused: the version is not an adapter, or the server does not accept
            it.
        """
        name = f"{update.meta.get('adapter')}@{update.version}"
        if not self._loaded:
            self._take_over(str(update.meta.get("adapter")), name, timeout_s)
        folder = self._write(update, name)
        try:
            self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, timeout_s=timeout_s)
        except errors.SyncError as error:
            shutil.rmtree(folder)
            if isinstance(error, RequestRefused):
                self.raise_if_dying()
                raise Refused(error.message, phase="load", hint=error.hint) from error
            raise
        self._loaded.append((name, folder))

    def _take_over(self, adapter: str, name: str, timeout_s: float) -> None:
        """At the first load ask the server for the versions of this adapter that an
        earlier follower has loaded, and record them, to unload them later. Have it
        unload ``name``, so that it can be loaded again.

        :param adapter: the adapter's plain name. :param name: the same, with
            "@VERSION".
        """
        for found in self.server.call("GET", "/v1/models")["data"]:
            left = str(found["id"])
            if left == name:
                self.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s, serving=True)
            elif left.rpartition("@")[0] == adapter and left.rpartition("@")[2].isdigit():
                self._loaded.append((left, self._folder / left))

    def _write(self, update: Update, name: str) -> Path:
        """Write the adapter as PEFT saves it, to a folder named ``name``; return the
        folder.

        :raises Refused: the version is not an adapter.
        """
        from safetensors.torch import save_file

        config = update.meta.get("adapter_config")
        if not isinstance(config, str):
            raise Refused(f"version {update.version} is not an adapter", phase="load", hint="publish(..., adapter=)")
        folder = self._folder / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
        tied = dict(update.manifest.aliases)  # a safetensors file has no bytes under two names
        tensors = {one: tensor.clone() if one in tied else tensor for one, tensor in update}
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    def reset_caches(self, timeout_s: float) -> None:
        """Have the server unload the adapter of the previous version, and with it the
        caches, which are kept by adapter. Remove the folders of versions before that
        one, except those that requests in flight still use, or, if the server does not
        report its requests, the last :data:`KEPT_UNSEEN`.

        :param timeout_s: seconds for which the server may be idle before it answers;
            then raise SyncError.
        """
        for name, _ in self._loaded[:-1][-1:]:
            self.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s, serving=True)
        older, newest = self._loaded[:-2], self._loaded[-2:]
        if not older:
            return
        used = self._adapters_in_flight()
        kept = older[-KEPT_UNSEEN:] if used is None else [one for one in older if one[0] in used]
        for one in older:
            if one not in kept and one[1].exists():
                shutil.rmtree(one[1])
        self._loaded = [*kept, *newest]

    def _adapters_in_flight(self) -> set[str] | None:
        """Return the names of the adapters that requests in flight use, or None if the
        server does not report them."""
        try:
            told = str(self.server.call("GET", "/metrics"))
        except RequestRefused:
            return None
        if f"# TYPE {IN_FLIGHT} " not in told:  # --disable-log-stats
            return None
        samples = re.findall(rf"^{IN_FLIGHT}\{{(.*)\}} (\S+)$", told, re.MULTILINE)
        _, newest = max(((float(at), labels) for labels, at in samples), default=(0.0, ""))
        found = re.findall(r'(?:running|waiting)_lora_adapters="([^"]*)"', newest)
        return {name for names in found for name in names.split(",")}

    def resume(self, timeout_s: float) -> None:
        """Do nothing: the server was not paused."""

    def model(self) -> str:
        """Return the name of the newest loaded adapter."""
        return self._loaded[-1][0]
