"""The scenes of every engine, with the example of one's own and its real server, which
is killed by SIGKILL."""

from __future__ import annotations

import concurrent.futures
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.engine import follow
from replicas.integrations.gate import GatePage
from replicas.testing import FakeRun
from replicas.testing.engine_suite import SCENES, Trial, play
from tests.support.root import ROOT
from tests.support.waits import eventually


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the example."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_engine"))
    import my_engine  # type: ignore[import-not-found]  # of the example

    yield my_engine
    del sys.modules["my_engine"]


def opened_page() -> GatePage:
    """A gate that is open, as the scenes have one of their own."""
    page = GatePage.create()
    page.open(1)
    return page


@pytest.mark.parametrize("scene", SCENES)
def test_the_example_survives(glue: Any, scene: str) -> None:
    page = opened_page()
    url, process = glue.start(page)

    def answer() -> float | None:
        try:
            with urllib.request.urlopen(f"{url}/answer", b'{"x": 1}', timeout=60) as found:
                (value,) = set(json.load(found)["answer"])
                return float(value)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return None

    def kill() -> None:
        process.kill()
        process.wait()

    try:
        trial = Trial(
            connect=lambda: glue.MyEngine(url, process, page),
            weights=lambda value: {"weight": torch.full((8, 1), value)},
            answer=answer,
            kill=kill,
        )
        play(scene, trial)
    finally:
        kill()
        process.stdout.close()


def test_the_glue_is_short() -> None:
    """As promised: an engine of one's own takes at most 60 lines."""
    source = (ROOT / "examples" / "own_engine" / "my_engine.py").read_text()
    body = source.partition("class MyEngine")[2].partition("\ndef start")[0]
    assert 10 < len(body.strip().splitlines()) <= 60


@pytest.mark.slow
def test_a_second_follower_of_the_server_is_refused(glue: Any) -> None:
    """The first one goes on, and a later life of it takes over."""
    page = opened_page()
    url, process = glue.start(page)
    stop = threading.Event()
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"]}}) as run:
        trainer = run.join("trainer")

        def follow_as(replica: int, spelling: str) -> None:
            engine = glue.MyEngine(url, process, page)
            engine.url = spelling
            where: dict[str, Any] = {"endpoint": run.endpoint, "token": run.token, "group": "rollout"}
            follow(engine, "policy", min_serving=0.0, stop=stop, replica=replica, **where)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            try:
                for life in (1, 2):
                    stop.clear()
                    first = pool.submit(follow_as, 0, url)
                    eventually(lambda: len(trainer.members) == 2, "the follower has joined")
                    for spelling in (url, f"{url}/", url.replace("127.0.0.1", "localhost")):
                        with pytest.raises(errors.Preflight, match=r"rollout/1/0 would load .* rollout/0/0 loads"):
                            follow_as(1, spelling)
                    version = trainer.publish({"weight": torch.full((8, 1), float(life))}).wait(60.0).version
                    trainer.loaded(version).wait(60.0)
                    stop.set()
                    first.result(60.0)
                    eventually(lambda: len(trainer.members) == 1, "the follower has left")
                stop.clear()
                other = pool.submit(follow_as, 1, url)  # the server is free
                eventually(lambda: len(trainer.members) == 2, "another replica has joined")
                stop.set()
                other.result(60.0)
            finally:
                stop.set()
                process.kill()
                process.wait()
                process.stdout.close()
