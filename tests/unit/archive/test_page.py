"""The page of the format is right: its reader reads what this package writes, and its
test vector is what this package reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import replicas
from replicas.archive import ArchiveKey, Rules, Writer
from replicas.archive.format import Entry, seal, unseal
from replicas.core.base.manifest import Manifest, TensorSpec
from tests.support.archives import CHANNEL, KEY, changed, version
from tests.support.root import ROOT

PAGE = (ROOT / "docs" / "reference" / "archive.md").read_text()
LINES = 80


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader on the page, which must not import this package."""
    _, _, rest = PAGE.partition("`read_archive.py`:\n\n```python\n")
    text, _, _ = rest.partition("```\n")
    assert len(text.splitlines()) <= LINES
    assert "replicas" not in text
    path = tmp_path_factory.mktemp("page") / "read_archive.py"
    path.write_text(text)
    return path


def read(program: Path, folder: Path, key: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(program), str(folder), key, str(program.with_suffix(".out"))]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_reader_on_the_page_reads_what_is_written(program: Path, tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(1)
    words = (random.standard_normal(20_001, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    words[:4000] &= 0x3AFF  # small ones, of which most change
    item = {"bfloat16": 2, "float32": 4}[dtype]
    manifest = Manifest((TensorSpec("w", dtype, (20_000 * 2 // item,)), TensorSpec("b", "bfloat16", ())))
    writer = Writer(f"file://{tmp_path}/archive", CHANNEL, run="grpo", key=KEY, rules=Rules())
    for number in range(1, 4):
        writer.write(version(number, words, manifest))
        done = read(program, tmp_path / "archive" / CHANNEL, KEY.public)
        assert done.returncode == 0, done.stderr
        image = program.with_suffix(".out").read_bytes()
        assert image == manifest.header + words.tobytes()
        words = changed(words, number)
        words[:3000:2] += 1
    wrong = read(program, tmp_path / "archive" / CHANNEL, f"ed25519:{'0' * 64}")
    assert wrong.returncode != 0
    assert "InvalidSignature" in wrong.stderr


def shown(name: str) -> str:
    """The block after the line that names it."""
    found = re.search(rf"`{re.escape(name)}`[^`]*:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_the_test_vector_is_a_version(tmp_path: Path, program: Path) -> None:
    folder = tmp_path / CHANNEL
    for name in ("entries", "data"):
        (folder / name).mkdir(parents=True)
    whole, delta = re.findall(r"`(data/0000000[12]-[0-9a-f]{16}\.\w+)`", PAGE)
    (entry,) = re.findall(r"`(entries/00000002-[0-9a-f]{16}\.json)`", PAGE)
    old = np.array([0x3A00 + i if i % 4 == 1 else 0x3F80 + i for i in range(256)], np.uint16)
    new = old.copy()
    new[1::4] += 1
    new[9::16] -= 2
    new[[2, 200]] ^= np.array([1, 3], np.uint16)
    manifest = Manifest((TensorSpec("w", "bfloat16", (256,)),))
    (folder / whole).write_bytes(manifest.header + old.tobytes())
    (folder / delta).write_bytes(bytes.fromhex(shown(delta)))
    (folder / entry).write_text(shown(entry))
    (folder / "latest").write_text(shown("latest"))
    pem, form, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key = ArchiveKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))).private_bytes(pem, form, plain))
    assert f"```text\n{key.public}\n```" in PAGE
    follower = replicas.follow(f"file://{folder}", key=key.public, timeout=5)
    with next(follower) as update:
        assert update.manifest == manifest
        assert dict(update)["w"].view(-1).view(torch.uint8).numpy().tobytes() == new.tobytes()
    follower.close()
    found = unseal((folder / entry).read_bytes(), Entry, None, entry)
    assert seal(found, key.sign) == (folder / entry).read_bytes(), "it is signed and encoded as ever"
    assert read(program, folder, key.public).returncode == 0
    assert program.with_suffix(".out").read_bytes() == manifest.header + new.tobytes()


def test_every_field_is_on_the_page() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", PAGE))
    assert set(Entry.__struct_fields__) <= named
