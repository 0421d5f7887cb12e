"""Objects of an archive in object storage: S3, GCS, Azure, a folder, memory.

A thin layer over obstore (Rust; the extra ``[archive]``). Its calls run on a loop of
their own, on a thread, so that each has a deadline whatever the storage does, a caller
may be interrupted, and no event loop of the caller is needed. Its errors become
:class:`replicas.errors.ArchiveError`, without the storage's text behind the first line,
which may name credentials.

A write with a condition is what keeps two writers apart. A folder has none, so there a
lock on a file beside ``latest`` makes the comparison and the write one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from replicas import errors
from replicas.messages import arguments
from replicas.messages.bounds import text_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
Archive: TypeAlias = "str | ObjectStore"
"""The URL of an archive, or a store of obstore."""
Take: TypeAlias = Callable[[bytes | memoryview], object] | None
Tag = dict[str, str]
"""Which content of an object it is: its e-tag, its generation, or both."""

Found = tuple[bytes, Tag]

CALL_S = 30.0
"""Seconds that any call may take, and those without a byte after which it is over."""
_END_S = 5.0
LEAST_RATE = 1 << 20
"""Bytes in a second that a call may take beyond that."""
_SINGLE_NBYTES = 512 << 20
"""Larger objects are sent in parts: S3 takes 5 GB in one request, and a request that
fails is sent again as a whole."""
_PART_NBYTES, _PARTS_MAX, _CHUNK_NBYTES = 64 << 20, 9_999, 4 << 20
_DENIED = "check the credentials; S3 also denies what does not exist, to those who may not list"
_LOCK = ".latest.lock"
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CREDENTIALS = re.compile(r"\?|//[^/\s@]*:[^/\s@]*@")
_SECRETS = re.compile(r"\?\S*|(?<=//)[^/\s]*@")


class Missing(errors.ArchiveError):
    """The object does not exist, or the storage does not show it yet."""


class Overtaken(errors.ArchiveError):
    """The object is not the one that the caller knows: another process wrote it."""


class Denied(errors.ArchiveError):
    """The storage refuses these credentials, or cannot do this at all: no retry."""


class Unchanged(errors.ArchiveError):
    """The object still has the tag that the caller knows."""


_KINDS: dict[str, tuple[type[errors.ArchiveError], str]] = {
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), (Overtaken, "")),
    **dict.fromkeys(("PermissionDeniedError", "UnauthenticatedError"), (Denied, _DENIED)),
    **dict.fromkeys(("NotSupportedError", "NotImplementedError"), (Denied, "use storage with conditional writes")),
    "FileNotFoundError": (Missing, "check the URL, and that the bucket exists"),
    "NotModifiedError": (Unchanged, ""),
}
"""By the names of obstore's errors, and of those of Python that it raises, too."""


