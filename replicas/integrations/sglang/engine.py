"""SGLang's verbs: the HTTP routes by which a released server loads versions.

A version is loaded by ``/update_weights_from_disk``, from a folder whose weights are
the memory of the slot (:mod:`replicas.integrations.shared.model_folder`); the request
also carries the version's number, with which the server labels its answers.
(``/update_weight_version`` aborts all requests by default, and is not used.) Each
scheduler of the server reads the folder.

SGLang's pause mode ``in_place`` keeps the cache of the requests in flight, which then
cannot be cleared: prefixes of the old weights would stay forever. So ``keep`` is
``retract`` here: requests return to the queue, and are computed again from their own
tokens. ``wait`` is the lock that SGLang itself takes for a load: it waits for the
requests in flight, and holds back new ones until the load is done.

SGLang rolls a load that fails half-way back to the files of the same version: a
scheduler that cannot read them dies, and its server with it. Other failed loads may
leave any state, so the server is paused then, and loads once more.

``/health`` makes the server compute a token, which it cannot while it is paused. So
``/model_info`` is polled, which the API process answers, and ``/server_info``, which
the schedulers answer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicas import errors
from replicas.engine import PauseMode
from replicas.integrations.engine_server import RequestRefused
from replicas.integrations.http_engine import HttpEngine
from replicas.integrations.sglang.checksum import difference
from replicas.integrations.shared.model_folder import ModelFolder

if TYPE_CHECKING:
    from replicas.channel import Update

__all__ = ["OLDEST", "SglangEngine"]

logger = logging.getLogger("replicas.integrations.sglang")

OLDEST = (0, 5, 23)
"""The first release of SGLang with these control routes."""
WARM_UP = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
CALL_TIMEOUT_S = 60.0
NOT_FOLLOWED: Mapping[str, tuple[Any, str]] = {
    "tokenizer_worker_num": (1, "each tokenizer worker has a label and a lock of its own"),
    "nnodes": (1, "schedulers on other machines do not see the memory of a version here"),
    "disaggregation_mode": ("null", "prefixes that prefill servers have passed on cannot be taken back"),
    "speculative_draft_model_path": (None, "a version of the policy has no draft model"),
    "weight_cache_mode": ("off", "its weights are those of other servers, too"),
    "enable_lmcache": (False, "what LMCache keeps of old weights cannot be cleared"),
    "enable_flexkv": (False, "what FlexKV keeps of old weights cannot be cleared"),
    "enable_unified_cache_external_linker": (False, "what its store keeps of old weights cannot be cleared"),
}
"""Settings that a server must have to be followed, and why."""


class SglangEngine(HttpEngine):
    """Controls a SGLang server on this machine, over HTTP.

    :param complete: False: versions may lack parameters of the model.
    :param encodes_anew: whether the server caches no outputs of encoders (images,
        audio): ``SGLANG_VLM_CACHE_SIZE_MB=0``.
    :param scratch: parent of the server's model folder; default: the temporary folder.
    :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
    """

    api = "/model_info"
    watched = {"/model_info": 15.0, "/server_info": 30.0}
    titles = "sglang::"

    def __init__(
        self, url: str, *, complete: bool = True, encodes_anew: bool = False, scratch: Path | None = None, **more: Any
    ) -> None:
        """Store the server's address; send nothing yet.

        :param complete: whether versions must have all parameters of the model.
        :param encodes_anew: whether the server caches no outputs of encoders (images,
            audio).
        :param scratch: parent of the server's model folder; default: the temporary
            folder.
        :param more: as for :class:`replicas.integrations.http_engine.HttpEngine`.
        """
        super().__init__(url, **more)
        self._complete, self._encodes_anew, self._scratch = complete, encodes_anew, scratch
        self._folder: ModelFolder | None = None
        self._settings: dict[str, Any] = {}
        self._paused = False

    def read_identity(self) -> None:
        """Read SGLang's release and settings from the server, and create the folder
        that it will load versions from.

        :raises replicas.errors.UsageError: the server cannot be followed.
        """
        settings = self.server.call("GET", "/server_info")
        if not isinstance(settings, dict) or "model_path" not in settings:
            raise errors.UsageError(f"{self.server.url} is not a SGLang server", hint="check its /server_info")
        version = str(settings.get("version", ""))
        self.name = f"SGLang {version}".strip()
        found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if (0, 0, 0) < found < OLDEST:  # 0.0.0 is built from source
            oldest = ".".join(map(str, OLDEST))
            raise errors.UsageError(f"the server is {self.name}", hint=f"install SGLang {oldest} or newer")
        for name, (good, why) in NOT_FOLLOWED.items():
            if (given := settings.get(name, good)) not in (good, None):
                text = f"{self.name} with {name} = {given!r} cannot be followed: {why}"
                raise errors.UsageError(text, hint=f"start it without --{name.replace('_', '-')}")
        self._refuse_kept_encodings()
        self._settings = settings
        self._folder = ModelFolder(str(settings["model_path"]), complete=self._complete, parent=self._scratch)

    def _refuse_kept_encodings(self) -> None:
        """Ask the server about its model; raise UsageError if it caches outputs of
        encoders (of images or audio), which cannot be cleared after a load."""
        model = self.server.call("GET", "/model_info")
        understands = model.get("has_image_understanding") or model.get("has_audio_understanding")
        if understands and not self._encodes_anew:
            text = f"{self.name} keeps outputs of encoders by their inputs, and cannot clear them"
            raise errors.UsageError(text, hint="start it by `serve`, which sets SGLANG_VLM_CACHE_SIZE_MB=0")

    def _require_folder(self) -> ModelFolder:
        """Return the folder from which the server loads. Raise UsageError before
        :meth:`read_identity` has created it."""
        if self._folder is None:
            raise errors.UsageError("the engine is not up", hint="call wait_until_up() first")
        return self._folder

    def check(self, update: Update, timeout_s: float) -> str:
        """Compare the names, shapes and dtypes of the version ``update`` with the
        model's; return why it does not fit, or an empty text. The server is not asked,
        and ``timeout_s`` is not used."""
        return self._require_folder().misfit(update) or ""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Pause the server by a request, and wait for its answer.

        :param mode: what becomes of requests in flight: "keep" puts them back to be
            computed again, "abort" ends them. With "wait" nothing is sent here: the
            load itself waits for them.
        :param timeout_s: seconds for which the server may be idle before it answers;
            then raise SyncError.
        :raises replicas.errors.UsageError: mode "wait" with an external store.
        """
        if mode == "wait":
            if self._settings.get("hicache_storage_backend"):
                text = f"{self.name} cannot wait for requests: its external store is cleared in a pause only"
                raise errors.UsageError(text, hint='follow it with mode "keep" or "abort"')
            return  # load() waits
        self._pause("retract" if mode == "keep" else "abort", timeout_s)

    def _pause(self, how: str, timeout_s: float) -> None:
        """Record that the server is paused, also if the call fails; pause it by a
        request, and wait for the answer.

        :param how: SGLang's own mode, "retract" or "abort".
        :param timeout_s: seconds for which the server may be idle before it answers;
            then raise SyncError.
        """
        self._paused = True  # possibly even if the call fails
        self.post("/pause_generation", {"mode": how}, timeout_s=timeout_s, serving=True)

    def load(self, update: Update, timeout_s: float) -> None:
        """Link the version into the model folder, have the server load it from there,
        and wait for its answer.

        :param timeout_s: how long the server may be idle before it answers, or
            SyncError is raised.
        :raises RequestRefused: it does not load the version; it is left paused.
        """
        body = {
            "model_path": str(self._require_folder().link_version(update)),
            "load_format": "safetensors",
            "weight_version": str(update.version),
            "abort_all_requests": False,
            "flush_cache": True,
        }
        try:
            self.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        except RequestRefused:
            if not self._paused:
                self._pause("retract", timeout_s)
            raise
        self._require_folder().loaded(update)

    def reset_caches(self, timeout_s: float) -> None:
        """Clear the server's external store, if it has one, and wait for that. Its
        other caches were cleared by the load, which fails if a scheduler could not.

        (``/flush_cache`` would also make the server collect garbage, for seconds.)

        :param timeout_s: seconds for which the server may be idle before it answers;
            then raise SyncError.
        """
        if self._settings.get("hicache_storage_backend"):
            self.post("/hicache/storage-backend/clear", timeout_s=timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Ask the server to compute again, even if an earlier follower has paused it.

        Wait for its answer.

        :param timeout_s: how long it may be idle before it answers, or SyncError is
            raised.
        """
        # Always: a follower that was killed in a load has left the server paused.
        self.post("/continue_generation", {}, timeout_s=timeout_s)
        self._paused = False

    def warm_up(self, timeout_s: float) -> None:
        """Send a request and wait for the answer, so that the server compiles what
        requests need. A server that refuses it is only logged; SyncError is raised if
        it is gone.

        :param timeout_s: seconds for which the server may be idle before it answers.
        """
        try:
            self.post("/generate", WARM_UP, timeout_s=timeout_s, serving=True)
        except errors.SyncError as error:
            if reason := self.health():
                raise self.server_lost_error(reason) from error
            logger.info("going on without a warm-up request (the server may not generate text): %s", error)

    def version(self) -> int | None:
        """Ask the server which version it has loaded; return None if it reports
        none."""
        said = self.server.call("GET", "/model_info").get("weight_version")
        return int(said) if str(said).isdigit() else None

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        """Compare the server's tensors with the version, by requests; wait for the
        answers. Return "A, B differ" with names of tensors, an empty text if no
        difference was found, or None if none could be compared.

        On a CPU compare by ``/weights_checker``, else some rows of some tensors, if the
        server returns them (``/get_weights_by_name``).

        :param timeout_s: seconds for which the server may be idle before each answer.
        """

        def ask(path: str, body: dict[str, Any]) -> Any:
            """Send one request; return the decoded answer, or None if the server
            refuses it."""
            try:
                return self.post(path, body, timeout_s=timeout_s)
            except RequestRefused:  # not supported for this model
                return None

        return difference(dict(update.tensors()), ask, on_cpu=self._settings.get("device") == "cpu")

    def close(self) -> None:
        """Stop the health watch, and remove the model folder; the server keeps
        running."""
        super().close()
        if self._folder is not None:
            self._folder.close()
