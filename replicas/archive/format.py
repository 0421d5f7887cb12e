"""The objects of an archive: their names, their bytes, their signatures. No I/O.

Theory of operation
===================

An archive holds the versions of one channel in object storage, for readers that can
dial nobody. Below a folder with the channel's name it has three kinds of objects::

    CHANNEL/latest                              which version is the newest; signed
    CHANNEL/entries/00000007-HASH.json          what version 7 is; signed
    CHANNEL/data/00000001-HASH.safetensors      a whole: the image of version 1
    CHANNEL/data/00000007-HASH.delta            version 7 as deltas

``HASH`` are the first 16 digits of the SHA-256 of the object's bytes. So a name never
gets other bytes, and a writer that was killed and starts again meets no object that is
not its own. Only ``latest`` is ever overwritten: last, and only if it is still the
object that the writer knows (by its e-tag), so that two writers cannot both go on.

**Entries.** An :class:`Entry` has the version's number, digest and ``meta``, the
digest of each block of 16 MiB, the encoded manifest of its tensors, and the byte ranges
to read, each with its SHA-256. It links to the entry before by that one's SHA-256.
Entries and ``latest`` are one line of JSON, then a line with the Ed25519 signature of
the first line. So whoever trusts the key can trust each byte that is read, and whoever
may write to the bucket can delete a version or show an old one, but not make one up.

**Data.** Each version can be read in two ways (:mod:`replicas.archive.plan`)::

    whole                          from_whole        version 1, then 7 from 1
      version 1 ───────────────────────▶ version 7
                                             ▲
                        version 6 ───────────┘      from_before: 7 from 6

A reader that has nothing reads a *whole* and one delta, composed of all steps since
then: at most two data objects. A reader that has the version before reads one small
delta (:mod:`replicas.archive.deltas`). Both deltas of a version are in one object, one
after the other, and a reader asks for its range. The first version after a whole has
only one delta, which serves both ways.

A whole is written when the deltas from the last one have taken as many bytes as it,
at the latest after 20 versions; when the layout of the tensors changes; and by a writer
that has started again, as it has no bytes to compare with. A whole is a plain
safetensors file, which any tool reads.

Of a model of 135M parameters in bfloat16, of which a step of AdamW changes 1 % of the
elements (docs/reference/archive.md), a step's delta takes 0.53 % of a whole, the one
from the whole 2 % after 20 versions, and all 20 versions 0.067 of 20 wholes.

**Order.** Data first, then the entry, then ``latest``. A writer that is killed leaves
objects that nothing refers to, which a later one removes. Deletion goes the other way:
entries first, and data some time later, so that a reader in the middle of a version can
read it to its end.

**Later releases.** Fields that a reader does not know are ignored. ``format`` grows
when that is not enough, and the reader then refuses the object.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from replicas import errors
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.delta import DeltaError, decompressed
from replicas.common.decoding import MALFORMED
from replicas.core.base.manifest import Manifest
from replicas.messages import Meta
from replicas.messages.bounds import MANIFEST_NBYTES, Number

FORMAT = 1
LATEST, ENTRIES, DATA = "latest", "entries", "data"

Name = Annotated[str, msgspec.Meta(pattern=r"\A(entries|data)/[0-9]{8,16}-[0-9a-f]{16}\.[a-z]{1,16}\Z")]
"""Name of an object below the channel's folder."""
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""An XXH3 digest of 128 bits."""
Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], None]
"""Called with a signature and the bytes; raises cryptography's InvalidSignature."""


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a data object: ``nbytes`` from ``start`` on, and their SHA-256."""

    object: Name
    start: Number = 0
    nbytes: Number
    sha256: Sha256


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An entry's version, name and SHA-256 (of all its bytes)."""

    version: Number
    entry: Name
    sha256: Sha256


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that entries and ``latest`` share.

    ``writer``: host and process that wrote the object. ``at``: when, in seconds since
    1970; in ``latest`` later than in the object that it replaces. ``shift``: a
    version's number here, less its number in the run: a run that is started again
    counts from 1.
    """

    format: int
    run: str
    channel: str
    writer: str
    at: float
    shift: Number = 0


class Latest(Origin, frozen=True, kw_only=True, tag_field="object", tag="latest"):
    """The object ``latest``: which entry is the newest, and its version's digest.

    :ivar labels: the version of each label, archived or not. :ivar scores: by version
        number, as text.
    """

    newest: Link
    digest: Digest
    labels: dict[str, int] = {}
    scores: dict[str, dict[str, float]] = {}


class Entry(Origin, frozen=True, kw_only=True, tag_field="object", tag="entry"):
    """One version.

    :ivar content_of: the older version whose bytes it has; 0: its own.
    :ivar step: the training step, or None.
    :ivar digest: XXH3 digest of the tensors' bytes, as in the publisher's receipt.
    :ivar nbytes: size of the tensors' bytes (an image without its header).
    :ivar blocks: XXH3 digest of each 16 MiB of these.
    :ivar tensors: the encoded :class:`Manifest`, compressed by zstd, in base64.
    :ivar whole: an image, all of a data object: of this version, or of an earlier one
        if there is a ``from_whole``.
    :ivar from_whole: the delta that makes this version of ``whole``.
    :ivar from_before: the delta that makes it of the version in ``before``.
    :ivar before: the entry before this one.
    :ivar labels: labels of the version when the entry was written; ``scores`` likewise.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    content_of: Number = 0
    step: float | None = None
    digest: Digest
    nbytes: Number
    blocks: tuple[Digest, ...]
    tensors: str
    whole: Range
    from_whole: Range | None = None
    from_before: Range | None = None
    before: Link | None = None
    meta: Meta = {}
    labels: tuple[str, ...] = ()
    scores: dict[str, float] = {}

    @property
    def objects(self) -> frozenset[str]:
        """Names of the data objects that readers of this version may need."""
        return frozenset(one.object for one in (self.whole, self.from_whole, self.from_before) if one is not None)

    def manifest(self) -> Manifest:
        """Return the manifest of the tensors, checked against the rest of the entry.

        :raises replicas.errors.ArchiveTampered: the fields contradict each other.
        """
        try:
            found = Manifest.decode(decompressed(base64.b64decode(self.tensors), 0, MANIFEST_NBYTES))
            facts = -(-found.data_nbytes // BLOCK_NBYTES), combined(map(bytes.fromhex, self.blocks))
            if found.data_nbytes != self.nbytes or facts != (len(self.blocks), self.digest):
                raise ValueError("its manifest, blocks and digest do not fit together")
        except (ValueError, DeltaError, errors.ManifestMismatch) as error:
            raise errors.ArchiveTampered(f"the entry of version {self.version} is not valid: {error}") from error
        return found


def pack_manifest(manifest: Manifest) -> str:
    """Return the manifest as in :attr:`Entry.tensors`."""
    import zstandard

    return base64.b64encode(zstandard.ZstdCompressor(level=9).compress(manifest.encode())).decode()


def sha256_of(data: bytes | memoryview) -> str:
    """Return the SHA-256 of the bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def name_of(folder: str, version: int, sha256: str, suffix: str) -> str:
    """Return the name of an object with this content, below the channel's folder."""
    return f"{folder}/{version:08}-{sha256[:16]}.{suffix}"


def number_of(name: str) -> int:
    """Return the version in the name of an object; 0 if it is not one of an archive."""
    return int((re.findall(r"/([0-9]+)-", name) or "0")[0])


Signed = TypeVar("Signed", Entry, Latest)


# made at import: see the decoders of manifests
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in (Entry, Latest)}


