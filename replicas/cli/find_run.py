"""Find the run that a command addresses: by config, working directory, or address.

A run must be visible and stoppable while its config has problems. So its state folder
is found in a config file that need only be TOML: two values suffice, ``name`` and
``state_dir`` of ``[run]``.
"""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec

from replicas import environ
from replicas.common.decoding import MALFORMED
from replicas.common.foreign import one_line
from replicas.config import text as config_text
from replicas.config import values as config_values
from replicas.config.file import default_state_dir, load, place_of
from replicas.config.structs import Config
from replicas.control.client import Client
from replicas.errors import BadConfig, Disconnected, ReplicasError, UsageError
from replicas.linux import private
from replicas.linux.processes import start_time
from replicas.status import RunStatus
from replicas.telemetry import event_log
from replicas.telemetry.events import RunEnded, RunStarted
from replicas.trust.tokens import OPERATOR_FILE

ENDPOINT_FILE = "endpoint.json"
"""File in a run's state folder with the address of its supervisor."""
STATE_FILE, EVENTS_FILE = "state.json", "events.jsonl"
SILENT_S = 30.0
"""Seconds of silence of a living supervisor after which a wait for its end gives up."""


class NotTrusted(UsageError):
    """The state folder belongs to another user, who could redirect requests."""

    default_hint = "give --endpoint HOST:PORT or unix:PATH, or run this as the user of the supervisor"

    @classmethod
    def of(cls, state_dir: Path, error: private.NotPrivate) -> NotTrusted:
        """Return (do not raise) the error for this folder; ``error`` has the reason."""
        what = error.strerror if error.filename == str(state_dir) else f"{error.strerror}: {error.filename}"
        return cls(f"the state folder {state_dir} cannot be trusted: {what}")


def trusted(state_dir: Path) -> Path:
    """Return the folder, after a check on disk that it is this user's or root's.

    A folder that is missing passes, too.

    :raises NotTrusted: it is another user's, or other users can write to it.
    :raises Disconnected: it cannot be opened.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), private.folder(state_dir):
            pass
    except private.NotPrivate as error:
        raise NotTrusted.of(state_dir, error) from error
    except OSError as error:
        raise Disconnected(f"{state_dir} cannot be opened: {error.strerror}", hint=NotTrusted.default_hint) from error
    return state_dir


class EndpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a supervisor, as JSON.

    ``endpoint``: ``host:port`` of the control port. ``pid``: the supervisor's.
    ``socket``: path of the Unix socket.
    """

    endpoint: str
    pid: int
    run: str
    socket: str = ""


def read_endpoint(state_dir: Path) -> EndpointFile:
    """Return the addresses that the supervisor has written into this state folder.

    :raises Disconnected: there is no file, or it is damaged; the text says how the run
        ended.
    :raises NotTrusted: the file or the folder is another user's.
    """
    path = state_dir / ENDPOINT_FILE
    try:
        return msgspec.json.decode(private.read(path), type=EndpointFile)
    except private.NotPrivate as error:
        raise NotTrusted.of(state_dir, error) from error
    except FileNotFoundError as error:
        if pid := starting(state_dir):
            text = f'run "{state_dir.name}" is starting: process {pid} does not answer yet'
            raise Disconnected(text, hint="wait for it with: replicas wait") from error
        if left := _describe_detached(state_dir, time.time()):
            hint = "start the next supervisor with: replicas run CONFIG"
            raise Disconnected(f'run "{state_dir.name}" {left}', hint=hint) from error
        text = f'run "{state_dir.name}" is not running: {how_it_ended(state_dir) or f"{path} does not exist"}'
        raise Disconnected(text, hint="start it with: replicas run CONFIG") from error
    except (OSError, *MALFORMED) as error:
        raise Disconnected(f"{path} cannot be read: {error}", hint="give --endpoint HOST:PORT instead") from error


