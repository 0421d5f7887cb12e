"""A connector of vLLM's to an external store that holds nothing, and counts how often
it is told to forget: a line in the file ``FORGOTTEN`` for each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class CountingConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not typed here
    """Named to vLLM by ``kv_connector_module_path``."""

    def reset_cache(self) -> bool:
        with Path(os.environ["FORGOTTEN"]).open("a") as file:
            file.write("forgotten\n")
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, *_: Any) -> None:
        pass

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_layer_load(self, *_: Any) -> None:
        pass

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
