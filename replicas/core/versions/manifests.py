"""Manifests: join those that the ranks of a publish announce; keep the current one.

A model keeps its tensors from version to version, and one manifest of 100,000 tensors
takes half a second to decode, join and hash. That is done off the event loop
(:class:`~replicas.core.base.effects.Read`), and the result is reused for equal
manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from replicas import errors
from replicas.core.base.effects import Effect, Read, Send
from replicas.core.base.manifest import (
    AnyManifest,
    Manifest,
    PartManifest,
    Piece,
    TensorSpec,
    check_cover,
    check_size,
    check_tensors,
)
from replicas.core.members.member_state import MemberState, Reading
from replicas.core.moving.attempt import Payload
from replicas.core.versions.fetching import Cache, Fetch, pieces
from replicas.core.versions.publishes import Publish
from replicas.errors import ManifestMismatch
from replicas.messages import ManifestAsk, ManifestPiece, Meta
from replicas.messages.identity import Member

JOINED_NBYTES = 32 * 2**20
"""Limit of the cache of decoded manifests, counted by their encoded size."""


def merge_parts(parts: Sequence[PartManifest]) -> Manifest:
    """Merge the manifests of all ``parts`` into one.

    Each byte of each tensor comes from exactly one part: identical boxes (a replicated
    tensor) come from the lowest part that has them. A single whole image keeps ``parts
    = None``. Tensors come in the order of the first part that names them.

    :raises ManifestMismatch: naming the tensor, if parts disagree on a shape or dtype,
        overlap, or leave a hole.
    """
    for part in parts:
        part.validate()
    if len(parts) == 1 and parts[0].pieces is None:
        return parts[0].whole
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    for number, part in enumerate(parts):
        if part.pieces is None:
            raise ManifestMismatch(
                f"rank {number} publishes a whole image, but other ranks publish parts",
                hint="publish alike on all ranks",
            )
    for number, part in enumerate(parts):
        for spec in part.tensors:
            known = tensors.setdefault(spec.name, spec)
            # shapes are global: each rank gives the shape of the whole tensor
            if known != spec:
                raise ManifestMismatch(
                    f"tensor {spec.name!r}: rank {number} has {spec}, a lower rank has {known}",
                    hint="every rank must give the same global shape and dtype",
                )
        for alias, target in part.aliases:
            if aliases.setdefault(alias, target) != target:
                raise ManifestMismatch(
                    f"tensor {alias!r}: rank {number} ties it to {target!r}, a lower rank to {aliases[alias]!r}",
                    hint="tie the same tensors on every rank",
                )
    numbers = {name: number for number, name in enumerate(tensors)}
    taken: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    owned: list[tuple[Piece, ...]] = []
    for part in parts:
        mine: list[Piece] = []
        for piece in part.pieces or ():
            box = numbers[part.tensors[piece.tensor].name], piece.offsets, piece.shape
            if box not in taken:  # the lowest of several ranks sends a common box
                taken.add(box)
                mine.append(Piece(*box, piece.source_offset))
        owned.append(tuple(mine))
    merged = Manifest(tuple(tensors.values()), tuple(aliases.items()), tuple(owned))
    check_tensors(merged.tensors, merged.aliases)
    check_cover(merged.tensors, owned)  # each part has checked that its pieces lie in their tensors
    return merged


def difference(old: AnyManifest, new: AnyManifest, *, limit: int = 3) -> str:
    """Return the first ``limit`` differences of two manifests as text; "" if none.

    In tensors and aliases; order does not count: receivers find tensors by name, and a
    checkpoint that is published again has another order than the trainer's model.
    """
    found = list(_differences(old, new))
    shown = "; ".join(found[:limit])
    return f"{shown}; and {len(found) - limit} more" if len(found) > limit else shown


def _differences(old: AnyManifest, new: AnyManifest) -> Iterator[str]:
    """Yield each difference in tensors and aliases as text."""
    before = {spec.name: spec for spec in old.tensors}
    after = {spec.name: spec for spec in new.tensors}
    for name, spec in after.items():
        if name not in before:
            yield f"{name!r} ({spec}) is new"
        elif before[name] != spec:
            yield f"{name!r} was {before[name]}, is {spec}"
    yield from (f"{name!r} ({spec}) is missing" for name, spec in before.items() if name not in after)
    old_aliases, new_aliases = dict(old.aliases), dict(new.aliases)
    for alias in old_aliases | new_aliases:
        was, now = old_aliases.get(alias), new_aliases.get(alias)
        if was != now and alias not in before and alias not in after:
            yield f"{alias!r} was tied to {was}, is tied to {now}"


def answer(state: MemberState, ask: ManifestAsk, known: Iterable[Payload], now: float) -> list[ManifestPiece]:
    """Return the pieces of a manifest that a member asks for, for the caller to send.

    Note in ``state`` how fast the member reads. One empty piece says that the manifest
    is not known.

    :param known: payloads of versions that it may have been offered.
    """
    found = next((one.encoded for one in known if one.manifest_hash == ask.manifest_hash), None)
    if found is not None:
        before = state.reading
        goes_on = before is not None and before.manifest_hash == ask.manifest_hash and ask.offset > before.nbytes
        since = before.since if before is not None and goes_on else now
        state.reading = Reading(ask.manifest_hash, since, now, ask.offset, len(found))
    return pieces(ask, found)


class Joined(NamedTuple):
    """The manifest joined from those of all ranks."""

    manifest: Manifest
    encoded: bytes


def read(effect: Read) -> Joined:
    """Carry out a Read effect: decode manifests, join them to one, and hash that.

    It takes seconds for many tensors; call it off the event loop.

    :raises replicas.errors.ManifestMismatch: they are malformed, do not fit each other,
        or are too large together.
    """
    if effect.whole:
        encoded = effect.encoded[0]
        manifest = Manifest.decode(encoded)
    else:
        manifest = merge_parts([PartManifest.decode_only(part) for part in effect.encoded])
        encoded = manifest.encode()
    check_size(manifest)
    _ = manifest.hash, manifest.data_nbytes  # computed here, and cached in the manifest
    return Joined(manifest, encoded)


class Manifests:
    """The manifests of one channel's publishes: fetched from members, joined, cached.

    :ivar current: manifest of the channel's newest commit.
    """

    def __init__(self, channel: str, out: list[Effect]) -> None:
        """Start without manifests.

        :param channel: its name.
        :param out: the channel's effects, to which requests for manifests are added.
        """
        self._channel = channel
        self._out = out
        self._encoded: Cache[bytes] = Cache()
        self._fetches: dict[Member, Fetch] = {}
        self._joined: Cache[Joined] = Cache(JOINED_NBYTES)
        self._being_read: set[str] = set()
        self._failed: dict[str, errors.ReplicasError] = {}
        self.current: Manifest | None = None

    # ------------------------------------------------------------ fetching

    def get(self, member: Member, manifest_hash: str, now: float) -> bytes | None:
        """Return the encoded manifest, or None after asking the member for it.

        While another fetch from the member is under way, return None without asking:
        when that one has ended, the callers that still wait call again.

        :param member: a member that has the manifest.
        """
        found = self._encoded.get(manifest_hash)
        if found is None and member not in self._fetches:
            self._fetches[member] = fetch = Fetch(manifest_hash)
            self._out.append(Send(member, fetch.ask(now)))
        return found

    def add(self, member: Member, piece: ManifestPiece, now: float) -> bool:
        """Add a piece of a member's manifest; ask for the next ones when due.

        Return True if the manifest is complete: :meth:`get` then has it. A piece of a
        manifest that is not fetched from this member is ignored: False.

        :raises replicas.errors.ReplicasError: the member cannot provide it; the fetch
            has ended.
        """
        fetch = self._fetches.get(member)
        if fetch is None or fetch.manifest_hash != piece.manifest_hash:
            return False
        try:
            answer = fetch.add(piece, now)
        except errors.ReplicasError:
            del self._fetches[member]
            raise
        if isinstance(answer, bytes):
            del self._fetches[member]
            self._encoded.put(piece.manifest_hash, answer, len(answer))
            return True
        if answer is not None:
            self._out.append(Send(member, answer))
        return False

    def lost(self, member: Member) -> None:
        """Forget the unfinished fetch from a lost member."""
        self._fetches.pop(member, None)

    # ------------------------------------------------------------ joining

    def joined(self, key: str, encoded: Sequence[bytes], *, whole: bool = False) -> Joined | None:
        """Return the manifest joined from ``encoded``, or None until it is.

        The first call emits a Read effect for it; :meth:`read` stores the result.

        :param key: identifies the result.
        :param whole: ``encoded`` has one manifest, already complete.
        :raises ManifestMismatch: they cannot be joined. It is raised once; the next
            call emits Read again.
        """
        if key in self._failed:
            raise self._failed.pop(key)  # once: another publish may be read again
        found = self._joined.get(key)
        if found is None and key not in self._being_read:
            self._being_read.add(key)
            self._out.append(Read(key, tuple(encoded), whole))
        return found

    def read(self, effect: Read, found: Joined | errors.ReplicasError) -> None:
        """Store the result of a Read effect, for the next call of :meth:`joined`.

        :param found: the joined manifest, or the error of reading it.
        """
        self._being_read.discard(effect.key)
        if isinstance(found, Joined):
            self._joined.put(effect.key, found, len(found.encoded))
        else:
            self._failed[effect.key] = found

    def payload(self, publish: Publish) -> Payload | None:
        """Return the publish's payload: its manifest and facts about its bytes.

        Return None while the manifests of its ranks are being joined: call again.

        :raises errors.ManifestMismatch: the parts do not fit each other, or the
            channel's manifest.
        :raises errors.InternalError: none of its ranks has packed bytes.
        """
        carriers = publish.carriers
        if not carriers:
            raise errors.InternalError(
                f"publish {publish.asked.publish} of {publish.group}/{publish.replica} has no bytes"
            )
        packed = [publish.packed[one] for one in carriers]
        key = "+".join(one.manifest_hash for one in packed)  # unchanged tensors: joined once, then cached
        joined = self.joined(key, [publish.manifests[one] for one in carriers])
        if joined is None:
            return None
        manifest, in_parts = joined.manifest, joined.manifest.parts is not None
        if not publish.asked.new_manifest and self.current is not None and manifest.hash != self.current.hash:
            text = difference(self.current, manifest)
            if text:  # else only their order differs
                where = f"the manifest of channel {self._channel!r}"
                raise ManifestMismatch(f"the tensors of version {publish.version} do not fit {where}: {text}")
        return Payload(
            version=publish.version,
            manifest_hash=manifest.hash,
            manifest=manifest,
            encoded=joined.encoded,
            nbytes=manifest.data_nbytes,
            device="cuda" if any(one.device == "cuda" for one in publish.packed.values()) else "cpu",
            meta=cast("Meta", publish.meta),
            part_owners=tuple(carriers) if in_parts else (),
            part_digests=tuple(one.digest for one in packed) if in_parts else (),
            digest="" if in_parts else packed[0].digest,
            filling=next((one for one in carriers if publish.packed[one].streaming), None),
        )
