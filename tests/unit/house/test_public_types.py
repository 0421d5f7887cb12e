"""What is told of the types that pyright reports."""

from __future__ import annotations

from typing import Any

import replicas
from tests.support.public_types import problems

KNOWN = [
    {"name": f"replicas.{name}", "isTypeKnown": True, "isTypeAmbiguous": False, "diagnostics": []}
    for name in replicas.__all__
]


def symbol(name: str, message: str = "", *, ambiguous: bool = True) -> dict[str, Any]:
    return {
        "name": name,
        "isTypeKnown": False,
        "isTypeAmbiguous": ambiguous,
        "diagnostics": [{"message": message}] if message else [],
    }


def test_only_what_is_public_is_told_of() -> None:
    missing = "Type is missing type annotation\n\xa0\xa0Inferred type is int"
    found = [
        symbol("replicas.channel.channel.Channel.name", missing),
        symbol("replicas.channel.channel.Channel._hub", missing),
        symbol("replicas.channel.session.hub.Hub.name", missing),
        symbol("replicas.errors.Busy", 'Type of base class "X" is partially unknown'),
        symbol("replicas.join", ambiguous=False),
    ]
    assert list(problems([*KNOWN, *found])) == [
        "replicas.channel.channel.Channel.name: Type is missing type annotation Inferred type is int",
        "replicas.join: a part of its type is unknown",
    ]


def test_a_name_that_pyright_does_not_see_is_told_of() -> None:
    assert list(problems([one for one in KNOWN if one["name"] != "replicas.Channel"])) == [
        "replicas.Channel: pyright does not see it"
    ]
