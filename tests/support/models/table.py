"""The handbook's table of models and adapters (docs/models.md), from what is tested.

``python -m tests.support.models.table`` writes it anew.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from replicas import errors
from replicas.sources import hf
from replicas.testing import FakeRun
from tests.support.models.adapters import ADAPTERS, randomise
from tests.support.models.architectures import ARCHITECTURES, forward, make, quiet
from tests.support.models.saved import adapter_saved, different, given, merged, saved, state
from tests.support.root import ROOT

__all__ = ["PAGE", "row", "rows_of_page"]

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table -->", "<!-- end of table -->"
COLUMNS = ("model", *ADAPTERS)
SAME, REFUSED, NOT_THERE = "yes", "refused", "-"


def row(architecture: str) -> tuple[str, ...]:
    """The cells of an architecture: without an adapter, then for each adapter merged
    and alone.

    :raises AssertionError: something else than the libraries save was given, or the
        trainer's model was changed.
    """
    return (_whole(architecture), *(_cell(architecture, name) for name in ADAPTERS))


def _whole(architecture: str) -> str:
    model = make(architecture)
    before = state(model)
    wanted = saved(model)
    _check_source(hf(model), wanted)
    assert not different(before, state(model))
    reader = make(architecture, seed=7)
    load(model, reader)
    assert not different(model.state_dict(), reader.state_dict())
    assert torch.equal(forward(model), forward(reader))
    return SAME


def _cell(architecture: str, adapter: str) -> str:
    try:
        with quiet():
            model = randomise(ADAPTERS[adapter](make(architecture)))
    except (ValueError, AttributeError, NotImplementedError, TypeError, KeyError):  # PEFT cannot put it on this model
        return NOT_THERE
    before = state(model)
    both = _merged(architecture, model), _alone(architecture, model)
    assert not different(before, state(model))
    return both[0] if both[0] == both[1] else f"{both[0]}, {both[1]}"


def _merged(architecture: str, model: Any) -> str:
    try:
        wanted_model = merged(model)
    except (RuntimeError, ValueError):  # PEFT itself refuses
        with_error(lambda: given(hf(model)))
        return REFUSED
    _check_source(hf(model), saved(wanted_model))
    return SAME


def _alone(architecture: str, model: Any) -> str:
    source = hf(model, adapter="only")
    if len(model.active_adapters) > 1:
        with_error(lambda: given(source))
        return REFUSED
    _check_source(source, adapter_saved(model))
    return SAME


def load(model: Any, reader: Any) -> None:
    """Publish a model, and load it into another one that is in memory."""
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish(hf(model)).wait()
        with rollout.receive().wait() as update:
            update.load_into(hf(reader))


def with_error(call: Any) -> None:
    try:
        call()
    except errors.UsageError:
        return
    raise AssertionError("it was not refused")


def _check_source(source: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    rows = source.metadata()
    found = given(source)
    assert not different(found, wanted)
    assert rows == [(name, one.dtype, tuple(one.shape)) for name, one in found.items()]
    at_once = source.resident()
    assert at_once is None or not different(at_once, wanted)


def rows_of_page() -> dict[str, tuple[str, ...]]:
    text = PAGE.read_text()
    lines = text[text.index(START) : text.index(END)].splitlines()[3:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {one[0]: tuple(one[1:]) for one in cells}
