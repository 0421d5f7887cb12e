"""What is asked of ProcessGroupNCCL is what torch declares in its stubs, which a torch
without CUDA has, too."""

from __future__ import annotations

import ast
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.messages import GroupSpec
from replicas.sidecar import building
from tests.support.devices.fake_accelerator import FakeAccelerator

SPEC = GroupSpec("test", "127.0.0.1", 1, 0, 1, backend="nccl", address="127.0.0.1", timeout_s=5.0)


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Of the stubs, by their whole names."""
    stubs = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    found: dict[str, ast.ClassDef] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = node
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(stubs.read_text()).body, "")
    return found


def methods(name: str) -> dict[str, ast.FunctionDef]:
    """Of a class and those that it is derived from."""
    node = classes()[name]
    found: dict[str, ast.FunctionDef] = {}
    for base in node.bases:
        if (inherited := ast.unparse(base)) in classes():
            found |= methods(inherited)
    return found | {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> tuple[list[str], int]:
    """Those besides ``self``, and how many of them must be given."""
    names = [one.arg for one in function.args.args[1:]]
    return names, len(names) - len(function.args.defaults)


class Options:
    """Notes what is set on it."""

    def __init__(self) -> None:
        super().__setattr__("fields", {})

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["fields"][name] = value


class Group:
    """Notes how it is made and connected."""

    Options = Options

    def __init__(self, *given: object) -> None:
        self.given, self.connected = given, list[tuple[object, ...]]()

    def eager_connect_single_device(self, *given: object) -> None:
        self.connected.append(given)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Group, object]:
    """A group as the sidecar makes it, and the store that it was given."""
    groups: list[Group] = []
    monkeypatch.setattr(building._c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(building._c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(building, "accelerator", FakeAccelerator)
    monkeypatch.setattr(building, "_never_destroyed", groups)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = building._c10d.HashStore()
    building._build_nccl(store, SPEC)
    return groups[0], store


def test_a_group_is_made_of_a_store_a_rank_a_size_and_options(made: tuple[Group, object]) -> None:
    group, store = made
    names, required = parameters(methods("ProcessGroupNCCL")["__init__"])
    given = dict(zip(names, group.given, strict=True))
    options = given.pop("options")
    assert isinstance(options, Options)
    assert given == {"store": store, "rank": 0, "size": 1}
    assert required <= len(group.given)


def test_the_options_are_made_of_nothing_and_have_what_is_set(made: tuple[Group, object]) -> None:
    options: Any = made[0].given[-1]
    assert parameters(methods("ProcessGroupNCCL.Options")["__init__"])[1] == 0
    assert {name: type(value) for name, value in options.fields.items()} == {"_timeout": timedelta}
    setter = methods("ProcessGroupNCCL.Options")["_timeout"]  # the later of the two is the setter
    assert [ast.unparse(one) for one in setter.decorator_list] == ["_timeout.setter"]
    assert ast.unparse(setter.args.args[1].annotation or ast.Constant(None)) == "timedelta"


def test_a_group_connects_to_one_device_when_it_is_told_to(made: tuple[Group, object]) -> None:
    ((device,),) = made[0].connected
    assert isinstance(device, torch.device)
    assert parameters(methods("ProcessGroupNCCL")["eager_connect_single_device"])[0] == ["device"]