def _describe_detached(state_dir: Path, now: float) -> str:
    """Return a clause on a run whose supervisor was detached, or "" if it was not.

    Detached: it ended alone, so that the next one takes over its replicas. The clause
    is such as "has no supervisor since 10:20:30: ...".

    :param now: the present time, in seconds since 1970: the replicas may have ended.
    """
    from replicas.supervisor.state.run_state import RunState  # imported late: other commands do not need its modules

    saved = RunState(state_dir / STATE_FILE).peek()
    if saved is None or saved.draining or not saved.agents:
        return ""
    until = saved.at + max(agent.lease_s for agent in saved.agents)
    left, end = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (saved.at, until))
    if now > until:
        return f"is not running: its supervisor left it at {left}, and no other came until {end}"
    return f"has no supervisor since {left}: its replicas go on until {end}, or until the next one takes them over"


def find_state_dir(folder: Path, *, running: bool = False) -> Path:
    """Return the state folder of the only run below ``folder``.

    If there are several, return that of the only run that is alive.

    :param running: True if the caller needs a run that is alive: then the error is
        Disconnected if there are several runs, and none is alive or was killed.
    :raises UsageError: several runs have their state there, and the choice is open.
    :raises Disconnected: no run has its state there.
    """
    started = {path.parent for path in folder.glob(f".replicas/*/{ENDPOINT_FILE}")}
    known = {path.parent for path in folder.glob(".replicas/*/lock") if _is_of_run(path.parent)}
    living = {path for path in known if starting(path)}
    found = sorted(living if len(living) == 1 else living | started or known)
    names = ", ".join(path.name for path in found)
    if not found:
        raise Disconnected(
            f"no run has its state in {folder / '.replicas'}", hint="name a CONFIG, or give --endpoint HOST:PORT"
        )
    if len(found) == 1:
        return found[0]
    if running and not living | started:
        raise Disconnected(f"none of the runs here is running: {names}", hint="start one with: replicas run CONFIG")
    raise UsageError(f"several runs have their state here: {names}", hint="name the CONFIG of one")


def _is_of_run(folder: Path) -> bool:
    """Return True if a state folder is a run's, False if it is an agent's."""
    return not folder.name.startswith("agent-") or (folder / EVENTS_FILE).exists()


def has_supervisor(state_dir: Path) -> bool:
    """Return True if the run's endpoint file names a process that lives.

    Return False if the file is missing or damaged, or not to be trusted.
    """
    try:
        return start_time(read_endpoint(state_dir).pid) is not None
    except (Disconnected, NotTrusted):
        return False


def starting(state_dir: Path) -> int:
    """Return the pid of the living supervisor that holds this run's lock, or 0.

    It may be starting, and not answer yet."""
    try:
        pid, start, *_ = private.read(state_dir / "lock").split() or (b"0", b"0")
        return int(pid) if start_time(int(pid)) == int(start) else 0
    except (OSError, ValueError):
        return 0


def how_it_ended(state_dir: Path) -> str:
    """Return how the last run of this folder ended, as text; "" if it has not."""
    found = [one for one in event_log.tail(state_dir / EVENTS_FILE) if isinstance(one.event, RunStarted | RunEnded)]
    last = found[-1] if found else None
    if last is None or not isinstance(last.event, RunEnded) or starting(state_dir):
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at))
    reason = f": {one_line(last.event.reason)}" if last.event.reason else ""
    return f"it ended at {at} with exit code {last.event.exit_code}{reason}"


def state_dir_of(path: Path) -> Path | None:
    """Return the absolute state folder that the config file ``path`` names.

    Return None if the file cannot be read as TOML or names no valid one. Other problems
    of the file are ignored."""
    try:
        run = tomllib.loads(path.read_bytes().decode("utf-8-sig", "replace")).get("run")
    except (OSError, ValueError, RecursionError):  # not TOML, or excessive numbers or nesting
        return None
    if not isinstance(run, dict):
        return None
    place = place_of(path)
    if "state_dir" in run:
        found = config_values.folder.read(place, run["state_dir"])
    else:
        found = default_state_dir(place, str(config_values.name.read(place, run.get("name"))))
    return None if place.problems else found


