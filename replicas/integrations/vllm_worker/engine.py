"""Load the versions of a channel into a vLLM worker: vLLM's weight-transfer backend
``"replicas"``.

Theory of operation
===================

A vLLM server is one replica of a target group. The follower
(:mod:`replicas.integrations.vllm`) is its rank 0, its workers (tensor, pipeline and
data parallel) are ranks 1 to N. The follower receives a version and asks the server to
load it. The request reaches every worker, which receives on its own: all ranks of a
replica are given the same version (:mod:`replicas.core.versions.load_rounds`), so the
request carries its number only, to be compared. Each worker maps the one slot of its
host and holds it until its model is whole: nothing writes to the slot meanwhile.

A worker reports *loaded* when vLLM has finished its layerwise reload. A version whose
manifest is not known to fit is tried first, on all workers: one that does not fit is
*refused*, and the server goes on with the version that it has
(:mod:`replicas.integrations.vllm_worker.reload`). A load that fails half-way is not
reported at once: the follower asks once more for the same version, of which the worker
still holds the bytes. Until a load has succeeded the model is a mixture of two
versions, so the follower keeps the server from answering. A load that the follower
wants proven is compared with the version before it is reported
(:mod:`replicas.integrations.vllm_worker.proof`).

With ``patches``, versions after the first are written in place where that is proven to
be right (:mod:`replicas.integrations.vllm_worker.patches`); all else is loaded as
above.

Nothing that was computed with old weights may be served: servers with memories that
cannot be cleared (draft models, stores of keys and values) are refused at the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

import replicas
from replicas import errors
from replicas.integrations.vllm_worker.patches import EnginePatches
from replicas.integrations.vllm_worker.proof import first_names
from replicas.integrations.vllm_worker.reload import EngineReload
from replicas.integrations.vllm_worker.ties import has_head, without_tied_head

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ["InitInfo", "ReplicasEngine", "UpdateInfo"]

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding for which vLLM reports the model's own configuration
as that of the draft."""
logger = logging.getLogger("vllm.replicas")  # vLLM's handlers and level are for its own loggers only


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Identity of the server's replica, and how to load.

    ``None`` means: use the worker's environment, inherited from a server that
    ``replicas`` started.

    :param channel: name of the channel.
    :param world_size: ranks of the replica: the workers and the follower.
    :param complete: False: versions may lack parameters of the model (a vision tower
        that is not trained, say), which keep their values.
    :param patches: write only the changes, where that is possible.
    """

    channel: str
    world_size: int
    endpoint: str | None = None
    token: str | None = None
    run: str | None = None
    group: str | None = None
    replica: int | None = None
    complete: bool = True
    patches: bool = False
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to load.

    :param version: the version's number; 0 loads none: the worker raises an error, by
        which vLLM ends the weight update that it has begun.
    :param timeout_s: seconds until this worker must have the version's bytes.
    :param check: only check whether the version fits.
    :param prove: compare the loaded tensors with the version.
    :param refuse: with version 0: the reason to refuse the version that was checked;
        empty: the worker keeps that version open.
    """

    version: int
    timeout_s: float = 60.0
    check: bool = False
    prove: bool = False
    refuse: str = ""


class ReplicasEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine over a channel, one in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """Keep vLLM's configuration and this worker's model; join no channel, and
        change nothing yet. vLLM makes one engine in each worker process."""
        super().__init__(config, vllm_config, device, model)
        self._channel: replicas.Channel | None = None
        self._update: replicas.Update | None = None
        self._load_begun = False
        self._has_head = has_head(model)
        self._reload = EngineReload(model, vllm_config.model_config, device)
        self._patches: EnginePatches | None = None
        self._patched = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the channel as a rank of this server's replica; leave an earlier channel
        first. Block until joined, ``init_info.timeout_s`` at most.

        :raises replicas.errors.UsageError: the server has caches that cannot be
            cleared, or weights that no version replaces.
        """
        self._refuse_unclearable_caches()
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._channel = replicas.join(
            init_info.channel,
            endpoint=init_info.endpoint,
            token=init_info.token,
            run=init_info.run,
            group=init_info.group,
            replica=init_info.replica,
            rank=rank,
            world_size=init_info.world_size,
            info={"worker": str(rank - 1)},
            timeout=init_info.timeout_s,
        )
        self._reload = EngineReload(self.model, self.model_config, self.device)  # forget which manifests fit
        self._reload.complete = init_info.complete
        self._reload.has_all = parallel.pipeline_parallel_size == 1 and not parallel.enable_expert_parallel
        # other layers compute with transformed weights
        plain = self.device.type != "cpu" and self.model_config.quantization is None
        self._patches = EnginePatches(self.model, self.device) if init_info.patches and plain else None

    def _refuse_unclearable_caches(self) -> None:
        """Raise UsageError if the server has weights that no version replaces or that a
        reload breaks, or a cache that would keep results of old weights after a load.
        Read vLLM's configuration only."""
        if getattr(self.vllm_config, "speculative_config", None) is not None and self._has_draft_weights():
            raise errors.UsageError(
                "the server decodes speculatively with a draft model, which a version of the policy does not contain",
                hint="serve without --speculative-config, or with a method that has no weights, such as ngram",
            )
        if getattr(self.vllm_config, "lora_config", None) is not None:
            raise errors.UsageError(
                "the server is started with --enable-lora, and vLLM does not reload the layers that it has wrapped",
                hint="serve without it, or follow a channel of adapters with --lora",
            )
        if self._reload.computes_with_freed_scales():
            raise errors.UsageError(
                "on a CPU vLLM computes int8 layers with scales whose memory a reload frees, and answers with anything",
                hint="serve a model that is not quantised, or on a GPU",
            )
        for connector in _unclearable_connectors(getattr(self.vllm_config, "kv_transfer_config", None)):
            raise errors.UsageError(
                f"the server's KV connector {connector} cannot be cleared: it would serve what was computed with old "
                "weights",
                hint="serve without it, or with one that implements reset_cache(), such as OffloadingConnector",
            )
        encoders: Any = getattr(self.vllm_config, "ec_transfer_config", None)
        if getattr(encoders, "ec_connector", None) is not None:
            raise errors.UsageError(
                f"the server's encoder-cache connector {encoders.ec_connector} cannot be cleared: it would serve what "
                "was computed with old weights",
                hint="serve without --ec-transfer-config",
            )

    def _has_draft_weights(self) -> bool:
        """Return True if speculative decoding uses weights of its own."""
        speculative = self.vllm_config.speculative_config
        drafts = getattr(speculative, "draft_model_config", None) is not None
        return drafts and speculative.method not in WITHOUT_WEIGHTS

    def start_weight_update(self) -> None:
        """Begin a load, as vLLM asks before each: give layers that a failed load has
        left without memory their old weights back."""
        self._reload.restore_unfinished()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the version on this rank, unless it is open here already, and load it
        into the model, layer by layer. The version stays open here, also after an error
        in the load, which leaves the model a mixture of two versions.

        :param update_info: which version (0: as :meth:`_open_update`). With ``check``
            only check that it fits; with ``prove`` only compare the loaded model.
        :raises replicas.errors.ReplicasError: it is not the version that the channel
            gives to this replica, or it does not fit: then no version is open, and the
            model is as before.
        """
        began = time.monotonic()
        update = self._open_update(update_info)
        if update_info.prove:
            self._prove(update)
            return
        if not self._reload.fits(update.manifest.hash):
            self._try(update)
        if update_info.check:
            return
        opened = time.monotonic()
        update.adopt().wait(update_info.timeout_s)  # returns immediately: the follower has waited
        self._load_begun = True
        self._patched = self._patches is not None and self._patches.apply(update)
        if not self._patched:
            self._reload.load(self._weights_of(update))
            self._reload.finish()
        logger.info(
            "version %d: received in %.4f s, loaded in %.4f s",
            *(update.version, opened - began, time.monotonic() - opened),
        )

    def _prove(self, update: replicas.Update) -> None:
        """Compare a sample of the model's tensors with the version ``update``, which
        was loaded; log the counts. Raise SyncError if they differ, UsageError if
        nothing was loaded."""
        if not self._load_begun:
            raise errors.UsageError("no version was loaded", hint="call update_weights first")
        found = self._reload.prove(dict(update), update.version)
        if found.wrong:
            what = f"{len(found.wrong)} tensors differ from those of version {update.version}"
            raise errors.SyncError(f"{what}: {first_names(found.wrong)}", version=update.version, phase="load", hint="")
        logger.info(
            "compared version %d with the model in %d places, not in %d",
            update.version,
            found.equal,
            found.not_compared,
        )

    def _weights_of(self, update: replicas.Update) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the version ``update``; leave out the output layer's
        name if the model shares that weight with its embedding."""
        return without_tied_head(update, update.manifest, head=self._has_head)

    def _try(self, update: replicas.Update) -> None:
        """Check, without loading, that the version ``update`` fits the model; if it
        does, leave the update open. If not, end it, report the version to the channel
        as refused, and raise ManifestMismatch."""
        try:
            manifest = update.manifest
            self._reload.check_fit(manifest.hash, self._weights_of(update), manifest.aliases)
        except errors.ReplicasError as error:
            self._drop_update(error.message)
            raise errors.ManifestMismatch(
                f"version {update.version} is refused: {error.message}", version=update.version, hint=""
            ) from error

    def _open_update(self, info: UpdateInfo) -> replicas.Update:
        """Return the update (the version's memory, held for reading) of the version
        that ``info`` requests; receive that version unless it is open here already.

        If another version is open, end that first, and report it: as failed if its load
        has begun, else as refused.

        :param info: vLLM's request. With version 0, SyncError is always raised. Before,
            an open version is ended, and reported as refused, if there is a reason in
            ``info.refuse`` and the load of the open version has not begun. In all other
            cases the open version stays open.
        :raises replicas.errors.SyncError: version 0 was requested; or the channel gave
            this replica another version, which is reported as refused, or none within
            ``info.timeout_s``: then no version is open.
        :raises replicas.errors.UsageError: no channel was joined.
        """
        channel = self._channel
        if channel is None:
            raise errors.UsageError("no channel", hint="call init_weight_transfer_engine first")
        if info.version == 0:
            if info.refuse and not self._load_begun:
                self._drop_update(info.refuse)
            raise errors.SyncError("the open update has ended", hint="")
        if self._update is not None and self._update.version != info.version:
            self._drop_update(f"the follower asked for version {info.version} instead")
        if self._update is None:
            update = channel.receive(deadline=info.timeout_s).wait()
            if update.version != info.version:
                update.refuse(f"the follower asked for version {info.version}")
                raise errors.SyncError(
                    f"version {info.version} was requested, but the channel gave this replica version {update.version}",
                    version=info.version,
                    hint="the follower asks again",
                )
            self._update, self._load_begun = update.unadopted().__enter__(), False
        return self._update

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one version, as :meth:`receive_weights`; on return it is on
        the device.

        :param update_info: fields of :class:`UpdateInfo`.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Set NaN and infinities left in the caches of keys and values to zero. Then
        report the open version to the channel as loaded, and end the update: its memory
        may be reused. Raise UsageError if nothing was loaded."""
        if not self._load_begun:
            raise errors.UsageError("no version was loaded", hint="call update_weights first")
        self._clear_memory()
        if self._patches is not None and self._update is not None:
            self._patches.loaded(self._update)
        update, self._update, self._load_begun = self._update, None, False
        if update is not None:
            update.__exit__(None, None, None)

    def _clear_memory(self) -> None:
        """Set caches of keys and values with NaN or infinities to zero.

        They are left by a version that computed NaN. Their blocks are free, but
        attention on a CPU multiplies free blocks, too.
        """
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            found = getattr(layer, "kv_cache", ())
            for memory in [found] if isinstance(found, torch.Tensor) else found:
                tensor = isinstance(memory, torch.Tensor) and memory.is_floating_point() and memory.dtype.itemsize > 1
                if tensor and not memory.sum().isfinite():
                    memory.zero_()

    def _drop_update(self, reason: str) -> None:
        """End the open update, if any, without a load: report its version to the
        channel as refused if no part of it was loaded, else as failed.

        :param reason: a clause, for the report.
        """
        update, self._update = self._update, None
        if update is not None:
            if not self._load_begun:
                update.refuse(reason)
            error = errors.SyncError(reason, version=update.version, phase="load", hint="")
            update.__exit__(type(error), error, None)

    def shutdown(self) -> None:
        """Report an open version as refused, or as failed if its load has begun; leave
        the channel. Inference continues."""
        channel, self._channel = self._channel, None
        self._drop_update("the worker leaves the channel")
        if channel is not None:
            channel.close(wait=False)


def _unclearable_connectors(config: Any) -> list[str]:
    """Return the names of the configured KV connectors (to stores of keys and values
    outside the server) that cannot be cleared. vLLM treats a connector that does not
    implement the reset as cleared.

    :param config: vLLM's ``kv_transfer_config``, or None.
    """
    if config is None or not config.kv_connector:
        return []
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    given = getattr(config, "kv_connector_extra_config", None) or {}
    parts = [one["kv_connector"] for one in given.get("connectors", [])]
    classes = [
        KVConnectorFactory.get_connector_class(config),
        *map(KVConnectorFactory.get_connector_class_by_name, parts),
    ]
    return [one.__name__ for one in classes if one.reset_cache is KVConnectorBase_V1.reset_cache]
