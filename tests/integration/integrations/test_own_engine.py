"""The scenes of every engine, with the example of one's own and its real server, which
is killed by SIGKILL."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replicas.testing.engine_suite import SCENES, Trial, play
from tests.support.root import ROOT


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the example."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_engine"))
    import my_engine  # type: ignore[import-not-found]  # of the example

    yield my_engine
    del sys.modules["my_engine"]


@pytest.mark.parametrize("scene", SCENES)
def test_the_example_survives(glue: Any, scene: str) -> None:
    url, process = glue.start()

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
            connect=lambda: glue.MyEngine(url, process),
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
