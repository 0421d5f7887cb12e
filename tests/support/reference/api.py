"""The page of public names: signatures and docstrings, from the objects themselves."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import msgspec

import replicas
from replicas import engine, sources, status, testing
from replicas.testing import engine_suite
from tests.support.reference.events import parts, struct
from tests.support.reference.source import attributes
from tests.support.reference.text import markdown

__all__ = ["INTERNAL", "body", "members", "public", "states"]

INTERNAL = {
    "Coordinator": {
        *("expect", "joined", "keep_decisions", "progress", "recovering", "store_started", "wait_for_store")
    },
    "Receipt": {"of"},
    "Supervisor": {*("emit", "fleet", "looked_at", "on_open", "on_tokens", "resources", "save", "say", "spawn")},
    "Update": {"ended", "touched", "withdraw"},
}
"""Names without an underscore that are there for other parts of this package, not for
users."""

_MADE_BY_USERS = ("Coordinator", "FakeRun", "Shard", "Supervisor")
_SHOWN = ("__aenter__", "__iter__")


def public() -> dict[str, Any]:
    """Every public name of the package but the module of errors and the version."""
    return {name: getattr(replicas, name) for name in replicas.__all__ if name not in ("errors", "__version__")}


def body() -> str:
    intro = markdown(
        """``import replicas`` takes no torch; the names load their modules when first used.
        ``replicas.errors`` has a page of its own (`errors.md`), and so have events
        (`events.md`). ``replicas.__version__`` is the version as text."""
    )
    return "\n\n".join(
        [
            intro,
            "## `replicas`",
            *(_entry(name, value) for name, value in public().items()),
            "## `replicas.engine`",
            markdown(engine.__doc__),
            *(
                _entry(name, getattr(engine, name))
                for name in engine.__all__
                if isinstance(getattr(engine, name), type)
            ),
            _entry("follow", engine.follow),
            "## `replicas.sources`",
            markdown(sources.__doc__),
            *(_entry(name, getattr(sources, name)) for name in sources.__all__),
            "## `replicas.testing`",
            markdown(testing.__doc__),
            *(_entry(name, getattr(testing, name)) for name in testing.__all__),
            "## `replicas.testing.engine_suite`",
            markdown(engine_suite.__doc__),
            *(_entry(name, getattr(engine_suite, name)) for name in ("Trial", "play")),
            "Scenes:\n\n" + "\n".join(f"- {name}" for name in engine_suite.SCENES),
            "## `replicas.status`",
            markdown(status.__doc__),
            *(f"#{struct(one)}" for one in states()),
        ]
    )


def states() -> list[type[msgspec.Struct]]:
    """What a status is made of, but for what the page of events has."""
    found = (getattr(status, name) for name in status.__all__)
    structs = (one for one in found if isinstance(one, type) and issubclass(one, msgspec.Struct))
    return [one for one in structs if one not in parts()]


def _entry(name: str, value: Any) -> str:
    if not isinstance(value, type):
        code = _code(name, value) if callable(value) else ""
        return "\n\n".join(filter(None, [f"### `{name}`", code, markdown(value.__doc__)]))
    found = [f"### `{name}`", _fields(value)]
    if name in _MADE_BY_USERS:
        found.append(_code(name, vars(value)["__init__"], bound=True))
    found.append(markdown(value.__doc__))
    for base in value.__mro__[1:]:
        if base.__module__.startswith("replicas.") and members(base):
            found.append(markdown(base.__doc__))
    found += [_member(name, one, value) for one in members(value)]
    return "\n\n".join(filter(None, found))


def members(kind: type) -> list[str]:
    """Public methods, properties and documented attributes of a class and of ours that
    it extends."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("replicas."):
            found |= dict.fromkeys(attributes(base))
            found |= {name: None for name, value in vars(base).items() if _is_member(value)}
    internal = INTERNAL.get(kind.__name__, ())
    return [name for name in found if (name in _SHOWN or not name.startswith("_")) and name not in internal]


def _is_member(value: object) -> bool:
    return isinstance(value, FunctionType | classmethod | staticmethod | property)


def _member(owner: str, name: str, kind: type) -> str:
    value = inspect.getattr_static(kind, name, None)
    if value is None:
        return _with_title(f"#### `{owner}.{name}`", attributes(kind)[name])
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        annotation = inspect.get_annotations(value.fget).get("return", "") if value.fget else ""
        return _with_title(f"#### `{owner}.{name}: {annotation}`", value.__doc__)
    return _with_title(f"#### `{owner}.{name}`\n\n{_code(name, value, bound=True)}", value.__doc__)


def _with_title(title: str, docstring: str | None) -> str:
    return f"{title}\n\n{markdown(docstring)}".strip()


def _fields(kind: type) -> str:
    names: Any = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", ())
    found = {name: one for base in reversed(kind.__mro__) for name, one in inspect.get_annotations(base).items()}
    lines = (f"{name}: {found[name]}".replace("'", '"') for name in names)
    return "\n".join(["```python", *lines, "```"]) if names else ""


def _code(name: str, function: Any, *, bound: bool = False) -> str:
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    line = f"{prefix}{name}({', '.join(_parameters(function, bound))})"
    returns = inspect.get_annotations(inspect.unwrap(function)).get("return", "None")
    tail = "" if returns in ("None", None) else f" -> {returns}"
    if len(line + tail) > 88:
        inner = "".join(f"    {one},\n" for one in _parameters(function, bound))
        line = f"{prefix}{name}(\n{inner})"
    return f"```python\n{line}{tail}\n```"


def _parameters(function: Any, bound: bool) -> Iterator[str]:
    """As they stand in the source: the annotations are text already."""
    starred = False
    for index, one in enumerate(inspect.signature(function).parameters.values()):
        if bound and not index:
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        star = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        starred = starred or star == "*"
        annotation = "" if one.annotation is one.empty else f": {one.annotation}"
        equals = " = " if annotation else "="
        default = "" if one.default is one.empty else f"{equals}{_shown(one.default)}"
        yield f"{star}{one.name}{annotation}{default}"


def _shown(value: object) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)
