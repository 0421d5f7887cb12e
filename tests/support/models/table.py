"""The handbook's table of models and adapters (docs/models.md), from what is tested.

``python -m tests.support.models.table`` tests each cell and writes the table anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch

from replicas import errors
from replicas.sources import hf
from replicas.testing import FakeRun
from tests.support.models.adapters import ADAPTERS, randomise
from tests.support.models.architectures import ARCHITECTURES, forward, make, quiet
from tests.support.models.saved import adapter_saved, different, given, merged, saved, state
from tests.support.root import ROOT

__all__ = ["PAGE", "check_model", "is_refused", "load", "row", "rows_of_page"]

PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: python -m tests.support.models.table -->", "<!-- end of table -->"
SAME, REFUSED, NOT_THERE = "yes", "refused", "-"


def row(architecture: str) -> tuple[str, ...]:
    """The cells of an architecture: without adapters, then for each adapter.

    :raises AssertionError: something else was given than the libraries save, a reader
        answers otherwise, or the trainer's model was changed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are tiny
    try:
        check_model(make(architecture), make(architecture, seed=7))
        return (SAME, *(_cell(architecture, adapter) for adapter in ADAPTERS))
    finally:
        torch.set_num_threads(threads)


def check_model(model: Any, reader: Any) -> None:
    """A model without adapters gives what it saves, and a reader gets it."""
    before = state(model)
    _check_source(hf(model), saved(model))
    load(model, reader)
    assert not different(model.state_dict(), reader.state_dict())
    assert torch.equal(forward(model), forward(reader))
    assert not different(before, state(model))


def _cell(architecture: str, adapter: str) -> str:
    def tuned(seed: int) -> Any:
        with quiet():
            return randomise(ADAPTERS[adapter](make(architecture)), seed)

    try:
        model = tuned(1)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):  # PEFT cannot put it on this model
        return NOT_THERE
    before = state(model)
    both = dict.fromkeys((_merged(model), _alone(model, lambda: tuned(3))))
    assert not different(before, state(model))
    return " / ".join(both)


def _merged(model: Any) -> str:
    try:
        wanted = merged(model)
    except (RuntimeError, ValueError):  # PEFT cannot merge it
        assert is_refused(lambda: given(hf(model)))
        return REFUSED
    _check_source(hf(model), saved(wanted))
    reader = randomise(copy.deepcopy(wanted).requires_grad_())
    load(model, reader)
    assert torch.equal(forward(wanted), forward(reader))
    return SAME


def _alone(model: Any, other: Callable[[], Any]) -> str:
    """``other``: makes a model with another such adapter."""
    source = hf(model, adapter="only")
    if len(model.active_adapters) > 1 or "lora_A" in model.peft_config:  # by which PEFT finds no adapter
        assert is_refused(lambda: given(source))
        return REFUSED
    _check_source(source, adapter_saved(model))
    reader = other()
    with quiet():
        peft.set_peft_model_state_dict(reader, given(source), adapter_name=reader.active_adapters[0])
    assert torch.equal(forward(model), forward(reader))
    return SAME


def load(model: Any, reader: Any) -> None:
    """Publish a model, and load it into another one that is in memory."""
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish(hf(model)).wait()
        with rollout.receive().wait() as update:
            update.load_into(hf(reader))


def is_refused(call: Callable[[], object]) -> bool:
    """True if the call is refused by name."""
    try:
        call()
    except errors.UsageError:
        return True
    return False


def _check_source(source: Any, wanted: Mapping[str, torch.Tensor]) -> None:
    rows = source.metadata()
    found = given(source)
    assert not different(found, wanted)
    assert rows == [(name, one.dtype, tuple(one.shape)) for name, one in found.items()]
    at_once = source.resident()
    assert at_once is None or not different(at_once, wanted)


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """The table as it is in the handbook, by architecture."""
    text = PAGE.read_text()
    lines = [line for line in text[text.index(START) : text.index(END)].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {one[0]: tuple(one[1:]) for one in cells}


def main() -> None:
    """Write the table of the page."""
    lines = [["model", "no adapter", *ADAPTERS], ["---"] * (2 + len(ADAPTERS))]
    lines += [[name, *row(name)] for name in ARCHITECTURES]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = PAGE.read_text()
    PAGE.write_text(f"{text[: text.index(START)]}{START}\n\n{table}\n\n{text[text.index(END) :]}")


if __name__ == "__main__":
    main()
