"""What is asked of ProcessGroupNCCL is what torch declares in its stubs, which a torch
without CUDA has, too."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import torch

from replicas.sidecar import building


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


def asked() -> ast.FunctionDef:
    """Our function that makes the group."""
    (function,) = ast.parse(inspect.getsource(building._build_nccl)).body
    assert isinstance(function, ast.FunctionDef)
    return function


def calls(name: str) -> list[ast.Call]:
    return [one for one in ast.walk(asked()) if isinstance(one, ast.Call) and ast.unparse(one.func) == name]


def test_a_group_is_made_of_a_store_a_rank_a_size_and_options() -> None:
    (call,) = calls("_c10d.ProcessGroupNCCL")
    given = [ast.unparse(argument).rpartition(".")[2] for argument in call.args]
    assert parameters(methods("ProcessGroupNCCL")["__init__"]) == (given, len(given))
    assert not call.keywords


def test_the_options_are_made_of_nothing_and_have_what_is_set() -> None:
    (call,) = calls("_c10d.ProcessGroupNCCL.Options")
    assert not [*call.args, *call.keywords]
    assert parameters(methods("ProcessGroupNCCL.Options")["__init__"])[1] == 0
    targets = [target for node in ast.walk(asked()) if isinstance(node, ast.Assign) for target in node.targets]
    fields = [one.attr for one in targets if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "options"]
    assert fields == ["_timeout"]
    setter = methods("ProcessGroupNCCL.Options")["_timeout"]  # the later of the two is the setter
    assert [ast.unparse(one) for one in setter.decorator_list] == ["_timeout.setter"]
    assert ast.unparse(setter.args.args[1].annotation or ast.Constant(None)) == "timedelta"


def test_a_group_connects_to_one_device_when_it_is_told_to() -> None:
    (call,) = calls("backend.eager_connect_single_device")
    assert parameters(methods("ProcessGroupNCCL")["eager_connect_single_device"]) == (["device"], len(call.args))
