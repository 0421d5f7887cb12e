"""vLLM's verbs: the HTTP routes by which a released server loads versions.

Its workers are ranks of the server's replica, and receive on their own
(:mod:`replicas.integrations.vllm_worker.engine`); a request carries the number of the
version. ``/health`` is answered by vLLM's API process, even when its engine is frozen;
``/is_paused`` is answered by the engine, but only between two steps. The first request
that asks for log-probabilities makes vLLM compile, for a minute on a busy machine: the
follower sends one before it opens the gate.
"""

from __future__ import annotations

import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any

from replicas import errors
from replicas.engine import Identity, PauseMode
from replicas.integrations.engine_server import API, RequestRefused
from replicas.integrations.http_engine import HttpEngine

if TYPE_CHECKING:
    from replicas.channel import Update

__all__ = ["VllmEngine", "VllmServer", "release_of"]

logger = logging.getLogger("replicas.integrations.vllm")

OLDEST = (0, 29)
"""The first release of vLLM with these control routes."""
WARM_UP = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 1.0, "logprobs": 1}


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of vLLM's version, or () for an unknown one.

    :raises UsageError: the release is too old: it has other control routes.
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if len(found) < 2 or found == (0, 0):  # perhaps built from source
        return ()
    if found < OLDEST:
        raise errors.UsageError(
            f"the server is vLLM {version}, which has other control routes",
            hint=f"install vLLM {'.'.join(map(str, OLDEST))} or newer (tested: 0.32)",
        )
    return found


class VllmServer(HttpEngine):
    """Controls a vLLM server over HTTP: base of the classes that load weights and
    that load adapters."""

    watched = {API: 15.0, "/is_paused": 30.0}

    def read_identity(self) -> None:
        """Read vLLM's release from the server, into ``name``. Raises UsageError for one
        that is too old."""
        answer = self.server.call("GET", "/version")
        version = str(answer.get("version", "")) if isinstance(answer, dict) else ""
        release_of(version)
        self.name = f"vLLM {version}".strip()

    def warm_up(self, timeout_s: float) -> None:
        """Send a request and wait for the answer, so that the server compiles what
        requests need. A server that refuses it is only logged; SyncError is raised if
        it is gone.

        :param timeout_s: seconds for which the server may be idle before it answers.
        """
        try:
            self.post("/v1/completions", {"model": self.model(), **WARM_UP}, timeout_s=timeout_s, serving=True)
        except (errors.SyncError, KeyError, IndexError, TypeError) as error:
            if reason := self.health():
                raise self.server_lost_error(reason) from error
            logger.info("going on without a warm-up request (the server may not serve completions): %s", error)

    def model(self) -> str:
        """Return the name, read from the server, by which requests select the served
        model."""
        return str(self.server.call("GET", "/v1/models")["data"][0]["id"])


