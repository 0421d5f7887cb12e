"""The environment variables of a rank, all read here.

The supervisor's shim and guard set them, :func:`replicas.join` reads them. A framework
that starts its own processes may set the same variables, or pass the values to ``join``
as arguments, which take precedence.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from replicas import errors
from replicas.linux.helpers import TORCHRUN
from replicas.linux.processes import MARK

__all__ = [
    "ACCELERATOR",
    "CA_FILE",
    "ENDPOINT",
    "FORKSERVER",
    "GENERATION",
    "GROUP",
    "JOIN",
    "LOG_DIR",
    "REPLICA",
    "REPLICAS",
    "RUN",
    "STATE_ID",
    "TOKEN",
    "TOKEN_FILE",
    "Environment",
    "read",
    "read_token",
    "token_owners",
    "token_reader",
    "without_torchrun",
]

ENDPOINT = "REPLICAS_ENDPOINT"
"""``host:port`` of the coordinator's control port."""
TOKEN_FILE = "REPLICAS_TOKEN_FILE"
"""Path of the file that holds the run's token."""
CA_FILE = "REPLICAS_CA_FILE"
"""Path of the certificates (PEM) of a CA that signs the control port's certificate.

Used if the token names no key; the port's certificate must then be for the host in the
endpoint.
"""
TOKEN = "REPLICAS_TOKEN"
"""The run's token itself, if ``REPLICAS_TOKEN_FILE`` is not set.

For programs on machines without such a file, such as Ray actors. Prefer a file, which
fewer users can read.
"""
RUN = "REPLICAS_RUN"
"""Name of the run."""
STATE_ID = "REPLICAS_STATE_ID"
"""Internal: random id of the run's state folder; it is not a secret.

A later supervisor of that folder uses it to find remnants of an earlier one.
"""
JOIN = "REPLICAS_JOIN"
"""Read by ``replicas agent``: the operator token of a run and its control port, as
``TOKEN@HOST:PORT``."""
GROUP = "REPLICAS_GROUP"
"""Name of this rank's group."""
REPLICA = "REPLICA_ID"
"""Index of this rank's replica in its group, from 0.

In programs that others start also ``auto``: the coordinator chooses a free index.
"""
REPLICAS = "REPLICA_NUM"
"""Number of replicas in the group."""
GENERATION = "REPLICAS_GENERATION"
"""Number of this start of the replica, from 1."""
FORKSERVER = "REPLICAS_FORKSERVER"
"""Internal: the socket of the node's forkserver, and the secret that it requires."""
LOG_DIR = "REPLICAS_LOG_DIR"
"""Folder of this replica's log files."""
ACCELERATOR = "REPLICAS_ACCELERATOR"
"""``package.module:Class`` of the accelerator to use in place of CUDA.

A subclass of ``replicas.weights.copies.accelerator.Accelerator``. It is the only
variable with this prefix that ranks inherit from the supervisor's own environment.
"""

_TORCHRUN_NAMES = frozenset({"RANK", "WORLD_SIZE"})
_TORCHRUN_PREFIXES = ("LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", TORCHRUN)


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's variables, as :func:`read` returns them; None for one not set."""

    endpoint: str | None = None
    token_file: Path | None = None
    token: str | None = None
    run: str | None = None
    group: str | None = None
    replica: int | Literal["auto"] | None = None
    replicas: int | None = None
    generation: int = 1
    forkserver: str | None = None
    log_dir: Path | None = None
    rank: int | None = None
    world_size: int | None = None
    mark: str = ""
    """Ownership tag of the shim under which the process runs. It is a secret, as it
    proves which shim started the process."""


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Return a rank's variables from this process's environment, or from ``environ``.

    An empty variable counts as not set. No file is read, so the token of
    ``REPLICAS_TOKEN_FILE`` is not in the result.

    :raises replicas.errors.UsageError: a variable that must be a whole number from 0 on
        is not.
    """
    source = os.environ if environ is None else environ
    token_file, log_dir, generation = source.get(TOKEN_FILE), source.get(LOG_DIR), _integer(source, GENERATION)
    return Environment(
        endpoint=source.get(ENDPOINT) or None,
        token_file=Path(token_file) if token_file else None,
        token=source.get(TOKEN, "").strip() or None,
        run=source.get(RUN) or None,
        group=source.get(GROUP) or None,
        replica="auto" if source.get(REPLICA) == "auto" else _integer(source, REPLICA),
        replicas=_integer(source, REPLICAS),
        generation=1 if generation is None else generation,
        forkserver=source.get(FORKSERVER) or None,
        log_dir=Path(log_dir) if log_dir else None,
        rank=_integer(source, "RANK"),
        world_size=_integer(source, "WORLD_SIZE"),
        mark=source.get(MARK, ""),
    )


def read_token(environment: Environment) -> str:
    """Return the token in the file that ``REPLICAS_TOKEN_FILE`` names, read now; if
    that is not set, the token in ``REPLICAS_TOKEN``.

    :raises replicas.errors.UsageError: neither variable is set, or the file is missing,
        unreadable or empty.
    """
    path, hint = environment.token_file, f"{TOKEN_FILE} must name the run's own token file"
    if path is None and environment.token:
        return environment.token
    if path is None:
        raise errors.UsageError(
            f"no token: {TOKEN_FILE} is not set",
            hint="start this program with `replicas run`, or pass token=... to join",
        )
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UsageError(f"cannot read the token in {path}: {error}", hint=hint) from error
    if not token:
        raise errors.UsageError(f"the token file {path} is empty", hint=hint)
    return token


def token_reader(environment: Environment) -> Callable[[], str]:
    """Read the token, and return a function that reads it again at each call, as it may
    be replaced. While the file cannot be read (the run is over, or starts), that
    function returns the last token.

    :raises replicas.errors.UsageError: as :func:`read_token`.
    """
    known = read_token(environment)

    def read_again() -> str:
        """Return the token in the file now, or the last one that could be read."""
        nonlocal known
        with contextlib.suppress(errors.UsageError):
            known = read_token(environment)
        return known

    return read_again


def token_owners(environment: Environment) -> frozenset[int]:
    """Return the uids that may see the token: its file's owner, this user and root."""
    owners = {os.geteuid(), 0}
    with contextlib.suppress(OSError):  # removed with its run
        owners |= {environment.token_file.stat().st_uid} if environment.token_file is not None else set()
    return frozenset(owners)


def without_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environ`` without the variables that torchrun sets or reads.

    For programs that are no ranks of that torchrun: they would take its rank numbers
    and options for their own.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _TORCHRUN_NAMES and not name.startswith(_TORCHRUN_PREFIXES)
    }


def _integer(source: Mapping[str, str], name: str) -> int | None:
    """Return the variable ``name`` of ``source`` as a whole number, or None if it is
    not set or empty.

    :raises replicas.errors.UsageError: the variable is not a whole number from 0.
    """
    text = source.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise errors.UsageError(f"{name} must be a whole number, not {text!r}", hint=f"unset {name} or correct it")
    return value
