"""The command ``token``: show and replace a run's tokens, or make new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replicas.cli.base import Json, ThisRun, command, json_text
from replicas.control.commands import TokensOrder
from replicas.errors import UsageError
from replicas.linux import private
from replicas.trust.certificate import KEY_FILE, PortKey
from replicas.trust.tokens import OPERATOR_FILE, ROLES, Role, Tokens


@command()
def token(
    *,
    place: ThisRun,
    role: Annotated[str | None, typer.Option(metavar="ROLE", help="Only a member's, or an operator's.")] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the token; the one before stays valid until the next rotation.")
    ] = False,
    revoke_old: Annotated[
        bool, typer.Option("--revoke-old", help="End the token before, and the connections that showed it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End a token also while nodes are away, which then cannot come back.")
    ] = False,
    join: Annotated[
        bool, typer.Option("--join", help="With the address, as an agent on another machine needs it.")
    ] = False,
    make_in: Annotated[
        Path | None,
        typer.Option("--make", metavar="FOLDER", help="Make key and tokens of a run to come, as files in FOLDER."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the run's tokens; with --rotate or --revoke-old, change them first.

    A member token lets a program join channels; an operator token also lets a person or
    an agent give orders. A token names the key of the control port if that speaks TLS.
    It is a secret.
    """
    if role is not None and role not in ROLES:
        raise UsageError(f'"{role}" is not a role', hint=f"pass --role {' or '.join(ROLES)}")
    if make_in is not None:
        print("\n".join(make(make_in)))
        return
    if join and (role is not None or rotate or revoke_old or as_json):
        raise UsageError("--join shows the operator's token, and takes no other option")
    chosen: Role | None = "operator" if join else role
    if rotate and chosen is None:
        raise UsageError("--rotate needs a role", hint="add --role member or --role operator")
    order = TokensOrder(role=chosen, rotate=rotate, revoke_old=revoke_old, force=force)
    found: dict[Role, dict[str, str]] = place.client().order(order).result or {}
    if join:
        print(f"{found['operator']['token']}@{place.status().endpoint}")
    elif as_json:
        print(json_text(found))
    elif chosen is not None:
        print(found[chosen]["token"])
    else:
        for name, one in found.items():
            print(f"{name:10}{one['token']}{'  (the previous one is still valid)' if one['old_is_valid'] else ''}")


def make(folder: Path) -> list[str]:
    """Create a key and tokens as files in a folder; return config lines that name them.

    The folder is made if it is missing.

    :raises UsageError: there is a key already, or the folder cannot be used.
    """
    where = folder.absolute()
    try:
        if (where / KEY_FILE).exists():
            raise UsageError(f"there is a key in {where} already", hint="name another folder, or remove that one")
        private.make_folder(where)
        tokens = Tokens()
        tokens.key = PortKey.of_folder(where).hash
        private.create(where / "token", f"{tokens.text('member')}\n".encode())
        private.create(where / OPERATOR_FILE, f"{tokens.text('operator')}\n".encode())
    except OSError as error:
        raise UsageError(
            f"{where} cannot be used: {error.strerror or error}", hint=getattr(error, "hint", "")
        ) from error
    return [
        "[control]",
        f'certificate = "{where / KEY_FILE}"',
        f'token_file = "{where / "token"}"',
        f'operator_token_file = "{where / OPERATOR_FILE}"',
    ]
