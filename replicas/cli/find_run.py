"""Resolve which run a command addresses: by config, working directory, or address."""

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
from replicas.config.structs import Config
from replicas.config.text import absolute, state_home
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
"""File in a run's state folder with the address of its supervisor."""


SILENT_S = 30.0
"""How long a living supervisor may not answer before a wait for its end gives up."""


class NotTrusted(UsageError):
    """The state folder is another user's, who would choose where requests are sent."""

    default_hint = "give --endpoint HOST:PORT or unix:PATH, or run this as the user of the supervisor"

    @classmethod
    def of(cls, state_dir: Path, error: private.NotPrivate) -> NotTrusted:
        what = error.strerror if error.filename == str(state_dir) else f"{error.strerror}: {error.filename}"
        return cls(f"the state folder {state_dir} is not trusted: {what}")


def trusted(state_dir: Path) -> Path:
    """The folder itself, checked to be ours or root's, or missing.

    :raises NotTrusted: it is another user's, or other users can write to it.
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
    """The addresses of the supervisor of this state folder.

    :raises Disconnected: no supervisor has written the file, or it is damaged.
    :raises NotTrusted: the file or the folder is another user's.
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
    """The supervisor of the only run whose state is below ``folder``.

    :raises UsageError: several runs have their state there.
    :raises Disconnected: no run has.
    """
    running = sorted(folder.glob(f".replicas/*/{ENDPOINT_FILE}"))
    ended = sorted(folder.glob(".replicas/*/lock"))
    if not running and len(ended) > 1:
        names = ", ".join(path.parent.name for path in ended)
        raise Disconnected(f"none of the runs here is running: {names}", hint="start one with: replicas run CONFIG")
    return read_endpoint(_only_run(folder, running or ended))


def find_state_dir(*, folder: Path) -> Path:
    """The state folder of the only run below ``folder``; running ones go first.

    Raises as :func:`find_endpoint`.
    """
    running = sorted(folder.glob(f".replicas/*/{ENDPOINT_FILE}"))
    return _only_run(folder, running or sorted(folder.glob(".replicas/*/lock")))


def _only_run(folder: Path, found: list[Path]) -> Path:
    """The state folder of the only living run of these files, or of the only run."""
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
    """Whether the run of this state folder has a supervisor, by its endpoint file."""
    try:
        return start_time(read_endpoint(state_dir).pid) is not None
    except (Disconnected, NotTrusted):
        return False


class RunEndWatcher:
    """Tells a polling caller whether a run that stopped answering is over.

    :param state_dir: of the run; None: it is remote, and only its silence can be
        judged.
    :raises Disconnected: it is not running.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._pid = 0 if state_dir is None else read_endpoint(state_dir).pid
        self._silent_since: float | None = None

    def answered(self) -> None:
        """The run has answered."""
        self._silent_since = None

    def came(self, error: Disconnected) -> bool:
        """Whether the run is over, after a request failed with ``error``.

        :raises Disconnected: its supervisor was killed, or has been silent for
            :data:`SILENT_S`.
        """
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if self._state_dir is None:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                return True
        else:
            dead = (
                start_time(self._pid) is None
            )  # checked first: an orderly exit removes the file before the process ends
            if not self._is_named():
                return True
            if dead:
                raise error
        if now - self._silent_since > SILENT_S:
            raise error
        return False

    def _is_named(self) -> bool:
        """Whether the endpoint file, removed last, still names this supervisor."""
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
    """The run that a command addresses. Reads and requests nothing until needed.

    :param config: its config file. :param endpoint: ``HOST:PORT`` or ``unix:PATH`` of a
        supervisor, also on another machine.
    :param token_file: file with its token; default: the run's own, or the one in
        ``REPLICAS_TOKEN_FILE``.
    :param folder: where to look without ``config``; default: the working directory.
    :param variables: environment variables; default: those of this process.
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

        :raises BadConfig: with all its problems.
        """
        if self._config is None and self.path is not None:
            self._config = load(self.path)
        return self._config

    @property
    def remote(self) -> bool:
        """Whether only its address is known, so that there are no files to read."""
        return self.endpoint is not None

    @property
    def named_dir(self) -> Path:
        """The state folder, which may be another user's.

        It is named in the config, which may have problems as long as this can be read,
        or found below the working directory.

        :raises ReplicasError: there is none, or more than one.
        """
        if self.path is None:
            return find_state_dir(folder=self._folder)
        return state_dir_of(self.path) or load(self.path).run.state_dir

    @property
    def state_dir(self) -> Path:
        """As :attr:`named_dir`.

        :raises NotTrusted: it is another user's.
        """
        return trusted(self.named_dir)

    def _supervisor(self) -> EndpointFile:
        """The endpoint file of the run.

        :raises Disconnected: the run is not running. :raises BadConfig: nor could it be
            started.
        """
        if self.path is None:
            return find_endpoint(folder=self._folder)
        try:
            return read_endpoint(self.state_dir)
        except Disconnected:
            load(self.path)  # problems of the config are the more useful error
            raise

    def client(self, *, timeout_s: float = 5.0) -> Client:
        """A client of the supervisor, over the Unix socket if the run has one.

        :raises Disconnected: the run is not running. :raises BadConfig: and its config
            has problems.
        """
        ours = frozenset({os.geteuid(), 0})
        if self.endpoint is not None:
            token, owner = self._named_token()
            chosen = self._token_file is not None  # the user chose this token for this endpoint, whoever owns it
            owners = None if chosen else ours | ({owner} if owner is not None else set())
            return Client(self.endpoint, token=token, token_owners=owners, timeout_s=timeout_s)
        where = self._supervisor()
        if where.socket and Path(where.socket).is_socket():
            return Client(f"unix:{where.socket}", pid=where.pid, run=where.run, owners=ours, timeout_s=timeout_s)
        token = self._named_token()[0] if self._token_file is not None else self._own_token(self.state_dir)
        return Client(where.endpoint, token=token, pid=where.pid, run=where.run, owners=ours, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 5.0) -> RunStatus:
        """The present state of the run.

        :raises Disconnected: it is not running, or another run has its address now.
        """
        if self.endpoint is not None:
            return self.client(timeout_s=timeout_s).status()
        where = self._supervisor()
        answer = self.client(timeout_s=timeout_s).status()
        if answer.run != where.run:
            raise Disconnected(f'run "{where.run}" is gone: {where.endpoint} is now the port of run "{answer.run}"')
        return answer

    def looks(self, interval_s: float, end: RunEndWatcher | None = None) -> Iterator[RunStatus | None]:
        """Poll the state until the run is over; yields None when there was no answer.

        :param end: made before the first poll; default: made now.
        :raises Disconnected: it is not running, or no longer answers.
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
        """A watcher for the end of the present run.

        :raises Disconnected: it is not running.
        """
        return RunEndWatcher(None if self.remote else self.state_dir)

    def _own_token(self, state_dir: Path) -> str:
        """The run's own token.

        Read once: the file is deleted with the run, whose end may be waited for.
        """
        if not self._known_token:
            try:
                self._known_token = private.read(state_dir / "token").decode("ascii").strip()
            except private.NotPrivate as error:
                raise NotTrusted.of(state_dir, error) from error
            except (OSError, UnicodeDecodeError):
                return ""  # pages can be read without
        return self._known_token

    def _named_token(self) -> tuple[str, int | None]:
        """The token of ``--token-file`` or the environment, and the owner of its file.

        Read once, as the run's own. Links are followed.
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
