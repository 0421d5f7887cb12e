"""Read a config's tables into structs, which are their schema.

A struct of :mod:`replicas.config.structs` is the only schema of its table. A field is a
key if its type has a reader: a :class:`~replicas.config.values.Form`, a ``Literal``,
another struct, or structs by name. Its default is the key's.

:func:`read` goes through a table once, records every problem, and names the nearest
known key for each unknown one. A struct is built even when an optional key was bad
(with that key's default), so that checks across keys still run; the config is used only
if no problem was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, UNSET

from replicas.config.text import Lines
from replicas.config.values import NAMED_MAX, PROBLEMS_SHOWN, Form, Place, name, nearest, one_of, show


class AsKey(NamedTuple):
    """Facts about a key beyond its field's name, type and default.

    :param default: the default in words, if it is not a constant.
    :param name: name in the file, if it is not the field's name without ``_s``.
    :param stand_in: value for a required key that is missing or bad, so that later
        checks still run.
    :param missing: the remedy when it is missing.
    """

    default: str = ""
    name: str = ""
    stand_in: Any = UNSET
    missing: str = "this key is required"


class Key(NamedTuple):
    """A key of a table, and the field that it sets.

    :ivar type: a form, a struct, or a list of one struct, for structs by name.
    :ivar default: NODEFAULT for a required key.
    """

    field: str
    type: Form | type[msgspec.Struct] | list[type[msgspec.Struct]]
    default: Any
    more: AsKey


Builds = Mapping[type[msgspec.Struct], Callable[[Place, dict[str, Any]], Any]]
"""By struct, the function that builds it from its fields and checks them."""


@cache
def keys_of(kind: type[msgspec.Struct]) -> Mapping[str, Key]:
    """Return the keys that the table of a struct may have, by their names in the file;
    computed once for each struct.

    A ``ClassVar`` declares a key without a field of its own.
    """
    defaults = {
        field.name: field.default if field.default_factory is NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(kind)
    }
    keys = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        form, more = _form_of(get_args(hint)[0] if get_origin(hint) is ClassVar else hint)
        if form is not None:
            default = None if more.default else defaults[field]
            keys[more.name or field.removesuffix("_s")] = Key(field, form, default, more)
    return keys


def _form_of(hint: Any) -> tuple[Form | type[msgspec.Struct] | list[type[msgspec.Struct]] | None, AsKey]:
    """Return the reader of a field, and the facts about its key. The reader is a form,
    a struct or a list of one struct (for structs by name), or None if the field is not
    a key.

    :param hint: the field's annotation.
    """
    more = AsKey()
    while hasattr(hint, "__metadata__") or type(None) in get_args(hint):
        metadata = getattr(hint, "__metadata__", ())
        more = next((one for one in metadata if isinstance(one, AsKey)), more)
        form = next((one for one in metadata if isinstance(one, Form)), None)
        if form is not None:
            return form, more
        hint = hint.__origin__ if hasattr(hint, "__metadata__") else get_args(hint)[0]
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint)), more
    if get_origin(hint) is dict:
        return [get_args(hint)[1]], more
    return hint if issubclass(hint, msgspec.Struct) else None, more


def read(place: Place, value: object, kind: type[msgspec.Struct], builds: Builds = {}) -> Any:  # noqa: B006  # read only
    """Read a table into a ``kind``, and return the struct, or UNSET if a required key
    is missing or bad. Add all problems to ``place``.

    :param builds: by struct, the function ``build(place, fields)`` that makes and
        checks one; a struct without is made by ``kind(**fields)``.
    """
    if not isinstance(value, Mapping):
        return _no_table(place, value)
    keys, fields = keys_of(kind), dict[str, Any]()
    for key, item in value.items():
        known = keys.get(key)
        if known is None:
            close = "" if len(place.problems) >= PROBLEMS_SHOWN else nearest(str(key), keys)  # not shown
            place.at(str(key)).problem(f"unknown key{close}")
        elif (found := _value(place.at(key), item, known.type, builds)) is not UNSET:
            fields[known.field] = found
    for key, known in keys.items():
        if known.default is NODEFAULT and key not in value:
            place.at(key).problem(f"missing; {known.more.missing}")
        if known.more.stand_in is not UNSET:
            fields.setdefault(known.field, known.more.stand_in)
    if any(known.default is NODEFAULT and known.field not in fields for known in keys.values()):
        return UNSET
    build = builds.get(kind)
    return kind(**fields) if build is None else build(place, fields)


def _value(place: Place, value: object, kind: Any, builds: Builds) -> Any:
    """Read a value, and return it, or UNSET after adding a problem to ``place``.

    :param kind: its form; a struct, for a table; or [struct], for a table of tables.
    :param builds: by struct, the function ``build(place, fields)`` that makes it.
    """
    if isinstance(kind, Form):
        return kind.read(place, value)
    return each(place, value, kind[0], builds) if isinstance(kind, list) else read(place, value, kind, builds)


def each(place: Place, value: object, kind: type[msgspec.Struct], builds: Builds) -> Any:
    """Read a table of tables of one ``kind``; return a dict of structs by name.

    Tables that cannot be read, or have no valid name, are left out of the dict. Add
    problems to ``place``.

    :param builds: by struct, the function ``build(place, fields)`` that makes it.
    :returns: UNSET if ``value`` is not a table, or has too many tables.
    """
    if not isinstance(value, Mapping):
        return _no_table(place, value)
    if len(value) > NAMED_MAX:
        return place.problem(f"expected at most {NAMED_MAX} tables, got {len(value):,}")
    found = {}
    for key, item in value.items():
        here = place.at(str(key))
        one = read(here, item, kind, builds) if name.read(here, key) is not UNSET else UNSET
        if one is not UNSET:
            found[str(key)] = one
    return found


def _no_table(place: Place, value: object) -> Any:
    """Add the problem of a value that is not a table; return UNSET.

    The text does not show a list, which may have secrets.
    """
    return place.problem(f"expected a table, got {'a list' if isinstance(value, list | tuple) else show(value)}")


def in_order_of(
    mapping: object, problems: Sequence[tuple[tuple[str, ...], str]], lines: Lines | None = None
) -> list[str]:
    """Return the texts of the problems in the order of the file: the first 100, and
    then, if there are more, a text with the number of the others.

    :param mapping: the content of the file.
    :param problems: ``(path of keys, message)`` each.
    :param lines: finds the line of a key, with which its text begins; None: no lines.
    """
    order: dict[tuple[str, ...], int] = {}

    def visit(path: tuple[str, ...], value: object) -> None:
        """Enter the path of ``value`` into ``order``, with the next number; if
        ``value`` is a table, go on with its keys, in their order."""
        order[path] = len(order)
        for key, item in value.items() if isinstance(value, Mapping) else ():
            visit((*path, str(key)), item)

    def position(path: tuple[str, ...]) -> int:
        """Return the number of the path, or of its nearest known table."""
        while path not in order:
            path = path[:-1]
        return order[path]

    visit((), mapping)
    found: list[str] = []
    for path, message in sorted(problems, key=lambda problem: position(problem[0]))[:PROBLEMS_SHOWN]:
        line = lines.of(path) if lines is not None else None
        found.append(f"line {line}: {message}" if line is not None else message)
    rest = len(problems) - len(found)
    return [*found, f"and {rest:,} more problems"] if rest else found
