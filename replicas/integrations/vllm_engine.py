"""Load the versions of a channel into a vLLM worker: vLLM's weight-transfer backend
``"replicas"``.

Theory of operation
===================

A vLLM server is one replica of a target group. The follower
(:mod:`replicas.integrations.vllm`) is its rank 0, its workers (tensor, pipeline and
data parallel) are ranks 1 to N. The follower receives a version and asks the server to
load it. The request reaches every worker, which receives on its own: all ranks of a
replica are given the same version (:mod:`replicas.core.versions.rounds`), so the
request carries its number only, to be compared. Each worker maps the one slot of its
host and holds it until its model is whole: nothing writes to the slot meanwhile.

A worker reports *loaded* when vLLM has finished its layerwise reload. A failed load is
not reported at once: the follower asks once more for the same version, of which the
worker still holds the bytes. Until a load has succeeded the model is a mixture of two
versions, so the follower keeps the server from answering.

vLLM counts the elements that each layer was given, and makes the layer real when the
count is complete. A second attempt would add to the counts of the first, and could make
a layer real without all of its tensors; so an unfinished reload is finished, as the
garbage that it is, before the next one starts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import replicas
from replicas import errors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ["InitInfo", "ReplicasEngine", "UpdateInfo"]

logger = logging.getLogger("vllm.replicas")  # vLLM's handlers and level are for its own loggers only


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Identity of the server's replica.

    ``None`` stands for the worker's environment, which it inherits from a server that
    ``replicas`` started.

    :param channel: name of the channel.
    :param world_size: ranks of the replica: the workers and the follower.
    :param complete: False: the versions may lack parameters of the model (a vision
        tower that is not trained, say), which keep their values.
    """

    channel: str
    world_size: int
    endpoint: str | None = None
    token: str | None = None
    run: str | None = None
    group: str | None = None
    replica: int | None = None
    complete: bool = True
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version to load.

    :param version: its number; 0 ends an update that somebody else left open.
    :param timeout_s: seconds until this worker must have its bytes.
    """

    version: int
    timeout_s: float = 60.0


class ReplicasEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer engine over a channel, one in each worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._channel: replicas.Channel | None = None
        self._update: replicas.Update | None = None
        self._unfinished = False
        self._complete = True
        self._parameters = frozenset(name for name, _ in model.named_parameters())

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the channel as a rank of this server's replica; a second call joins
        anew."""
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
        self._complete = init_info.complete

    def _has_draft_weights(self) -> bool:
        speculative = self.vllm_config.speculative_config
        return speculative is not None and getattr(speculative, "draft_model_config", None) is not None

    def start_weight_update(self) -> None:
        """Take the model's layers apart for a reload in checkpoint format."""
        self._finish_layers()
        self._unfinished = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the version on this rank and load it, layer by layer.

        :raises replicas.errors.ReplicasError: it is not the version that the channel
            gives to this replica, or some parameters are not in it.
        """
        began = time.monotonic()
        update = self._open_update(update_info)
        tensors = iter(update)
        opened = time.monotonic()
        loaded = self.model.load_weights(tensors)
        self._check_complete(update, loaded)
        logger.info(
            "version %d: received in %.4f s, loaded in %.4f s",
            *(update.version, opened - began, time.monotonic() - opened),
        )

    def _open_update(self, info: UpdateInfo) -> replicas.Update:
        channel = self._channel
        if channel is None:
            raise errors.UsageError("no channel", hint="call init_weight_transfer_engine first")
        if self._update is not None and self._update.version != info.version:
            self._drop_update(f"the follower asked for version {info.version} instead")
        if info.version == 0:
            raise errors.SyncError("the update that was left open is over", hint="")
        if self._update is None:
            update = channel.receive(deadline=info.timeout_s).wait()
            if update.version != info.version:
                update.failed(f"the follower asked for version {info.version}")
                raise errors.SyncError(
                    f"version {info.version} was asked for, and version {update.version} is given to this replica",
                    version=info.version,
                    hint="the follower asks again",
                )
            self._update = update.__enter__()
        return self._update

    def _check_complete(self, update: replicas.Update, loaded: set[str] | None) -> None:
        """Compare the parameters that were loaded with the model's, as vLLM's own
        loader does."""
        if not self._complete or loaded is None or self.model_config.quantization is not None:
            return
        missing = sorted(self._parameters - loaded)
        if missing:
            raise errors.ManifestMismatch(
                f"version {update.version} has no weights for {len(missing)} of the model's parameters: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}",
                version=update.version,
                hint="serve the model that is trained, or pass --partial if the trainer leaves these out",
            )

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version; on return it is on the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Put the layers together, and report the version loaded."""
        self._finish_layers()
        update, self._update = self._update, None
        if update is not None:
            update.__exit__(None, None, None)

    def _finish_layers(self) -> None:
        if self._unfinished:
            self._unfinished = False
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_tied_layers()

    def _pack_tied_layers(self) -> None:
        """On a CPU, pack the weights of tied layers again.

        There vLLM computes with a packed copy of a layer's weight, and makes a new one
        for the layers that were given weights. An output layer that is tied to the
        embedding was given none: it would go on with the version before.
        """
        if self.device.type != "cpu":
            return  # the layers share the memory itself
        layers: dict[int, list[Any]] = {}
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and getattr(layer, "quant_method", None) is not None:
                layers.setdefault(id(weight), []).append(layer)
        for layer in (one for tied in layers.values() if len(tied) > 1 for one in tied):
            layer.quant_method.process_weights_after_loading(layer)

    def _drop_update(self, reason: str) -> None:
        update, self._update = self._update, None
        if update is not None:
            error = errors.SyncError(reason, version=update.version, phase="load", hint="")
            update.__exit__(type(error), error, None)

    def shutdown(self) -> None:
        """Leave the channel; inference goes on."""
        channel, self._channel = self._channel, None
        self._drop_update("the worker leaves the channel")
        if channel is not None:
            channel.close(wait=False)
