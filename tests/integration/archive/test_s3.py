"""An archive in real dialects of S3, and kills of its writer.

Covers: archive/store.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import replicas
from replicas import errors
from replicas.archive import ArchiveKey, Rules, Writer
from replicas.archive import reader as reading
from replicas.archive import store as storing
from replicas.archive.store import Denied, Missing, Store
from tests.support.archives import CHANNEL, KEY, bytes_of, changed, version
from tests.support.archives.servers import ENVIRONMENT, make_bucket, serving
from tests.support.archives.weed import seaweed

WORDS = np.random.default_rng(5).integers(0x3C00, 0x3D00, 40_001, dtype=np.uint16)
WRITE = Path(__file__).with_name("archive_writer.py")


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an S3 server: moto 5.2.5, and SeaweedFS 4.48."""
    if request.param == "seaweedfs":
        with seaweed(tmp_path_factory.mktemp("weed")) as url:
            yield url
    else:
        with serving() as (url, *_):
            yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty archive."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT": server}.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex}"
    make_bucket(server, name)
    return f"s3://{name}/run"


def test_versions_go_through_a_bucket(bucket: str) -> None:
    words = WORDS
    writer = Writer(bucket, CHANNEL, run="grpo", key=KEY, rules=Rules(keep=3, grace_s=0.0))
    follower = replicas.follow(bucket, CHANNEL, key=KEY.public, timeout=20)
    for number in range(1, 8):
        writer.write(version(number, words))
        with next(follower) as update:
            assert (update.version, bytes_of(update)) == (number, words.tobytes())
        words = changed(words, number)
    follower.close()
    assert len(Store(bucket, CHANNEL).list_names("entries")) == 3
    joiner = replicas.follow(f"{bucket}/{CHANNEL}", key=KEY.public, timeout=20)
    with next(joiner) as update:
        assert update.version == 7


def test_a_bucket_has_conditional_writes(bucket: str) -> None:
    store = Store(bucket, CHANNEL)
    tag = store.put("latest", b"1", new=True)
    with pytest.raises(storing.Overtaken):
        store.put("latest", b"2", new=True)
    store.put("latest", b"2", tag)
    with pytest.raises(storing.Overtaken, match=r"latest cannot be written: .* PreconditionFailed"):
        store.put("latest", b"3", tag)
    data, tag = store.read("latest")
    assert data == b"2"
    with pytest.raises(storing.Unchanged):
        store.read("latest", unless=tag)


def test_a_second_writer_is_refused_by_name(bucket: str) -> None:
    one, other = (Writer(bucket, CHANNEL, run="grpo", key=KEY) for _ in range(2))
    other.write(version(1, WORDS))
    with pytest.raises(errors.Fenced, match=r"is written by .* process \d+"):
        one.write(version(1, changed(WORDS, 1)))


def test_a_large_whole_is_sent_in_parts(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_SINGLE_NBYTES", 6 << 20)
    monkeypatch.setattr(storing, "_PART_NBYTES", 5 << 20)
    words = np.random.default_rng(1).integers(0, 65536, 6 << 20, dtype=np.uint16)
    Writer(bucket, CHANNEL, run="grpo", key=KEY).write(version(1, words))
    with next(replicas.follow(bucket, CHANNEL, key=KEY.public, timeout=20)) as update:
        assert bytes_of(update) == words.tobytes()


def test_a_bucket_that_is_missing_or_dies_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATIENCE_S", 0.2)
    says = (
        r"s3://nowhere/run/policy: data/.* cannot be written: .* (NoSuchBucket .check the URL|AccessDenied .check the)"
    )
    with pytest.raises((Missing, Denied), match=says):
        Writer("s3://nowhere/run", CHANNEL, run="grpo", key=KEY).write(version(1, WORDS))
    Writer(bucket, CHANNEL, run="grpo", key=KEY).write(version(1, WORDS))
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    follower = replicas.follow(bucket, CHANNEL, key=KEY.public)
    monkeypatch.setattr(storing, "CALL_S", 2.0)
    with pytest.raises(errors.ArchiveError, match="latest cannot be read") as caught:
        next(follower)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_that_is_killed_leaves_a_readable_archive(tmp_path: Path, seed: int) -> None:
    """At any moment, again and again; the next one goes on with it."""
    url, key = f"file://{tmp_path}/archive", ArchiveKey.of_file(tmp_path / "key.pem")
    random, newest = np.random.default_rng(seed), 0
    for _ in range(3):
        command = [sys.executable, str(WRITE), url, str(tmp_path / "key.pem")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                newest = int(line)
                if random.random() < 0.3:
                    time.sleep(float(random.random()) * 0.02)
                    break
            process.send_signal(signal.SIGKILL)
        follower = replicas.follow(url, CHANNEL, key=key.public, timeout=20)
        with next(follower) as update:
            assert update.version >= newest, "an older version is the newest after a kill"
            first = np.frombuffer(bytes_of(update), np.uint16)
            assert (first == update.version).all(), "all words of a version are its number"
            newest = update.version
        follower.close()
    last = Writer(url, CHANNEL, run="grpo", key=key, rules=Rules(keep=1, grace_s=0.0))
    for number in (newest + 1, newest + 2):
        last.write(version(number, np.full(20_001, number, np.uint16)))
    assert [len(Store(url, CHANNEL).list_names(folder)) for folder in ("entries", "data")] == [1, 2], "nothing is left"
