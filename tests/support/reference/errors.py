"""The page of errors, from the tree of ``replicas.errors``."""

from __future__ import annotations

from collections.abc import Iterator

from replicas import errors
from replicas.cli.base import exit_code_of
from replicas.control.exit_codes import FAILED, UNAVAILABLE
from tests.support.reference.text import bullets, markdown

__all__ = ["body", "tree"]


def tree() -> list[tuple[int, type[errors.ReplicasError]]]:
    """Depth and class of every error, each behind the one above it."""
    return list(_below(errors.ReplicasError, 0))


def _below(kind: type[errors.ReplicasError], depth: int) -> Iterator[tuple[int, type[errors.ReplicasError]]]:
    yield depth, kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _below(below, depth + 1)


def body() -> str:
    intro = markdown(
        """Every error of this library is a ``replicas.errors.ReplicasError``. It carries
        data: ``channel``, ``version``, ``phase``, ``members`` (those concerned), ``hint``
        (the remedy) and ``unanimous`` (every rank of the replica gets the same verdict). A
        raised error may bring a more specific hint than the remedy below."""
    )
    drawn = "\n".join(f"{'    ' * depth}{kind.__name__}" for depth, kind in tree())
    return "\n\n".join([intro, f"```\n{drawn}\n```", *(_entry(kind) for _, kind in tree())])


def _entry(kind: type[errors.ReplicasError]) -> str:
    if kind is errors.ReplicasError:
        return f"## `{kind.__name__}`\n\n{markdown(kind.__doc__)}"
    above = [one.__name__ for one in kind.__mro__[1:] if issubclass(one, errors.ReplicasError)]
    facts = [f"place: {' ← '.join(f'`{name}`' for name in [kind.__name__, *above])}"]
    facts += [f"remedy: {kind.default_hint or 'the message and its `hint` name it'}"]
    facts += [f"exit code: {_code(kind)}"]
    return f"## `{kind.__name__}`\n\n{markdown(kind.__doc__)}\n\n{bullets(facts)}"


def _code(kind: type[errors.ReplicasError]) -> str:
    looking, changing = (exit_code_of(kind(""), failed) for failed in (UNAVAILABLE, FAILED))
    if looking == changing:
        return str(looking)
    return f"{changing} of a command that changes the run or waits for it, else {looking}"