def _is_over(state_dir: Path | None, pid: int, error: Disconnected) -> bool:
    """Return whether the run is over, after a request for its status has failed.

    Return False if the caller should ask again, as the supervisor may only be busy. A
    run is over, too, if another supervisor has taken its place.

    :param state_dir: the run's. None stands for a remote run, which is over if its port
        refuses the connection.
    :param pid: pid of the supervisor. :param error: the error of the request.
    :raises Disconnected: the supervisor was killed; raises ``error`` itself.
    """
    if state_dir is None:
        return isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError)
    dead = start_time(pid) is None  # checked first: an orderly exit removes the file before it ends
    try:
        named = read_endpoint(state_dir).pid
    except Disconnected:
        return True
    if named == pid and dead:
        raise error
    return named != pid


class RunAddress:
    """The run that a command addresses. Reads and requests nothing until needed.

    Without ``path`` and ``endpoint`` it is the only run below the working directory.

    :param path: of its config.
    :param endpoint: ``HOST:PORT`` or ``unix:PATH`` of a supervisor, also on another
        machine: then there are no files to read.
    :param token_file: file with its token; default: the run's own, or the one in
        ``REPLICAS_TOKEN_FILE``.
    :raises UsageError: both ``path`` and ``endpoint`` are given.
    """

    def __init__(self, path: Path | None = None, endpoint: str | None = None, token_file: Path | None = None) -> None:
        """Keep how the run is named; read and request nothing yet.

        :param path: of its config.
        :param endpoint: ``HOST:PORT`` or ``unix:PATH`` of its supervisor.
        :param token_file: file with its token; default: the run's own.
        :raises UsageError: both ``path`` and ``endpoint`` are given.
        """
        if path is not None and endpoint is not None:
            raise UsageError("give CONFIG or --endpoint, not both")
        self.path = path
        self.endpoint = endpoint
        self._token_file = token_file
        self._token: tuple[str, int | None] = ("", None)

    @cached_property
    def _folder(self) -> Path:
        """The absolute working folder, below which runs are looked for; read once.

        :raises UsageError: it has been removed."""
        try:
            return config_text.state_home(config_text.absolute(Path()))
        except FileNotFoundError as error:
            raise UsageError("the current folder has been removed", hint="change to another folder") from error

    @cached_property
    def config(self) -> Config | None:
        """The config, loaded from its file at the first use, or None without a path."""
        return None if self.path is None else load(self.path)

    @property
    def named_dir(self) -> Path:
        """The state folder, which may be another user's.

        It is named in the config, which may have problems as long as it is TOML, or
        found below the working directory.

        :raises BadConfig: the config does not name it.
        :raises Disconnected, UsageError: there is no run below the directory, or
            several."""
        if self.path is None:
            return find_state_dir(self._folder)
        if (found := state_dir_of(self.path)) is not None:
            return found
        try:
            return load(self.path).run.state_dir
        except BadConfig as error:
            error.hint = "without CONFIG, in its folder, the command addresses the only run there"
            raise

    @property
    def state_dir(self) -> Path:
        """The run's state folder, as :attr:`named_dir` finds it.

        :raises NotTrusted: it belongs to another user."""
        return trusted(self.named_dir)

    def _supervisor(self) -> tuple[Path, EndpointFile]:
        """Return the run's state folder, and its supervisor's addresses read there.

        :raises Disconnected: the run is not running.
        :raises BadConfig: it is not running, and its config has problems."""
        folder = find_state_dir(self._folder, running=True) if self.path is None else self.state_dir
        try:
            return folder, read_endpoint(folder)
        except Disconnected:
            if self.path is not None:
                load(self.path)  # problems of the config are the more useful error
            raise

    def client(self, *, timeout_s: float = 5.0) -> Client:
        """Return a client of the supervisor, and connect to nothing yet.

        It uses the run's Unix socket if there is one.

        :param timeout_s: seconds for which each request may be silent.
        :raises Disconnected: the run is not running.
        :raises BadConfig: the run is not running, and its config cannot be used."""
        ours = frozenset({os.geteuid(), 0})
        if self.endpoint is not None:
            token, owner = self._read_token()
            chosen = self._token_file is not None  # the user chose this token, so its owner does not matter
            owners = None if chosen else ours | ({owner} if owner is not None else set())
            return Client(self.endpoint, token=token, token_owners=owners, timeout_s=timeout_s)
        _, where = self._supervisor()
        by_socket = where.socket and Path(where.socket).is_socket()
        address, token = (f"unix:{where.socket}", "") if by_socket else (where.endpoint, self._read_token()[0])
        return Client(address, token=token, pid=where.pid, run=where.run, owners=ours, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 5.0) -> RunStatus:
        """Ask the supervisor for the present state of the run, and return it.

        :param timeout_s: seconds to wait for the answer.
        :raises Disconnected: it is not running, or another run has its address now.
        """
        client = self.client(timeout_s=timeout_s)
        answer = client.status()
        if client.run not in ("", answer.run):
            raise Disconnected(f'run "{client.run}" has ended: {client.where} is now the port of run "{answer.run}"')
        return answer

    def poll_status(self, interval_s: float) -> Iterator[RunStatus | None]:
        """Return an iterator that asks for the run's state repeatedly until its end.

        It blocks for ``interval_s`` seconds between requests, and yields None for one
        that had no answer. The run counts as over when its present supervisor has
        ended, even if another one follows. This call reads which supervisor that is: so
        the caller may order the run's end before it uses the iterator.

        :raises Disconnected: it is not running. The iterator raises it if the
            supervisor was killed, or has been silent for :data:`SILENT_S`."""
        if self.endpoint is not None:
            return self._poll(interval_s, None, 0)
        folder, where = self._supervisor()
        return self._poll(interval_s, folder, where.pid)

    def _poll(self, interval_s: float, state_dir: Path | None, pid: int) -> Iterator[RunStatus | None]:
        """Yield states, or None for no answer, until the run is over; sleep between.

        :param state_dir: the run's; None for a remote run.
        :param pid: pid of the supervisor to ask, with whose end the run counts as over;
            0 for a remote run."""
        silent_since: float | None = None
        while True:
            found: RunStatus | None = None
            try:
                found, silent_since = self.status(), None
            except Disconnected as error:
                now = time.monotonic()
                silent_since = silent_since or now
                if _is_over(state_dir, pid, error):
                    return
                if now - silent_since > SILENT_S:
                    raise
            yield found
            time.sleep(interval_s)

    @property
    def starting(self) -> bool:
        """True if a living process holds the run's lock on this machine.

        It may not answer yet. False for a remote run."""
        try:
            return self.endpoint is None and bool(starting(self.state_dir))
        except ReplicasError:
            return False

    def how_it_ended(self) -> str:
        """Return how the run ended, as text, from its events on disk.

        "" if it did not end, or that is not known."""
        with contextlib.suppress(ReplicasError):
            return "" if self.endpoint is not None else how_it_ended(self.state_dir)
        return ""

    def token(self) -> str:
        """Return the token with which a command or a program joins the run.

        It is the operators' one in the run's state folder, or the one in the file that
        an option or ``REPLICAS_TOKEN_FILE`` names.

        :raises UsageError: it is not known here."""
        if not (found := self._read_token()[0]):
            raise UsageError(
                "this order needs the run's token, which is not known here",
                hint=f"give --token-file, or set {environ.TOKEN_FILE}: replicas token shows it on the run's machine",
            )
        return found

    def _read_token(self) -> tuple[str, int | None]:
        """Return (token, owner); the token is empty if it is not known.

        The owner is the uid that owns the file that the user named, or None for the
        run's own file. Links to a named file are followed. A token that was found is
        not read again, as the run's own file is deleted at the run's end, for which the
        caller may wait."""
        if self._token[0]:
            return self._token
        try:
            if self.endpoint is None and self._token_file is None:
                self._token = private.read(self.state_dir / OPERATOR_FILE).decode("ascii").strip(), None
            elif path := self._token_file or environ.read().token_file:
                with path.open("rb") as file:
                    self._token = file.read().decode("ascii").strip(), os.fstat(file.fileno()).st_uid
        except private.NotPrivate as error:
            raise NotTrusted.of(self.state_dir, error) from error
        except (OSError, UnicodeDecodeError) as error:
            if self._token_file is not None:
                raise UsageError(f"cannot read the token in {self._token_file}: {error}") from error
        return self._token  # pages can be read without a token
