"""Which run is meant: by its config, by the folder that one stands in, or by an
address."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from replicas import environ
from replicas.cli.client import Client
from replicas.cli.located import state_dir_of
from replicas.common.decoding import MALFORMED
from replicas.config.file import load
from replicas.config.places import absolute, state_home
from replicas.config.structs import Config
from replicas.errors import Disconnected, UsageError
from replicas.linux import private
from replicas.linux.processes import start_time
from replicas.status import RunStatus

__all__ = [
    "ENDPOINT_FILE",
    "SILENT_S",
    "EndpointFile",
    "NotTrusted",
    "RunAddress",
    "RunEndWatcher",
    "find_endpoint",
    "find_state_dir",
    "lives",
    "read_endpoint",
    "trusted",
]

ENDPOINT_FILE = "endpoint.json"
"""Name of the file in a run's state folder that says where its supervisor listens."""


SILENT_S = 30.0
"""How long a supervisor that lives may not answer before whoever waits for its end
gives up."""


class NotTrusted(UsageError):
    """The state folder is somebody else's: where it leads to, and what it has us send
    there, is his choice."""

    default_hint = "give --endpoint HOST:PORT or unix:PATH, or run this as the user of the supervisor"

    @classmethod
    def of(cls, state_dir: Path, error: private.NotPrivate) -> NotTrusted:
        what = error.strerror if error.filename == str(state_dir) else f"{error.strerror}: {error.filename}"
        return cls(f"the state folder {state_dir} is not trusted: {what}")


def trusted(state_dir: Path) -> Path:
    """The folder itself, once it is known to be ours (or root's); also one that is not
    there.

    :raises NotTrusted: it is somebody else's, or others can write to it.
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
    """``endpoint``: ``host:port`` of the control port. ``pid``: the supervisor's.
    ``socket``: path of the Unix socket."""

    endpoint: str
    pid: int
    run: str
    socket: str = ""


def read_endpoint(state_dir: Path) -> EndpointFile:
    """Where the supervisor of this state folder listens.

    :raises Disconnected: when no supervisor has written it, or the file is damaged.
    :raises NotTrusted: it, or the folder, is somebody else's.
    """
    path = state_dir / ENDPOINT_FILE
    try:
        return msgspec.json.decode(private.read(path), type=EndpointFile)
    except private.NotPrivate as error:
        raise NotTrusted.of(state_dir, error) from error
    except FileNotFoundError as error:
        raise Disconnected(
            f'run "{state_dir.name}" is not running: {path} does not exist', hint="start it with: replicas run CONFIG"
        ) from error
    except (OSError, *MALFORMED) as error:
        raise Disconnected(f"{path} cannot be read: {error}", hint="give --endpoint HOST:PORT instead") from error


def find_endpoint(*, folder: Path) -> EndpointFile:
    """The supervisor of the only run that has its state below ``folder``.

    :raises UsageError: when several runs have their state below ``folder``.
    :raises Disconnected: when there is none.
    """
    running = sorted(folder.glob(f".replicas/*/{ENDPOINT_FILE}"))
    ended = sorted(folder.glob(".replicas/*/lock"))
    if not running and len(ended) > 1:
        names = ", ".join(path.parent.name for path in ended)
        raise Disconnected(f"none of the runs here is running: {names}", hint="start one with: replicas run CONFIG")
    return read_endpoint(_only_run(folder, running or ended))


def find_state_dir(*, folder: Path) -> Path:
    """The state folder of a run, whether it is running or over: as
    :func:`find_endpoint`, and running ones go first."""
    running = sorted(folder.glob(f".replicas/*/{ENDPOINT_FILE}"))
    return _only_run(folder, running or sorted(folder.glob(".replicas/*/lock")))


def _only_run(folder: Path, found: list[Path]) -> Path:
    """The state folder of the only one of these files that is of a living run, or of
    the only one at all."""
    living = [path for path in found if len(found) > 1 and lives(path.parent)]
    if len(living) == 1:
        found = living
    if len(found) > 1:
        runs = ", ".join(path.parent.name for path in found)
        raise UsageError(f"several runs have their state here: {runs}", hint="name the CONFIG of one")
    if not found:
        raise Disconnected(
            f"no run has its state in {folder / '.replicas'}", hint="name its CONFIG, or give --endpoint HOST:PORT"
        )
    return found[0].parent


def lives(state_dir: Path) -> bool:
    """Whether the run of this state folder has a supervisor, as far as its endpoint
    file tells."""
    try:
        return start_time(read_endpoint(state_dir).pid) is not None
    except (Disconnected, NotTrusted):
        return False


class RunEndWatcher:
    """The end of a run, for whoever asks it again and again: nobody answers any more,
    but that may mean other things too.

    :param state_dir: of the run; None: it is elsewhere, and only its silence can be
        judged.
    :raises Disconnected: it is not running.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._pid = 0 if state_dir is None else read_endpoint(state_dir).pid
        self._silent_since: float | None = None

    def answered(self) -> None:
        """It is there."""
        self._silent_since = None

    def came(self, error: Disconnected) -> bool:
        """Whether the run is over, now that a question has ended with ``error``; else
        it is to be asked again.

        :raises Disconnected: its supervisor was killed, or has been silent for
            :data:`SILENT_S`.
        """
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if self._state_dir is None:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                return True
        else:
            dead = start_time(self._pid) is None  # asked first: an orderly end removes the file before
            if not self._is_named():
                return True
            if dead:
                raise error
        if now - self._silent_since > SILENT_S:
            raise error
        return False

    def _is_named(self) -> bool:
        """Whether the endpoint file, which goes last, is still that of this
        supervisor."""
        assert self._state_dir is not None
        try:
            return read_endpoint(self._state_dir).pid == self._pid
        except Disconnected:
            return False


