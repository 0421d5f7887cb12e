"""In place of an inference engine behind verl's own worker: it notes what comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Adapter"]


class Adapter:
    """verl's ``ServerAdapter``, as far as its rollout worker calls it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        found = {name: tensor.clone() async for name, tensor in weights}
        values = sorted({value for tensor in found.values() for value in tensor.tolist()})
        self.path.write_text(json.dumps([global_steps, wire_format, len(found), values]))
