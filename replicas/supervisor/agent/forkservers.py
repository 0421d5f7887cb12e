"""The sidecar forkservers of a node, which the ranks of all its replicas share.

If ranks will need one, it is started together with them. If they probably never will,
because all members share memory, it is started at the first connection. Ranks that
differ in environment variables that a process reads only at its start have a separate
forkserver (:func:`replicas.linux.rank_environment.lasting`). A forkserver that no
replica of the node uses ends when the next replica starts. The replicas of one that is
given up (:mod:`replicas.sidecar.kept_forkserver`) cannot sync, and are ended.

The *template* of a group is such a process, too, with the group's modules loaded: it
forks the shims (:mod:`replicas.supervisor.shim.template`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from replicas import environ
from replicas.common import own_code
from replicas.common.logs import Log
from replicas.linux.helpers import TORCHRUN, interpreter
from replicas.linux.processes import LAUNCHER, MARK
from replicas.linux.rank_environment import lasting
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.supervisor.agent.shim_process import base_environment
from replicas.supervisor.wire.orders import PartSpec

log = Log("replicas.agent")

_OWN = (environ.LOG_DIR, environ.GROUP, environ.REPLICA, environ.REPLICAS, environ.GENERATION, environ.FORKSERVER, MARK)
"""Variables that differ between groups, replicas or generations."""
_DEVICES = ("CUDA_VISIBLE_DEVICES",)
"""Read when a process first uses a GPU, which a template does not."""
_ROOM_NBYTES = 4096
"""Room for the command line of a forked process."""


def template_environment(spec: PartSpec) -> dict[str, str]:
    """Return the environment in which the modules of a part's template are loaded.

    A template is a process with a group's modules loaded, from which its parts'
    processes fork. The environment is that of the part's ranks, but for what differs
    between replicas.
    """
    env = {name: value for name, value in spec.env.items() if name not in (*_OWN, *_DEVICES)}
    env = {name: value for name, value in env.items() if not name.startswith(TORCHRUN)}
    if spec.launcher == "torchrun" and spec.nproc_per_node > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, for several workers
    return own_code.rooted(env, spec.cwd)


def template_command(spec: PartSpec) -> list[str]:
    """Return the command line of a part's template, from which its processes fork."""
    program = Path(spec.cwd, spec.command[0])
    folder = program.resolve().parent if program.suffix == ".py" else spec.cwd
    file = Path(__file__).parent.parent / "shim" / "template.py"
    options = {
        "--launcher": LAUNCHER if spec.launcher == "torchrun" else "",
        "--modules": ",".join(spec.preload),
        "--cwd": spec.cwd,
        "--path": str(folder),
        "--room": "-" * _ROOM_NBYTES,
    }
    return [interpreter(), "-u", str(file), *(f"{name}={value}" for name, value in options.items())]


def _log_no_template(reason: str) -> None:
    """Log that processes are started without a template from now on."""
    log.warning("starting processes without their template, as it %s", reason)


class Forkservers:
    """A node's forkservers, which fork ranks' helper processes, and groups' templates.

    The helper processes are sidecars. A template has a group's modules loaded, and
    forks the processes of its parts. For the event loop's thread only.

    :param broken: called with an address and a reason when ranks with that address
        cannot sync.
    """

    def __init__(self, broken: Callable[[str, str], None]) -> None:
        """Begin without forkservers and templates.

        :param broken: called on the loop with an address and a reason when ranks with
            that address cannot sync, as its forkserver is not started again.
        """
        self._broken = broken
        self._kept: dict[frozenset[tuple[str, str]], KeptForkserver] = {}
        self._templates: dict[str, tuple[object, KeptForkserver]] = {}
        """By group: what its template depends on, and the process, maybe of several."""

    def address(self, environment: Mapping[str, str], *, ahead: bool) -> str:
        """Return the socket address of the forkserver for ranks with this environment.

        Ranks connect there to have helper processes (sidecars) forked. The first call
        for such an environment binds the address.

        :param ahead: start the forkserver now, unless it runs; else at the first
            connection.
        :raises OSError: the socket cannot be bound.
        """
        own = lasting(environment)
        if environ.STATE_ID in environment:
            own[environ.STATE_ID] = environment[environ.STATE_ID]
        key = frozenset(own.items())
        if key not in self._kept:
            self._kept[key] = KeptForkserver({**base_environment(), **own}, lambda reason: self._given_up(key, reason))
        if ahead:
            self._kept[key].need()
        return self._kept[key].address

    def retain(self, addresses: Collection[str]) -> None:
        """SIGKILL and forget the forkservers with other addresses; do not wait."""
        for key, one in list(self._kept.items()):
            if one.address not in addresses:
                self._kept.pop(key).kill()

    def template(self, spec: PartSpec) -> str:
        """Return the socket address of the template that forks the part's processes.

        A template is a process that has loaded the group's ``preload`` modules. Start
        it, without waiting, for the first part that needs it; groups that need the same
        share it. Kill one that no group needs any longer, as the config has changed.
        Return "" if the group preloads none, or it cannot be started or was given up.
        """
        if not spec.preload:
            return ""
        needs = template_command(spec), template_environment(spec)
        known = {group: kept for group, (needed, kept) in self._templates.items() if needed == needs}
        kept = known.get(spec.group) or next(iter(known.values()), None)
        try:
            kept = kept or KeptForkserver(needs[1], _log_no_template, needs[0])
        except OSError as error:
            _log_no_template(str(error))
            return ""
        _, before = self._templates.get(spec.group, (needs, kept))
        self._templates[spec.group] = needs, kept
        if before not in [one for _, one in self._templates.values()]:
            before.kill()
        kept.need()
        return "" if kept.over else kept.address

    async def aclose(self) -> None:
        """Kill all forkservers and templates, and wait up to 5 s for their ends."""
        templates = {kept for _, kept in self._templates.values()}
        await asyncio.gather(*(one.aclose() for one in (*self._kept.values(), *templates)))

    def _given_up(self, key: frozenset[tuple[str, str]], reason: str) -> None:
        """Forget a forkserver that does not run, and call ``broken`` with its address.

        :param key: the environment variables by which it is kept.
        :param reason: why it was given up, for people.
        """
        self._broken(self._kept.pop(key).address, reason)