def _here() -> Path:
    try:
        return state_home(absolute(Path()))
    except FileNotFoundError as error:
        raise UsageError("the current folder has been removed", hint="change into another one") from error


class RunAddress:
    """A run that a command is about. Nothing is asked or read before it is needed.

    :param config: its config file. :param endpoint: ``HOST:PORT`` or ``unix:PATH`` of a
        supervisor, also on another machine.
    :param token_file: file with its token; default: the run's own, or what
        ``REPLICAS_TOKEN_FILE`` names.
    :raises UsageError: both ``config`` and ``endpoint`` are given.
    """

    def __init__(
        self,
        config: Path | None = None,
        endpoint: str | None = None,
        token_file: Path | None = None,
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if config is not None and endpoint is not None:
            raise UsageError("give CONFIG or --endpoint, not both")
        self.path = config
        self.endpoint = endpoint
        self._token_file = token_file
        self._folder = _here() if folder is None else folder
        self._variables = variables
        self._config: Config | None = None
        self._known_token = ""
        self._known_owner: int | None = None

    @property
    def config(self) -> Config | None:
        """Its config, if one was named.

        :raises BadConfig: with every problem of it.
        """
        if self._config is None and self.path is not None:
            self._config = load(self.path)
        return self._config

    @property
    def remote(self) -> bool:
        """Whether only its address is known: there are no files to look into."""
        return self.endpoint is not None

    @property
    def named_dir(self) -> Path:
        """The state folder, whosever it is: of the config, as far as that can be read
        (a run can be looked at while its config has problems), or the one that is here.

        :raises ReplicasError: there is none, or more than one.
        """
        if self.path is None:
            return find_state_dir(folder=self._folder)
        return state_dir_of(self.path) or load(self.path).run.state_dir

    @property
    def state_dir(self) -> Path:
        """As :attr:`named_dir`.

        :raises NotTrusted: it is somebody else's.
        """
        return trusted(self.named_dir)

    def _supervisor(self) -> EndpointFile:
        """:raises Disconnected: the run is not running. :raises BadConfig: nor could it
        be started."""
        if self.path is None:
            return find_endpoint(folder=self._folder)
        try:
            return read_endpoint(self.state_dir)
        except Disconnected:
            load(self.path)  # its problems are the news then
            raise

    def client(self, *, timeout_s: float = 5.0) -> Client:
        """Whom to ask: by the Unix socket, where the run has one.

        :raises Disconnected: the run is not running. :raises BadConfig: and its config
            has problems.
        """
        ours = frozenset({os.geteuid(), 0})
        if self.endpoint is not None:
            token, owner = self._named_token()
            chosen = self._token_file is not None  # for this endpoint, whosever it is
            owners = None if chosen else ours | ({owner} if owner is not None else set())
            return Client(self.endpoint, token=token, token_owners=owners, timeout_s=timeout_s)
        where = self._supervisor()
        if where.socket and Path(where.socket).is_socket():
            return Client(f"unix:{where.socket}", pid=where.pid, run=where.run, owners=ours, timeout_s=timeout_s)
        token = self._named_token()[0] if self._token_file is not None else self._own_token(self.state_dir)
        return Client(where.endpoint, token=token, pid=where.pid, run=where.run, owners=ours, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 5.0) -> RunStatus:
        """Its state now.

        :raises Disconnected: it is not running, or another run is at its address by
            now.
        """
        if self.endpoint is not None:
            return self.client(timeout_s=timeout_s).status()
        where = self._supervisor()
        answer = self.client(timeout_s=timeout_s).status()
        if answer.run != where.run:
            raise Disconnected(f'run "{where.run}" is gone: {where.endpoint} is now the port of run "{answer.run}"')
        return answer

    def looks(self, interval_s: float, end: RunEndWatcher | None = None) -> Iterator[RunStatus | None]:
        """Its state again and again, until the run is over; None where nobody answered
        this time.

        :param end: from before the first look; default: made now.
        :raises Disconnected: it is not running, or nobody answers any more.
        """
        end = self.end() if end is None else end
        while True:
            found: RunStatus | None = None
            try:
                found = self.status()
                end.answered()
            except Disconnected as error:
                if end.came(error):
                    return
            yield found
            time.sleep(interval_s)

    def end(self) -> RunEndWatcher:
        """For whoever waits for the end of the run that is under way now.

        :raises Disconnected: it is not running.
        """
        return RunEndWatcher(None if self.remote else self.state_dir)

    def _own_token(self, state_dir: Path) -> str:
        """The run's own. Read once: the file goes with the run, whose end may be waited
        for."""
        if not self._known_token:
            try:
                self._known_token = private.read(state_dir / "token").decode("ascii").strip()
            except private.NotPrivate as error:
                raise NotTrusted.of(state_dir, error) from error
            except (OSError, UnicodeDecodeError):
                return ""  # pages can be read without
        return self._known_token

    def _named_token(self) -> tuple[str, int | None]:
        """What ``--token-file`` or the environment names, and whose file it is; a link
        leads where its owner wants it to.

        Read once, as the run's own.
        """
        if self._known_token:
            return self._known_token, self._known_owner
        path = self._token_file or environ.read(self._variables).token_file
        if path is None:
            return "", None
        try:
            with path.open("rb") as file:
                self._known_token = file.read().decode("ascii").strip()
                self._known_owner = os.fstat(file.fileno()).st_uid
        except (OSError, UnicodeDecodeError) as error:
            if self._token_file is None:
                return "", None  # pages can be read without
            raise UsageError(f"cannot read the token in {path}: {error}") from error
        return self._known_token, self._known_owner
