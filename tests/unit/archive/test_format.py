"""The signed objects: what is accepted, and what is refused by name.

Covers: archive/format.py, archive/keys.py.
"""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from replicas import errors
from replicas.archive import ArchiveKey
from replicas.archive.format import Entry, Latest, Link, Range, name_of, pack_manifest, seal, sha256_of, unseal
from replicas.archive.keys import make_pem, verifier
from tests.support.archives import KEY, manifest_of

HASH = "0123456789abcdef" * 4
DIGEST = "99aa06d3014798d86001c324468d497f"  # XXH3 of no blocks


def entry(**facts: object) -> Entry:
    manifest = manifest_of(0)
    known = {
        "format": 1,
        "run": "grpo",
        "channel": "policy",
        "writer": "host",
        "at": 1.5,
        "version": 7,
        "digest": "0" * 32,
        "nbytes": manifest.data_nbytes,
        "blocks": ("0" * 32,),
        "tensors": pack_manifest(manifest),
        "whole": Range(object=name_of("data", 7, HASH, "safetensors"), nbytes=4098, sha256=HASH),
    }
    return Entry(**(known | facts))  # type: ignore[arg-type]  # of the test


def test_an_object_comes_back_as_it_was_signed() -> None:
    link = Link(version=7, entry=name_of("entries", 7, HASH, "json"), sha256=HASH)
    latest = Latest(format=1, run="grpo", channel="policy", writer="host", at=1.5, newest=link, digest=DIGEST)
    one = entry(before=link, meta={"step": 3}, labels=("current",), scores={"reward": 0.5})
    for verify in (verifier(KEY.public), None):
        assert unseal(seal(one, KEY.sign), Entry, verify, "x") == one
        assert unseal(seal(latest, KEY.sign), Latest, verify, "x") == latest
    assert seal(one, KEY.sign).count(b"\n") == 2


def test_names_say_version_and_content() -> None:
    assert name_of("data", 7, HASH, "delta") == "data/00000007-0123456789abcdef.delta"
    assert name_of("data", 123_456_789, HASH, "delta") == "data/123456789-0123456789abcdef.delta"
    assert sha256_of(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_every_other_byte_is_refused() -> None:
    data = seal(entry(), KEY.sign)
    verify = verifier(KEY.public)
    for place in (*range(0, len(data) - 1, 7), len(data) - 2):
        wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(errors.ArchiveTampered):
            unseal(wrong, Entry, verify, "entries/x")
    for length in range(0, len(data) - 1, 11):
        with pytest.raises(errors.ArchiveTampered):
            unseal(data[:length], Entry, verify, "entries/x")


def test_another_key_is_refused_by_name() -> None:
    data = seal(entry(), ArchiveKey(make_pem()).sign)
    with pytest.raises(errors.ArchiveTampered, match="entries/x was not signed by the key"):
        unseal(data, Entry, verifier(KEY.public), "entries/x")
    assert unseal(data, Entry, None, "entries/x") == entry()


def test_an_entry_is_no_latest() -> None:
    with pytest.raises(errors.ArchiveTampered, match="latest is malformed"):
        unseal(seal(entry(), KEY.sign), Latest, verifier(KEY.public), "latest")


def test_a_later_format_is_refused_with_the_remedy() -> None:
    data = seal(entry(format=2), KEY.sign)
    with pytest.raises(errors.UsageError, match=r"entries/x has format 2 \(install a newer release"):
        unseal(data, Entry, verifier(KEY.public), "entries/x")


def test_fields_of_later_releases_are_ignored() -> None:
    body = msgspec.json.encode(msgspec.to_builtins(entry()) | {"object": "entry", "more": [1]})
    data = b"%s\n%s\n" % (body, KEY.sign(body).hex().encode())
    assert unseal(data, Entry, verifier(KEY.public), "x") == entry()


@pytest.mark.parametrize("name", ["../x", "data/7-0.delta", "entries/00000007-0123456789abcdef.json/../../x", "latest"])
def test_names_lead_nowhere_else(name: str) -> None:
    body = msgspec.json.encode(
        msgspec.to_builtins(entry()) | {"object": "entry", "from_whole": {"object": name, "nbytes": 1, "sha256": HASH}}
    )
    with pytest.raises(errors.ArchiveTampered, match="malformed"):
        unseal(b"%s\n%s\n" % (body, KEY.sign(body).hex().encode()), Entry, verifier(KEY.public), "x")


@pytest.mark.parametrize(
    "facts", [{"blocks": ()}, {"nbytes": 3}, {"digest": "1" * 32}, {"tensors": "AAAA"}, {"tensors": "%"}]
)
def test_an_entry_that_contradicts_itself_is_refused(facts: dict[str, object]) -> None:
    from replicas.carry.blocks import combined

    right = {"digest": combined([bytes(16)])}
    assert entry(**right).manifest() == manifest_of(0)
    with pytest.raises(errors.ArchiveTampered, match="the entry of version 7 is not valid"):
        entry(**(right | facts)).manifest()


def test_a_key_is_made_once_and_kept_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "archive.pem"
    key = ArchiveKey.of_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ArchiveKey.of_file(path).public == key.public
    verifier(key.public)(key.sign(b"x"), b"x")
    assert len(key.public) == len("ed25519:") + 64


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "archive.pem"
    path.write_text("no key")
    with pytest.raises(
        errors.UsageError, match=r"archive\.pem cannot be used: .*\(name a PEM file with an Ed25519 key"
    ):
        ArchiveKey.of_file(path)
    from replicas.trust.certificate import make_pem as make_another

    path.write_bytes(make_another())
    with pytest.raises(errors.UsageError, match="it is not an Ed25519 key"):
        ArchiveKey.of_file(path)


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:00", f"rsa:{'0' * 64}", f"ed25519:{'x' * 64}"])
def test_a_text_that_is_no_key_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(errors.UsageError, match=r"is not a public key .*give ed25519: and 64 digits.*FILE.pub"):
        verifier(text)
