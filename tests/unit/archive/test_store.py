"""The storage: conditions, names, deadlines, and errors without credentials.

Covers: archive/store.py.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from replicas import errors
from replicas.archive import store as storing
from replicas.archive.store import Denied, Missing, Overtaken, Store, Tag, Unchanged


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else f"file://{tmp_path}/a%20folder"


def test_objects_are_written_read_listed_and_deleted(place: Any) -> None:
    store = Store(place, "policy", make=True)
    store.put("data/1", b"0123456789")
    store.put("data/2", memoryview(b"ab"))
    data, tag = store.read("data/1")
    assert data == b"0123456789"
    assert store.read("data/1", 2, 3)[0] == b"234"
    assert store.read("data/1", 8, 5)[0] == b"89", "less, if it is shorter"
    with pytest.raises(Unchanged):
        store.read("data/1", unless=tag)
    chunks: list[bytes | memoryview] = []
    for nbytes in (0, 10):
        chunks.clear()
        assert store.read("data/1", 0, nbytes, take=chunks.append)[0] == b""
        assert b"".join(chunks) == b"0123456789"
    assert sorted(store.list_names("data")) == ["data/1", "data/2"]
    store.delete(["data/0", "data/1", "data/2"])
    assert store.list_names("data") == []
    with pytest.raises(Missing, match=r"policy: data/1 cannot be read: .* not found.*check the URL"):
        store.read("data/1")


def test_a_write_has_a_condition(place: Any) -> None:
    store = Store(place, "policy", make=True)
    first = store.put("latest", b"1", new=True)
    with pytest.raises(Overtaken):
        store.put("latest", b"2", new=True)
    second = store.put("latest", b"2", first)
    for old in (first, Tag(e_tag='"another"')):
        with pytest.raises(Overtaken, match="latest"):
            store.put("latest", b"3", old)
    assert store.read("latest") == (b"2", second)


def test_of_two_writers_one_is_first(place: Any) -> None:
    """Each has read the same object; any number of them."""
    store = Store(place, "policy", make=True)
    tag = store.put("latest", b"0", new=True)
    won: list[int] = []
    others = [Store(place, "policy") for _ in range(8)]

    def write(number: int) -> None:
        try:
            others[number].put("latest", b"%d" % number, tag)
        except Overtaken:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.read("latest")[0] == b"%d" % won[0]


class Slow:
    """A store that answers late, or in part."""

    prefix = None

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def get_async(self, path: str, *, options: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        await asyncio.sleep(60)


def test_a_call_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "CALL_S", 0.1)
    store = Store(Slow())  # type: ignore[arg-type]  # a fake
    began = time.monotonic()
    with pytest.raises(errors.ArchiveError, match="x cannot be read: it did not answer in time"):
        store.read("x")
    assert time.monotonic() - began < 5


def test_errors_do_not_show_credentials() -> None:
    text = (
        "Generic S3 error: PUT https://user:hunter2@host/bucket/x?X-Amz-Signature=hunter2&a=b failed: "
        "<?xml version='1.0'?>\n<Error><Code>SlowDown</Code><Key>hunter2</Key></Error>\nsource: hunter2"
    )
    store = Store(Slow(RuntimeError(text)))  # type: ignore[arg-type]  # a fake
    with pytest.raises(errors.ArchiveError, match=r"PUT https://host/bucket/x failed: SlowDown") as caught:
        store.read("x")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(errors.UsageError, match=r"s3://bucket/x is given with credentials") as refused:
        Store("s3://user:hunter2@bucket/x?sig=hunter2")
    assert "hunter2" not in str(refused.value)


def test_errors_are_typed() -> None:
    from obstore import exceptions

    kinds: list[tuple[type[Exception], type[errors.ArchiveError]]] = [
        (exceptions.PermissionDeniedError, Denied),
        (exceptions.UnauthenticatedError, Denied),
        (NotImplementedError, Denied),
        (exceptions.PreconditionError, Overtaken),
        (FileNotFoundError, Missing),
        (exceptions.GenericError, errors.ArchiveError),
        (OSError, errors.ArchiveError),
    ]
    for theirs, ours in kinds:
        with pytest.raises(errors.ArchiveError, match="x cannot be read: why") as caught:
            Store(Slow(theirs("why"))).read("x")  # type: ignore[arg-type]  # a fake
        assert type(caught.value) is ours
    assert {kind.__name__ for kind, _ in kinds if kind.__module__.startswith("obstore")} - {"GenericError"} < set(
        storing._KINDS
    )
    for name in set(storing._KINDS) - {"NotImplementedError", "FileNotFoundError"}:
        assert hasattr(exceptions, name), "obstore has renamed it"


@pytest.mark.parametrize("url", ["policy", "s3://", "ftp://host/x", "az://container/x", "file:///nowhere/at/all"])
def test_a_url_that_is_not_valid_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(errors.UsageError, match=r"cannot be used: .*give a URL such as s3://bucket/run"):
        Store(url)


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(errors.UsageError, match=r"an archive needs obstore .pip install 'torch-replicas\[archive\]'"):
        Store("s3://bucket/run")


def test_the_thread_ends_with_the_store() -> None:
    store = Store(MemoryStore())
    threads = [one for one in threading.enumerate() if one.name == "replicas-archive"]
    store.close()
    for one in threads[-1:]:
        one.join(10)
        assert not one.is_alive()
