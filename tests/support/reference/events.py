"""The page of events, from the types that make up
``replicas.telemetry.events.Event``."""

from __future__ import annotations

import enum
import inspect
import re
from types import UnionType
from typing import Literal, Union, get_args, get_origin

import msgspec

from replicas.status import SyncRecord
from replicas.telemetry import events
from tests.support.reference.text import bullets, markdown

__all__ = ["body", "kinds", "parts", "struct"]


def kinds() -> list[type[msgspec.Struct]]:
    """Every event, in the order of its name."""
    return sorted(get_args(events.Event), key=lambda kind: kind.__name__)


def parts() -> list[type[msgspec.Struct]]:
    """What events are made of."""
    return [events.RankEnd, SyncRecord]


def body() -> str:
    intro = markdown(
        """An event is one line of ``<state_dir>/events.jsonl``, one message of ``GET
        /events``, and one ``Record`` of ``Supervisor.events()``: ``seq`` (a number that
        strictly grows), ``at`` (seconds since 1970) and ``event``, whose field ``type``
        names one of these. Fields are only ever added, with a default. Durations end in
        ``_s`` and are seconds; sizes end in ``_nbytes``. ``Member`` is in `api.md`."""
    )
    made_of = "# What events are made of"
    return "\n\n".join([intro, *map(struct, kinds()), f"#{made_of}", *(f"#{struct(part)}" for part in parts())])


def struct(kind: type[msgspec.Struct]) -> str:
    """A struct with its sentence and its fields."""
    written = {name: text for one in reversed(kind.__mro__) for name, text in inspect.get_annotations(one).items()}
    annotations = {name: re.sub(r"Literal\[.*?\]", "str", str(text)) for name, text in written.items()}
    lines = [
        f"``{one.name}``: ``{annotations[one.name]}``{_default(one)}{_values(one)}"
        for one in msgspec.structs.fields(kind)
    ]
    return "\n\n".join([f"## `{kind.__name__}`", markdown(vars(kind).get("__doc__")), bullets(lines)])


def _values(field: msgspec.structs.FieldInfo) -> str:
    """What a field may be, where that is one of some words that its type does not
    show."""
    kinds = (field.type, *(get_args(field.type) if get_origin(field.type) in (Union, UnionType) else ()))
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words += [
        str(one.value) for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum) for one in kind
    ]
    return f"; one of {', '.join(f'``{word}``' for word in words)}" if words else ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return f" = ``{field.default!r}``"
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = ``{field.default_factory()!r}``"
    return ""
