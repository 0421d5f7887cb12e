"""A look-alike of vLLM's server: its control routes, and workers that are real ranks.

It behaves as vLLM does where the follower depends on it: an update that fails is over
for vLLM, whose next start is refused while one is open; a worker keeps what it has
received until it has finished; control routes do nothing without a start.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import replicas

__all__ = ["FakeEngine"]


class _Worker:
    def __init__(self, init: dict[str, Any], rank: int) -> None:
        given = {name: init[name] for name in ("endpoint", "token", "group", "replica") if name in init}
        self.channel = replicas.join(init["channel"], rank=rank, world_size=init["world_size"], **given)
        self.update: replicas.Update | None = None
        self.model: dict[str, torch.Tensor] = {}

    def _open(self, version: int) -> None:
        if self.update is None:
            self.update = self.channel.receive(deadline=20).wait()
            assert self.update.version == version
            self.update.__enter__()

    def check(self, version: int) -> None:
        """Refuse a version with a tensor called ``misfit`` or ``..._of_nobody``, or
        that is larger than others."""
        self._open(version)
        assert self.update is not None
        for spec in self.update.manifest.tensors:
            if spec.name == "misfit" or spec.name.endswith("_of_nobody") or spec.shape > (64,):
                self.refuse(f"no parameter is called {spec.name} or has its shape")
                raise RuntimeError(f"version {version} is refused: no parameter is called {spec.name}")

    def refuse(self, why: str) -> None:
        update, self.update = self.update, None
        if update is not None:
            update.refuse(why)
            update.__exit__(None, None, None)

    def prove(self) -> None:
        assert self.update is not None
        for name, tensor in self.update:
            if not torch.equal(self.model[name], tensor):
                raise RuntimeError(f"1 tensors are others than those of the version: {name}")

    def load(self, version: int, tensors: int | None, *, loses: bool = False) -> None:
        """Load ``tensors`` of the version's tensors; None: all. With ``loses`` the last
        one is not what was published."""
        self._open(version)
        assert self.update is not None
        for number, (name, tensor) in enumerate(self.update):
            if number == tensors:
                raise RuntimeError(f"the update dies after {tensors} tensors")
            self.model[name] = tensor.clone()
        if loses:
            self.model[name] += 1

    def finish(self) -> None:
        update, self.update = self.update, None
        assert update is not None
        update.__exit__(None, None, None)


class FakeEngine(ThreadingHTTPServer):
    """Serves on a free port of loopback while its ``with`` block is open.

    :param workers: how many ranks join.
    :ivar calls: the control requests so far, by path.
    :ivar queries: the last query of each.
    :ivar fail_updates: how many of the next updates die after their first tensor.
    :ivar lose_tensors: how many of the next updates load a tensor wrong.
    :ivar kept_requests: frozen requests hold blocks of the prefix cache.
    :ivar pause_s: how long it takes to pause.
    :ivar bad_adapter: it takes no adapter.
    :ivar adapters_in_use: names of adapters that requests in flight ask for; None: it
        does not say.
    :ivar dies_at: at a call of this path its engine dies.
    :ivar last_words: it answers that call with 500; else it breaks the connection.
    :ivar is_dead: its engine has died: ``/health`` answers 503.
    :ivar api_key: what requests below ``/v1`` must carry; empty: nothing.
    :ivar prefix: of all its paths.
    :ivar answers: event; while it is clear no request is answered.
    """

    def __init__(self, workers: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.count = workers
        self.workers: list[_Worker] = []
        self.calls: list[str] = []
        self.queries: dict[str, str] = {}
        self.fail_updates = self.lose_tensors = 0
        self.paused = False
        self.active = False
        self.version = "default"
        self.kept_requests = False
        self.is_dead = False
        self.bad_adapter = False
        self.adapters_in_use: list[str] | None = []
        self.pause_s = 0.0
        self.api_key = ""
        self.prefix = ""
        self.release = "0.32.0+cpu"
        self.answers = threading.Event()
        self.answers.set()
        self.engine_answers = threading.Event()  # the process behind the API process
        self.engine_answers.set()
        self.freeze_at = ""
        self.dies_at = ""
        self.last_words = True
        self.adapters: dict[str, Path] = {}
        self._thread = threading.Thread(target=self.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    async def __aenter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def kill(self) -> None:
        """End it at once."""
        self._end()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self.answers.set()
        self.engine_answers.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        for worker in self.workers:
            worker.channel.close(wait=False)

    def control(self, path: str, body: dict[str, Any], query: str = "") -> Any:
        """Do what the route does; raises what vLLM answers with 500."""
        self.calls.append(path)
        self.queries[path] = query
        if path == self.dies_at:
            self.is_dead = True
            raise RuntimeError("the engine is dead") if self.last_words else ConnectionAbortedError
        if path == self.freeze_at:
            self.engine_answers.clear()
        if path != "/health":
            self.engine_answers.wait()
        match path:
            case "/health" | "/is_paused" | "/reset_encoder_cache":
                return {}
            case "/version":
                return {"version": self.release}
            case "/weight_info":
                return {"weight_version": self.version}
            case "/get_world_size":
                return {"world_size": self.count}
            case "/init_weight_transfer_engine":
                for worker in self.workers:
                    worker.channel.close(wait=False)
                self.workers = [_Worker(body["init_info"], 1 + index) for index in range(self.count)]
            case "/pause":
                time.sleep(self.pause_s)
                self.paused = True
            case "/resume":
                self.paused = False
            case "/start_weight_update":
                if self.active:
                    raise RuntimeError("a weight update is already active")
                self.active = True
            case "/update_weights":
                self._update(**body["update_info"])
            case "/finish_weight_update":
                for worker in self.workers:
                    worker.finish()
                self.active, self.version = False, body["weight_version"]
            case "/metrics":
                return self._metrics()
            case "/reset_prefix_cache":
                return {"success": not self.kept_requests or "reset_running_requests=true" in query}
            case "/v1/load_lora_adapter" if self.bad_adapter:
                raise RuntimeError("LoRA rank 64 is greater than max_lora_rank 16")
            case "/v1/models":
                return {"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]}
            case "/v1/load_lora_adapter" if body["lora_name"] in self.adapters:
                raise RuntimeError(f"the adapter {body['lora_name']} has already been loaded")
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = Path(body["lora_path"])
                return "Success"
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return "Success"
            case _:
                raise RuntimeError(f"no route {path}")
        return {}

    def _metrics(self) -> str:
        """vLLM's own: a sample stays for each set of adapters that there was, whose
        value is when that was so."""
        if self.adapters_in_use is None:
            return "# TYPE vllm:num_requests_running gauge\n"
        sample = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s\n'
        running, waiting = self.adapters_in_use[:1], self.adapters_in_use[1:]
        now = sample % (",".join(running), ",".join(waiting), 1.8e9)
        return "# TYPE vllm:lora_requests_info gauge\n" + now + sample % ("math@1", "math@2", 1.7e9)

    def _update(
        self, version: int, timeout_s: float, check: bool = False, prove: bool = False, refuse: str = ""
    ) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        self.active = False  # as in vLLM: an update that fails is over
        if version == 0:
            for worker in self.workers:
                if refuse:
                    worker.refuse(refuse)
            raise RuntimeError("the update that was left open is over")
        if check:
            for worker in self.workers:
                worker.check(version)
            self.active = True
            return
        if prove:
            self.calls.append("prove")
            for worker in self.workers:
                worker.prove()
            self.active = True
            return
        loses, self.lose_tensors = self.lose_tensors > 0, max(0, self.lose_tensors - 1)
        fails, self.fail_updates = self.fail_updates > 0, max(0, self.fail_updates - 1)
        for worker in self.workers:
            worker.load(version, 1 if fails else None, loses=loses)
        self.active = True


class _Handler(BaseHTTPRequestHandler):
    server: FakeEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(json.loads(content) if content else {})

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.answers.wait()
        answer: Any
        try:
            split = urlsplit(self.path)
            path = split.path.removeprefix(self.server.prefix)
            if self.server.is_dead and path == "/health":
                status, answer = 503, ""
            elif path.startswith("/v1/") and self.server.api_key not in self.headers.get("authorization", ""):
                status, answer = 401, "Unauthorized"
            else:
                status, answer = 200, self.server.control(path, body, split.query)
        except ConnectionAbortedError:
            self.close_connection = True
            return
        except (RuntimeError, replicas.errors.ReplicasError) as error:
            status, answer = 500, {"error": {"message": str(error)}}
        is_text = isinstance(answer, str)
        content = (answer if is_text else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if is_text else "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
