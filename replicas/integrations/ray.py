"""Channels between the actors of a Ray program.

::

    from replicas.integrations.ray import coordinator, options

    handle = coordinator({"policy": {"sources": ["trainer"], "targets": ["rollout"]}})
    trainer = Trainer.options(**options(handle, group="trainer")).remote()
    identity = options(handle, group="rollout", replica="auto")
    rollouts = [Rollout.options(**identity).remote() for _ in range(4)]

Each actor calls ``replicas.join("policy")`` without further arguments: identity,
endpoint and token are in its environment. Ray starts and restarts the actors; a dead
actor is lost to its channels within seconds, and joins again when it is restarted.

The coordinator is a named actor on the caller's node, with a port and a key (TLS) that
a restart keeps, so members return to it with the versions that they hold. It ends with
the Ray job, or with the last handle of it, like every process that it or a member has
started. (:mod:`replicas.integrations.ray_run` runs a whole config on Ray.)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import replicas
from replicas import environ, errors
from replicas.integrations.shared import releases
from replicas.trust.certificate import make_pem

__all__ = ["Handle", "coordinator", "find", "options"]

NAME = "replicas"
_START_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 20.0
_PORTS = range(20_000, 30_000)
"""Ports that neither the kernel, nor Ray's workers, nor Kubernetes assign.