class VllmEngine(VllmServer):
    """Controls a vLLM server with the weight-transfer backend ``"replicas"``.

    :param complete: False: versions may lack parameters of the model.
    :param patches: whether the workers may write only the changes of a version.
    :param more: as for :class:`HttpEngine`.
    """

    def __init__(self, url: str, *, complete: bool = True, patches: bool = False, **more: Any) -> None:
        """Store the server's address; send nothing yet.

        :param complete: whether versions must have all parameters of the model.
        :param patches: whether the workers may write only the changes of a version.
        :param more: as for :class:`HttpEngine`.
        """
        super().__init__(url, **more)
        self._complete, self._patches = complete, patches
        self._open = False
        self._version = 0

    def read_identity(self) -> None:
        """Read vLLM's release and the number of its workers from the server."""
        super().read_identity()
        self.workers = self.server.call("GET", "/get_world_size")["world_size"]

    def attach(self, identity: Identity, timeout_s: float) -> None:
        """Have the server's workers join the channel, and wait until they have joined.

        They are ranks from 1 of the replica that the follower is rank 0 of. An update
        that an earlier follower left open in them is ended first.

        :param identity: channel, replica and coordinator, as the follower has joined.
        :param timeout_s: how long the server may be idle before it answers, or
            SyncError is raised.
        """
        info = {"channel": identity.channel, "world_size": identity.world_size, "complete": self._complete}
        if self._patches:
            info["patches"] = True
        if not self.has_gate:  # the server was started before this follower
            self._end_open_update(timeout_s)
        info = {"init_info": {**info, **identity.join, "replica": identity.replica}}
        self.post("/init_weight_transfer_engine", info, timeout_s=timeout_s)

    def check(self, update: Update, timeout_s: float) -> str:
        """Have the only worker try the version, without a load; return why it does not
        fit the model, or an empty text. With several workers send nothing, and return
        an empty text: their load finds a misfit.

        A version that does not fit is refused by the worker; one that fits stays open
        there.

        :param timeout_s: seconds for which the server may be idle in each request.
        """
        if self.workers > 1:
            # After an error vLLM does not read the replies of other workers, and takes
            # them for those to its next calls. With several workers the load itself
            # finds a misfit, and the server is restarted.
            return ""
        self.post("/start_weight_update", timeout_s=timeout_s)
        try:
            self._update(update.version, timeout_s, check=True)
        except RequestRefused as error:
            self.raise_if_dying()
            self._end_open_update(timeout_s, refuse="another worker of the server cannot load this version")
            return error.message
        self._end_open_update(timeout_s)
        return ""

    def drop(self, update: Update, reason: str, timeout_s: float) -> None:
        """Have the only worker report the version that :meth:`check` has opened there
        as refused, for this reason; with several workers do nothing.

        :param timeout_s: seconds for which the server may be idle before it answers.
        """
        if self.workers == 1:  # as for check
            self._end_open_update(timeout_s, refuse=reason)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Pause the server: send a request, and wait for the answer.

        :param mode: requests in flight are kept, waited for, or aborted.
        :param timeout_s: how long the server may be idle before it answers, or
            SyncError is raised.
        """
        self.post("/pause", query={"mode": mode}, timeout_s=timeout_s, serving=True)

    def load(self, update: Update, timeout_s: float) -> None:
        """Have the workers receive and load the version of ``update``, and wait for
        that.

        The update stays open in them until :meth:`reset_caches`.

        :param timeout_s: how long the server may be idle before it answers each of two
            requests, or SyncError is raised.
        """
        if self._open:
            self._end_open_update(timeout_s)
        self._open = True
        self.post("/start_weight_update", timeout_s=timeout_s)
        self._update(update.version, timeout_s)
        self._version = update.version

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        """Have each worker compare a sample of its tensors with the version, and wait.
        Return why they differ, or an empty text if no difference was found; never None.
        The workers' logs say how much could be compared.

        :param timeout_s: seconds for which the server may be idle before it answers.
        """
        try:
            self._update(update.version, timeout_s, prove=True)
        except RequestRefused as error:
            self.raise_if_dying()
            return error.message
        return ""

    def _update(self, version: int, timeout_s: float, **more: Any) -> None:
        """Ask the workers to receive and load the version with this number, and wait
        for their answer.

        :param timeout_s: how long the server may be idle before it answers. The workers
            get half of it to receive the version.
        :param more: what the workers do instead: ``check`` (only check that it fits),
            ``prove`` (compare it with the server's tensors) or ``refuse`` (a reason).
        :raises replicas.errors.SyncError: the server answers with an error, or not in
            time.
        """
        info = {"version": version, "timeout_s": timeout_s / 2, **more}
        self.post("/update_weights", {"update_info": info}, timeout_s=timeout_s)

    def _end_open_update(self, timeout_s: float, refuse: str = "") -> None:
        """End the weight update that vLLM has begun for an earlier call, or for a
        follower that is dead; do nothing if none is under way, or if vLLM does not
        answer.

        :param timeout_s: seconds for which vLLM may be idle before it answers.
        :param refuse: reason for which the workers report the version that they hold
            open as refused, and release it; empty: they keep the version open, for a
            later load.
        """
        with contextlib.suppress(errors.SyncError):  # the answer is always an error: ended, or none open
            self._update(0, timeout_s, refuse=refuse)

    def reset_caches(self, timeout_s: float) -> None:
        """Have the workers end the update (they report the version as loaded), then
        reset the caches of encoders and prefixes, and of an external store.

        If the prefix cache is in use by requests that the pause has kept, reset it
        nevertheless: those requests are computed again.

        :param timeout_s: seconds for which the server may be idle in each request.
        :raises replicas.errors.SyncError: the prefix cache cannot be reset.
        """
        self.post("/finish_weight_update", {"weight_version": str(self._version)}, timeout_s=timeout_s)
        self._open = False
        self.post("/reset_encoder_cache", timeout_s=timeout_s)
        for running in ("false", "true"):
            query = {"reset_running_requests": running, "reset_external": "true"}
            answer = self.post("/reset_prefix_cache", query=query, timeout_s=timeout_s)
            if isinstance(answer, dict) and answer.get("success"):
                return
        raise self.server_lost_error("the prefix cache of the old version could not be reset")

    def resume(self, timeout_s: float) -> None:
        """Let a paused server compute again: send a request, and wait for the answer.

        :param timeout_s: how long it may be idle before it answers, or SyncError is
            raised.
        """
        self.post("/resume", timeout_s=timeout_s)

    def version(self) -> int | None:
        """Ask the server which version it has loaded; return None if it reports
        none."""
        try:
            said = self.server.call("GET", "/weight_info", timeout_s=self.longest_s())["weight_version"]
        except (RequestRefused, KeyError, TypeError):
            return None
        return int(said) if str(said).isdigit() else None
