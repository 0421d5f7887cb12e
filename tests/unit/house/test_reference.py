"""The reference is that of the code, names everything, and says something of each.

Covers: control/exit_codes.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

import replicas.integrations.vllm_gate
import replicas.telemetry.events
import replicas.telemetry.metrics
from replicas.control import exit_codes
from tests.support.reference import FOLDER, api, commands, environment, errors, events, metrics, pages
from tests.support.reference import exit_codes as exit_codes_page
from tests.support.reference.config import keys as config_keys
from tests.support.reference.source import calls, modules

PINS = dict(line.split("==") for line in (FOLDER.parents[1] / "constraints.txt").read_text().split() if "==" in line)
WRITTEN_BY = sys.version_info[:2] == (3, 11) and version("typer") == PINS["typer"]
"""The pages are written with the oldest Python and the pinned typer, whose texts are on
them."""
as_written = pytest.mark.skipif(not WRITTEN_BY, reason="the pages are written with Python 3.11 and the pinned typer")


@pytest.mark.slow
@as_written
def test_the_reference_is_that_of_the_code() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    current = pages()
    assert set(written) == set(current)
    stale = [name for name in current if written[name] != current[name]]
    assert not stale, f"run `make docs-reference`: {stale}"


def test_every_metric_that_is_made_is_on_the_page() -> None:
    path = Path(str(replicas.telemetry.metrics.__file__))
    made = [
        call.args[0]
        for name in ("_Row", "_metric", "_histogram")
        for call in calls(path, name)
        if ast.unparse(call.args[0]) != "row.name"
    ]
    names = {
        f"replicas_{name.value}" for name in made if isinstance(name, ast.Constant) and isinstance(name.value, str)
    }
    assert len(names) == len(made), "a metric whose name is not written out"
    assert set(metrics.families()) == names | {"replicas_build_info"}


def test_every_metric_of_an_inference_server_is_on_the_page() -> None:
    path = Path(str(replicas.integrations.vllm_gate.__file__))
    made = [call.args[0] for kind in ("GaugeMetricFamily", "CounterMetricFamily") for call in calls(path, kind)]
    names = [name.value for name in made if isinstance(name, ast.Constant)]
    assert len(names) == len(made) > 0
    assert {name.removesuffix("_total") for name in metrics.engine_families()} == set(names)


@pytest.mark.parametrize("page", ["commands", "config", "environment", "errors", "events", "exit-codes", "metrics"])
def test_each_name_has_one_entry(page: str) -> None:
    titles = re.findall(r"^##+ .*`([^`]+)`$", (FOLDER / f"{page}.md").read_text(), re.MULTILINE)
    assert titles
    assert [title for title, count in Counter(titles).items() if count > 1] == []


def test_every_event_is_on_the_page_with_a_sentence() -> None:
    tagged = [one for one in vars(replicas.telemetry.events).values() if hasattr(one, "__struct_config__")]
    assert {one for one in tagged if one.__struct_config__.tag} <= set(events.kinds())
    for kind in (*events.kinds(), *events.parts(), *api.states()):
        text = vars(kind).get("__doc__") or ""
        assert text[:1].isalpha(), f"{kind.__name__}: {text!r}"


def test_every_error_is_on_the_page_with_a_sentence() -> None:
    named = {name for name in replicas.errors.__all__ if name[0].isupper()}
    assert {kind.__name__ for _, kind in errors.tree()} == named
    assert all(vars(kind).get("__doc__") for _, kind in errors.tree())


@pytest.mark.slow
def test_every_environment_variable_is_on_the_page() -> None:
    ours, others = environment.used()
    assert ours == set(environment.ours())
    assert all(environment.ours().values()), "a constant without a docstring"
    assert others == set(environment.OTHERS)


@pytest.mark.slow
def test_every_exit_code_has_a_name_and_a_sentence() -> None:
    codes = exit_codes_page.codes()
    assert [name for name, _, _ in codes] == sorted(exit_codes.__all__, key=lambda name: int(getattr(exit_codes, name)))
    assert all(text for _, _, text in codes)
    for path in modules():
        for call in calls(path, "Exit"):
            assert not any(isinstance(one, ast.Constant) for one in call.args), f"{path}: a bare exit code"
    text = {path: path.read_text() for path in modules() if path != Path(exit_codes.__file__)}
    for name, _, _ in codes:
        assert any(name in one for one in text.values()), f"{name} is used nowhere"


@as_written
def test_every_command_and_option_has_a_sentence() -> None:
    assert len(commands.commands()) > 10
    for name, command in commands.commands().items():
        assert command.help, name
        assert all(getattr(one, "help", "") for one in command.params), name


def test_every_public_name_has_a_sentence() -> None:
    for name, value in api.public().items():
        assert value.__doc__, name
        for member in api.members(value) if isinstance(value, type) else ():
            found = getattr(value, member, None)
            assert found is None or found.__doc__, f"{name}.{member}"
    for name, internal in api.INTERNAL.items():
        set_in_init = {"keep_decisions", "looked_at", "on_open", "on_tokens", "wait_for_store"}
        assert internal <= set(dir(api.public()[name])) | set_in_init, name


def test_every_config_key_has_a_sentence() -> None:
    for key in config_keys():
        assert key.type, key.name
        assert key.default, key.name
        assert key.sentence, key.name