So the port is still free when the coordinator restarts.
"""


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A running coordinator. It may be passed to other actors and tasks.

    :ivar actor: the actor; lives while any process of the job has a handle.
    :ivar endpoint: ``host:port`` of its control port, for ``join(endpoint=...)``.
    :ivar token: the join token of its members, for ``join(token=...)``; a secret.
    :ivar run: the name of the run.
    """

    actor: Any
    endpoint: str
    token: str = field(repr=False)
    run: str

    def close(self) -> None:
        """Stop the coordinator cleanly, for all that hold a handle, waiting 20 s at
        most; then kill its actor. Call this before the Ray job ends."""
        try:
            ray.get(self.actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            pass  # dead already, or killed below
        finally:
            ray.kill(self.actor)


class CoordinatorActor:
    """The actor's class: one :class:`replicas.Coordinator` on its own event loop."""

    def __init__(self, settings: Mapping[str, Any], pem: bytes) -> None:
        """Store the settings and the key; after a restart by Ray also :meth:`start`.
        Replace the process's event loop policy by asyncio's.

        :param settings: arguments of :class:`replicas.Coordinator`.
        :param pem: its key and certificate.
        """
        self._settings, self._pem = settings, pem
        self._running = contextlib.ExitStack()
        # Ray's policy is uvloop, which notices the end of children in the main thread
        # only.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._address: tuple[str, str, str] | None = None
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # raised by Ray itself
            if ray.get_runtime_context().was_current_actor_reconstructed:
                self.start()  # the caller does not call start() again

    def start(self) -> tuple[str, str, str]:
        """Start the coordinator unless it runs; return its endpoint, token and run's
        name."""
        if self._address is None:
            host = ray.util.get_node_ip_address()
            with tempfile.NamedTemporaryFile(prefix="replicas-") as certificate:  # mode 0600; read within the block
                certificate.write(self._pem)
                certificate.flush()
                made = replicas.Coordinator(
                    host=host, store_bind=host, certificate=Path(certificate.name), **self._settings
                )
            running = self._running.enter_context(made.in_thread())
            self._address = (running.endpoint, running.token, self._settings["run"])
        return self._address

    def close(self) -> None:
        """Stop the coordinator: disconnect the members, and end the store's process."""
        self._running.close()


def coordinator(
    channels: Mapping[str, Any],
    *,
    groups: Mapping[str, Any] | None = None,
    name: str = NAME,
    run: str | None = None,
    port: int | None = None,
    token: str | None = None,
    pem: bytes | None = None,
    **actor: Any,
) -> Handle:
    """Start a coordinator as an actor named ``name``; return when it listens.

    ``channels`` and ``groups`` are those of :class:`replicas.Coordinator`. The actor
    runs on this node, takes no CPU, and is restarted by Ray when its process dies. Keep
    the handle: Ray ends an actor that has no handle left, unless it is *detached*.

    :param name: the actor's name in the Ray namespace of this program, for
        :func:`find`.
    :param run: name of the run, in errors and logs; default: ``name``.
    :param port: port to listen on; default: a free one.
    :param token: secret that members must show; default: a new random one. The join
        token of the handle adds the hash of the coordinator's key to it.
    :param pem: the coordinator's key and certificate; default: new ones.
    :param actor: further options of the actor, such as ``namespace``, ``lifetime`` or
        ``scheduling_strategy``, in place of those above.
    :raises replicas.errors.BadConfig: the channels are not valid.
    :raises replicas.errors.UsageError: another argument is not valid, Ray is not
        initialised, or the name is taken.
    :raises replicas.errors.WorldError: the coordinator could not start.
    """
    releases.check("ray")
    _must_be_connected("coordinator")
    settings: dict[str, Any] = {
        "channels": channels,
        "groups": groups,
        "run": name if run is None else run,
        "port": free_port() if port is None else port,
        "token": secrets.token_urlsafe(24) if token is None else token,
    }
    replicas.Coordinator(**settings)  # check the arguments here, not in the actor
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    chosen = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": node, **actor, "name": name}
    try:
        started = ray.remote(CoordinatorActor).options(**chosen).remote(settings, pem or make_pem())
    except ValueError as error:
        text = f"the actor {name} could not be made: {error}"
        raise errors.UsageError(text, hint="find(...) returns a coordinator that runs; or pass another name") from error
    return _handle(started)


def find(name: str = NAME, *, namespace: str | None = None) -> Handle:
    """Return the coordinator that another part of the program has started.

    If it does not run, its actor starts it again; the call waits for that. The caller
    need not close the handle: :meth:`Handle.close` stops the coordinator for all.

    :param name: of its actor. :param namespace: Ray namespace of the actor; default:
        this program's.
    :raises replicas.errors.UsageError: no actor has this name in the namespace.
    :raises replicas.errors.WorldError: the actor is dead, or did not start it in 60 s.
    """
    _must_be_connected("find")
    try:
        actor = ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        text = f"no coordinator is named {name}"
        hint = "start it with coordinator(...), and name its Ray namespace if that is another one"
        raise errors.UsageError(text, hint=hint) from error
    return _handle(actor)


def options(
    handle: Handle,
    *,
    group: str,
    replica: int | Literal["auto"] = 0,
    rank: int | None = None,
    world_size: int | None = None,
    token_file: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return options for an actor (or task) with the identity of one rank, in
    environment variables; start nothing.

    :param handle: of the coordinator whose channels the rank joins. :param group: the
        rank's group.
    :param replica: index of its replica; ``"auto"``: the lowest index that is free when
        it joins, also after a restart of the actor.
    :param rank, world_size: the rank in its replica and the replica's number of ranks,
        for a replica of several actors. Ranks other than 0 then need a number as
        ``replica``, not ``"auto"``.
    :param token_file: path, on the actor's node, of a file with ``handle.token``.
        Without it the token is in the actor's ``runtime_env``, which Ray shows to its
        users and writes into its logs.
    :param runtime_env: the actor's further environment; it is not changed.
    :returns: ``{"runtime_env": ...}``: a copy of ``runtime_env`` with the identity in
        its ``env_vars``, too.
    """
    if not isinstance(handle, Handle):
        raise errors.UsageError(f"options: {handle!r} is not a handle", hint="pass what coordinator(...) returned")
    numbers = {environ.REPLICA: replica, "RANK": rank, "WORLD_SIZE": world_size}
    secret = (environ.TOKEN, handle.token) if token_file is None else (environ.TOKEN_FILE, token_file)
    variables = {
        environ.ENDPOINT: handle.endpoint,
        environ.RUN: handle.run,
        environ.GROUP: group,
        **{key: str(number) for key, number in numbers.items() if number is not None},
        **dict([secret]),
    }
    given = dict(runtime_env or {})
    return {"runtime_env": {**given, "env_vars": {**given.get("env_vars", {}), **variables}}}


def _must_be_connected(what: str) -> None:
    """Raise UsageError if this process is not connected to Ray.

    :param what: name of the called function, for the error.
    """
    if not ray.is_initialized():
        raise errors.UsageError(f"{what}: this process is not connected to Ray", hint="call ray.init() first")


def _handle(actor: Any) -> Handle:
    """Have the actor start its coordinator unless it runs; wait, and return the handle.

    :raises replicas.errors.WorldError: the actor is dead, or did not start it in 60 s.
    :raises replicas.errors.ReplicasError: it refused to start; the actor was killed.
    """
    try:
        endpoint, token, run = ray.get(actor.start.remote(), timeout=_START_TIMEOUT_S)
    except errors.ReplicasError:  # Ray keeps the type, and adds the actor's traceback
        ray.kill(actor)
        raise
    except (ray.exceptions.RayError, AttributeError) as error:
        raise errors.WorldError(
            f"the coordinator's actor did not start: {error}", hint="see the actor's log in Ray's dashboard"
        ) from error
    return Handle(actor=actor, endpoint=endpoint, token=token, run=run)


def free_port() -> int:
    """Return a port of :data:`_PORTS` that is free now; it is not reserved."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise errors.WorldError("no free port was found between 20000 and 29999", hint="pass port=...")