class Store:
    """The objects below one folder of an archive. Calls block; see the module.

    :param archive: a URL, such as ``s3://bucket/run``, ``gs://``, ``az://`` or
        ``file:///folder``, with credentials from the environment as obstore reads them;
        or a store of obstore.
    :param folder: the channel's name; empty: the URL is that of its folder.
    :param make: create the folder of a ``file://`` URL.
    :ivar text: the URL without credentials, for messages.
    :raises replicas.errors.UsageError: the URL is not valid, or obstore is missing.

    All calls raise :class:`Missing`, :class:`Denied` and
    :class:`replicas.errors.ArchiveError`.
    """

    def __init__(self, archive: Archive, folder: str = "", *, make: bool = False) -> None:
        """Start the thread; send nothing."""
        self._objects, where = _open(archive, make)
        self._folder = f"{folder}/" if folder else ""
        self.text: str = f"{where.rstrip('/')}/{folder}".rstrip("/")
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop,), name="replicas-archive", daemon=True)
        thread.start()
        self.close: Callable[[], object] = weakref.finalize(self, _end, loop, thread)

    def read(
        self, name: str, start: int = 0, nbytes: int = 0, *, unless: Tag | None = None, take: Take = None
    ) -> Found:
        """Return an object, or a range of it, and its tag; less if it is shorter.

        :param nbytes: of the range; 0: to the end.
        :param unless: raise Unchanged if the object still has this tag.
        :param take: called with each chunk, on another thread; the result is empty.
        """
        options: Any = {"range": (start, start + nbytes)} if nbytes else {}
        options |= {} if unless is None else {"if_none_match": unless.get("e_tag")}

        async def work() -> Found:
            """Do it."""
            path = self._folder + name
            if take is not None and nbytes and isinstance(getattr(self._objects, "prefix", None), Path):
                for at in range(start, start + nbytes, _CHUNK_NBYTES):  # obstore streams files in pieces of 8 KiB
                    last = min(at + _CHUNK_NBYTES, start + nbytes)
                    take(memoryview(await self._objects.get_range_async(path, start=at, end=last)))
                return b"", {}
            found = await self._objects.get_async(path, options=options)
            if take is None:
                return bytes(await found.bytes_async()), _tag(found.meta)
            async for chunk in found.stream(min_chunk_size=_CHUNK_NBYTES):
                take(chunk)
            return b"", _tag(found.meta)

        return self._call(f"{name} cannot be read", work, nbytes)

    def put(self, name: str, data: bytes | memoryview, tag: Tag | None = None, *, new: bool = False) -> Tag:
        """Write an object; return its tag.

        :param tag: only if the object has this tag.
        :param new: only if there is no such object.
        :raises Overtaken: it has another tag, or is there.
        """
        nbytes, folder = memoryview(data).nbytes, getattr(self._objects, "prefix", None)
        options: Any = {"use_multipart": nbytes > _SINGLE_NBYTES, "chunk_size": max(_PART_NBYTES, nbytes // _PARTS_MAX)}

        async def work() -> Tag:
            """Do it."""
            mode: Any = "create" if new else tag
            if tag is None or not isinstance(folder, Path):
                return _tag(await self._objects.put_async(self._folder + name, data, mode=mode, **options))
            file = os.open(folder / self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
                if _tag(await self._objects.head_async(self._folder + name)) != tag:
                    raise Overtaken(f"{self.text}/{name} was replaced", hint="")
                return _tag(await self._objects.put_async(self._folder + name, data))
            finally:
                os.close(file)

        return self._call(f"{name} cannot be written", work, nbytes)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; some of them may be gone already."""

        async def work() -> None:
            """Do it, one by one: the first that is missing may end a call for many."""
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    await self._objects.delete_async(self._folder + name)

        self._call("objects cannot be deleted", work, len(names) * LEAST_RATE)

    def list_names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder; the newest may be missing."""

        found = self._call(
            f"{folder} cannot be listed", lambda: self._objects.list(self._folder + folder).collect_async()
        )
        return [f"{folder}/{one['path'].rpartition('/')[2]}" for one in found]

    def _call(self, what: str, work: Callable[[], Awaitable[T]], nbytes: int = 0) -> T:
        """Call ``work`` on the loop; return its result, or raise by the deadline.

        :param what: for errors. :param nbytes: that it may move, which takes longer.
        """
        if self._loop.is_closed():
            raise errors.UsageError(f"{self.text} was closed", hint="open the archive again")
        limit_s = CALL_S + nbytes / LEAST_RATE
        future = asyncio.run_coroutine_threadsafe(_await(work, limit_s), self._loop)
        try:
            return future.result(limit_s + CALL_S)  # the loop may be stuck
        except errors.ReplicasError:
            raise
        except Exception as error:  # noqa: BLE001  # obstore has errors of its own, and raises Python's, too
            kind, hint = _KINDS.get(type(error).__name__, (errors.ArchiveError, None))
            why = "it did not answer in time" if isinstance(error, TimeoutError) else _first_line(error)
            raise kind(f"{self.text}: {what}: {why}", hint=hint) from None  # its own text may have credentials
        finally:
            future.cancel()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop a loop, and wait for its thread: at the end of a process Python may abort if
    a thread still comes out of obstore."""
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and close it."""
    loop.run_forever()
    loop.close()


async def _await(work: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Call a function that must be called on a loop; return its result in time."""
    async with asyncio.timeout(limit_s):
        return await work()


def _open(archive: Archive, make: bool) -> tuple[ObjectStore, str]:
    """Return obstore's store for the archive, and its URL without credentials."""
    if not isinstance(archive, str) and hasattr(archive, "get_async"):
        return archive, " ".join(repr(archive).split())
    url = arguments.text("archive", archive)
    where = _SECRETS.sub("", url)
    if _CREDENTIALS.search(url):
        raise errors.UsageError(f"{where} is given with credentials", hint="put them into the environment")
    try:
        from obstore.store import from_url

        # Options replace all of the environment's, of which one is wanted.
        http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        options = {"timeout": "1 day", "read_timeout": f"{CALL_S:g}s", "allow_http": http}
        local: dict[str, dict[str, Any]] = {"file": {"mkdir": make}, "memory": {}}
        return from_url(url, **local.get(url.partition(":")[0], {"client_options": options})), where
    except ImportError as error:
        raise errors.UsageError("an archive needs obstore", hint="pip install 'torch-replicas[archive]'") from error
    except Exception as error:  # noqa: BLE001  # of each scheme another one
        hint = "give a URL such as s3://bucket/run, gs://, az:// or file:///folder, of a bucket or folder that exists"
        raise errors.UsageError(f"{where} cannot be used: {_first_line(error)}", hint=hint) from None


def _tag(meta: Any) -> Tag:
    """Return the tag in what obstore says of an object."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without what may have credentials."""
    text = text_of(error)
    line = _SECRETS.sub("", text.partition("\n")[0].partition("<")[0]).strip() or type(error).__name__
    return " ".join([line[:300], *_CODE.findall(text)[:1]])
