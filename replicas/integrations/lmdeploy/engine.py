"""LMDeploy's verbs.

``/update_weights`` takes tensors as a pickled list of names and calls: each process of
the server makes each call, with the processor's number as the seventh argument, and
loads the result. LMDeploy means this for handles of CUDA memory. Here the call is
:func:`replicas.integrations.shared.model_folder.read_tensor`, which reads the tensor
out of the slot's own memory: the follower needs no GPU, and only names go over HTTP. So
the server has to be on this machine, with the same user and this package in its
environment.

A server takes weights while it sleeps, and computes nothing then: ``/sleep`` aborts all
requests, and frees the KV cache. Requests can neither be kept nor waited for: the pause
mode is ``abort``. The index of cached prefixes outlives the sleep: a server with
``--enable-prefix-caching`` would answer from freed memory, so start it without.

The server reports neither a version nor a checksum of what it has loaded.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from replicas import errors
from replicas.engine import PauseMode
from replicas.integrations.http_engine import HttpEngine
from replicas.integrations.shared.model_folder import ModelSpecs, read_tensor

if TYPE_CHECKING:
    from replicas.channel import Update

__all__ = ["LmdeployEngine"]

LAYER = re.compile(r"\blayers\.\d+\.")


class LmdeployEngine(HttpEngine):
    """Controls a server of ``lmdeploy serve api_server`` on this machine.

    :param model: path or name of the model, with whose files versions are compared;
        default: the first version that was loaded.
    :param complete: False: versions may lack parameters of the model.
    :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
    """

    name = "LMDeploy"

    def __init__(self, url: str, *, model: str = "", complete: bool = True, **more: Any) -> None:
        """Read the specs of the model's files, if they are found here; send nothing
        yet.

        :param model: path or name of the model, with whose files versions are compared;
            default: the first version that was loaded.
        :param complete: whether versions must have all parameters of the model.
        :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
        """
        super().__init__(url, **more)
        self._specs = ModelSpecs(model, complete=complete)

    def read_identity(self) -> None:
        """Check by a request that the server is LMDeploy's, and read nothing from it.

        :raises replicas.errors.UsageError: it is another server.
        """
        self._sleeps()

    def _sleeps(self) -> bool:
        """Ask the server; return True if it sleeps. Raises UsageError for another
        answer."""
        answer = self.server.call("GET", "/is_sleeping")
        if not isinstance(answer, dict) or not isinstance(answer.get("is_sleeping"), bool):
            raise errors.UsageError(f"{self.server.url} is not an LMDeploy server", hint="check its /is_sleeping")
        return bool(answer["is_sleeping"])

    def check(self, update: Update, timeout_s: float) -> str:
        """Compare the names, shapes and dtypes of the version ``update`` with the
        model's; return why it does not fit, or an empty text. The server is not asked,
        and ``timeout_s`` is not used."""
        return self._specs.misfit(update) or ""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Put the server to sleep, which aborts its requests, then wake its weights
        only. Wait for both answers.

        :param mode: of requests in flight; only ``"abort"`` is possible.
        :param timeout_s: how long the server may be idle before it answers each
            request, or SyncError is raised.
        :raises replicas.errors.UsageError: the mode is not ``"abort"``.
        """
        if mode != "abort":
            text = f"{self.name} cannot {mode} requests: it aborts them when it sleeps, to take weights"
            raise errors.UsageError(text, hint='follow it with mode "abort"')
        if not self._sleeps():  # it sleeps with --empty-init, or if an earlier follower left it so
            self.post("/sleep", {}, query={"level": "1"}, timeout_s=timeout_s)
        self.post("/wakeup", {}, query={"tags": "weights"}, timeout_s=timeout_s)

    def load(self, update: Update, timeout_s: float) -> None:
        """Have the server read the memory of the version ``update``, and wait: one
        request for each layer, as some engines of LMDeploy require. An error may leave
        the server with a part of the version.

        :param timeout_s: seconds for which the server may be idle in each request.
        """
        parts = [list(part) for _, part in groupby(_calls(update), key=lambda call: _layer(call[0]))]
        for number, part in enumerate(parts, 1):
            stream = io.BytesIO()
            ForkingPickler(stream).dump(part)
            text = base64.b64encode(stream.getvalue()).decode()
            body = {"serialized_named_tensors": text, "finished": number == len(parts)}
            self.post("/update_weights", body, timeout_s=timeout_s)
        self._specs.loaded(update)

    def reset_caches(self, timeout_s: float) -> None:
        """Do nothing: the sleep has freed the cache, and waking makes an empty one."""

    def resume(self, timeout_s: float) -> None:
        """Wake the server, with an empty cache, and wait for its answer. Raises
        SyncError if it still sleeps.

        :param timeout_s: how many seconds it may be idle before it answers.
        """
        self.post("/wakeup", {}, query={"tags": "kv_cache"}, timeout_s=timeout_s)
        if self._sleeps():
            raise self.server_lost_error(f"{self.name} still sleeps: {self.server.url} has refused to wake")


def _layer(name: str) -> str:
    """Return the part of a tensor's name up to its layer's number, such as
    ``model.layers.3.``, or an empty text."""
    found = LAYER.search(name)
    return name[: found.end()] if found else ""


def _calls(update: Update) -> Iterator[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    """Yield (name, call) of each tensor of the version, for the server to make: call is
    (:func:`read_tensor`, its arguments). Tensors of a layer follow each other; tied
    ones come under each name."""
    manifest, path, start = update.manifest, update.path, update.manifest.data_offset
    places = {spec.name: (spec, offset) for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True)}
    named = {**{name: name for name in places}, **dict(manifest.aliases)}
    for name in sorted(named, key=_layer):
        spec, offset = places[named[name]]
        yield name, (read_tensor, (path, start + offset, spec.nbytes, spec.dtype, spec.shape, None, None))
