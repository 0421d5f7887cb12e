"""Manifests in pieces: how much is asked for at once, what is kept, and what is not
taken.

Covers: core/versions/fetching.py.
"""

from __future__ import annotations

import pytest
import xxhash

from replicas import errors
from replicas.core.versions.fetching import PIECE_NBYTES, SLOW_S, WINDOW_MAX_NBYTES, Cache, Fetch, pieces
from replicas.messages import ManifestAsk, ManifestPiece
from replicas.messages.bounds import MANIFEST_NBYTES


def manifest_of(nbytes: int) -> tuple[str, bytes]:
    data = bytes(range(256)) * -(-nbytes // 256)
    data = data[:nbytes]
    return xxhash.xxh3_128_hexdigest(data), data


def fetched(data: bytes, name: str, nbytes_per_s: float, rtt_s: float = 0.01) -> tuple[bytes, float, list[int]]:
    """Over a link: what came, how long it took, and the windows."""
    fetch, now, windows = Fetch(name), 0.0, []
    ask = fetch.ask(now)
    while True:
        windows.append(ask.nbytes)
        now += rtt_s
        answer: bytes | ManifestAsk | None = None
        for piece in pieces(ask, data):
            now += len(piece.data) / nbytes_per_s
            answer = fetch.add(piece, now)
        if isinstance(answer, bytes):
            return answer, now, windows
        assert answer is not None
        ask = answer


@pytest.mark.parametrize("nbytes", [1, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 3_000_000])
def test_it_comes_whole(nbytes: int) -> None:
    name, data = manifest_of(nbytes)
    assert fetched(data, name, 1e9)[0] == data


def test_as_much_is_asked_for_as_the_link_carries_in_a_moment() -> None:
    name, data = manifest_of(3_300_000)
    _, slow_s, slow = fetched(data, name, 200_000.0)
    assert max(slow[1:]) <= 200_000 * SLOW_S
    assert slow_s < 1.2 * len(data) / 200_000
    _, _, crawling = fetched(data, name, 10_000.0)
    assert crawling[-1] <= 32 * 2**10
    name, data = manifest_of(MANIFEST_NBYTES)
    _, fast_s, fast = fetched(data, name, 1e9, rtt_s=0.1)
    assert max(fast) == WINDOW_MAX_NBYTES
    assert fast_s < 5.0


def test_what_is_not_what_was_asked_for_is_not_taken() -> None:
    name, data = manifest_of(100)
    for answer, error in [
        (ManifestPiece(name, 0, 0, b""), errors.Gone),
        (ManifestPiece(name, 0, MANIFEST_NBYTES + 1, data), errors.ManifestMismatch),
        (ManifestPiece(name, 0, 100, data[::-1]), errors.ManifestMismatch),
    ]:
        fetch = Fetch(name)
        fetch.ask(0.0)
        with pytest.raises(error):
            fetch.add(answer, 1.0)
    fetch = Fetch(name)
    fetch.ask(0.0)
    assert fetch.add(ManifestPiece(name, 50, 100, data[50:]), 1.0) is None, "of no question of ours"
    assert fetch.add(ManifestPiece(name, 0, 100, data[:50]), 1.0) is None
    assert fetch.add(ManifestPiece(name, 50, 100, data[50:]), 1.0) == data


def test_an_answer_is_bounded_whatever_was_asked() -> None:
    name, data = manifest_of(2 * WINDOW_MAX_NBYTES)
    many = pieces(ManifestAsk(name, 0, 2**60), data)
    assert sum(len(piece.data) for piece in many) == WINDOW_MAX_NBYTES
    assert max(len(piece.data) for piece in many) == PIECE_NBYTES
    assert pieces(ManifestAsk(name, 2**60, 1), data) == pieces(ManifestAsk(name, 0, 1), None)
    assert len(pieces(ManifestAsk(name, 5, 0), data)) == 1


def test_what_was_used_last_is_kept() -> None:
    cache: Cache[str] = Cache(10)
    for key in "abc":
        cache.put(key, key.upper(), 4)
    assert [cache.get(key) for key in "abc"] == [None, "B", "C"]
    cache.get("b")
    cache.put("d", "D", 4)
    assert [cache.get(key) for key in "bcd"] == ["B", None, "D"]
    cache.put("large", "L", 100)
    assert [cache.get(key) for key in ("b", "d", "large")] == [None, None, "L"]
    cache.put("e", "E", 1)
    assert [cache.get(key) for key in ("large", "e")] == [None, "E"]