def seal(content: Entry | Latest, sign: Sign) -> bytes:
    """Return the object with this content: a line of JSON, and one of its signature."""
    body = msgspec.json.encode(content)
    return b"%s\n%s\n" % (body, sign(body).hex().encode())


def unseal(data: bytes, kind: type[Signed], verify: Verify | None, name: str) -> Signed:
    """Check the signature of an object, and return its content.

    :param verify: None to trust any writer.
    :param name: of the object, for errors.
    :raises replicas.errors.ArchiveTampered: it is malformed, or another key's.
    :raises replicas.errors.UsageError: it has the format of a later release.
    """
    from cryptography.exceptions import InvalidSignature

    body, _, signature = data.removesuffix(b"\n").rpartition(b"\n")
    try:
        signed = bytes.fromhex(signature.decode("ascii"))
        if verify is not None:
            verify(signed, body)
        content: Signed = _DECODERS[kind].decode(body)
    except InvalidSignature as error:
        raise errors.ArchiveTampered(f"{name} was not signed by the key that was given") from error
    except (*MALFORMED, ValueError) as error:
        raise errors.ArchiveTampered(f"{name} is malformed: {error}") from error
    if content.format != FORMAT:
        raise errors.UsageError(f"{name} has format {content.format}", hint="install a newer release of torch-replicas")
    return content
