"""LMDeploy's released server on a CPU, and the follower that starts it:
``lmdeploy_server.py SCRIPT serve MODEL ...``.

The follower starts its server by the executable file SCRIPT in place of a Python. It
runs this program again with the same arguments: ``lmdeploy_server.py -m MODULE ...``.

All of the server is LMDeploy's own but its engine, which needs a GPU. The engine here
loads weights by the calls that it is sent, as LMDeploy's processes do, and each of its
tokens is the first number of ``model.norm.weight``.
"""

from __future__ import annotations

import asyncio
import base64
import runpy
import sys
from collections.abc import AsyncIterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

TOKEN_S = 0.02


class Engine:
    """Stands for ``lmdeploy.serve.core.AsyncEngine``, as far as the server calls it."""

    arch = "LlamaForCausalLM"

    def __init__(self, model_path: str, model_name: str, backend: str, backend_config: Any, **_: Any) -> None:
        self.model_name, self.backend, self.backend_config = model_name, backend, backend_config
        from lmdeploy.serve.managers import SessionManager

        self.session_mgr, self.epoch = SessionManager(), 0
        self.sleeping_tags = set[str]()
        self.tokenizer = SimpleNamespace(model=SimpleNamespace(model=None))
        self.chat_template = None
        self.engine = self
        self.weight = 0.0

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def start_loop(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...

    async def health_probe(self, **_: Any) -> dict[str, str]:
        return {"status": "healthy", "message": ""}

    async def sleep(self, level: int = 1) -> None:
        self.sleeping_tags = {"weights", "kv_cache"}
        self.epoch += 1

    def wakeup(self, tags: list[str] | None = None) -> None:
        self.sleeping_tags -= set(tags or self.sleeping_tags)

    def update_params(self, request: Any) -> None:
        for name, (call, arguments) in ForkingPickler.loads(base64.b64decode(request.serialized_named_tensors)):
            tensor = call(*arguments[:6], "cpu")
            if name == "model.norm.weight":
                self.weight = float(tensor[0])

    async def preprocess(self, gen_config: Any, **_: Any) -> Any:
        return gen_config

    async def generate(self, gen_config: Any, **_: Any) -> AsyncIterator[Any]:
        from lmdeploy.serve.core.async_engine import GenOut

        began, count = self.epoch, gen_config.max_new_tokens
        for number in range(count):
            await asyncio.sleep(TOKEN_S)
            aborted = self.epoch != began
            yield GenOut(
                response="" if aborted else f"{self.weight:g} ",
                input_token_len=1,
                generate_token_len=number + 1,
                finish_reason="abort" if aborted else "length" if number + 1 == count else None,
                token_ids=[number],
            )
            if aborted:
                return


def serve() -> None:
    """Run the module with the engine in place of that which LMDeploy would choose."""
    from lmdeploy.serve.openai import api_server

    api_server.get_task = lambda *_, **__: ("llm", Engine)
    _, _, *sys.argv = sys.argv
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def follow() -> int:
    """Run the follower, which starts SCRIPT in place of a Python."""
    from replicas.integrations import lmdeploy

    sys.executable = sys.argv[1]
    return lmdeploy.main(sys.argv[2:])


if __name__ == "__main__":
    if sys.argv[1] == "-m":
        serve()
    else:
        sys.exit(follow())
