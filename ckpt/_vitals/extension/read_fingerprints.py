"""Fingerprints of leaves that were read whole, compared with those in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from ckpt._format.chunk_locations import ChunkLocation, region_of
from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import Manifest
from ckpt._vitals.fingerprint import BoxFingerprint


class _LeafSums(Struct):
    chunks: int = 0
    one: int = 0
    two: int = 0


class ReadFingerprints(Struct):
    """The sums of the chunks that were read and have the right digests, by item and leaf."""

    _leaves: dict[tuple[str, int], _LeafSums] = field(default_factory=dict)

    def of_chunk(self, leaf: LeafEntry, place: ChunkLocation) -> BoxFingerprint | None:
        """Return an object that fingerprints a chunk; None if its leaf has no fingerprint."""
        if leaf.vital_signs is None:
            return None
        region = region_of(leaf, place.number)
        return BoxFingerprint(region.offset, region.shape, parse_dtype(leaf.dtype).itemsize)

    def add(self, item: str, chunks: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """Add the sums of the chunks of one file of an item, with the numbers of their leaves."""
        for leaf, (one, two) in chunks:
            found = self._leaves.setdefault((item, leaf), _LeafSums())
            found.chunks += 1
            found.one += one
            found.two += two

    def problems(self, manifest: Manifest) -> Iterator[tuple[str, str, str]]:
        """Yield item, leaf and fault of leaves with right bytes and a wrong fingerprint."""
        for (item, number), sums in self._leaves.items():
            leaf = manifest.items[item].leaves[number]
            # Unread or damaged leaves are reported elsewhere.
            if leaf.vital_signs is None or sums.chunks < len(leaf.digests):
                continue
            found = f"{sums.two & 0xFFFFFFFF:08x}{sums.one & 0xFFFFFFFF:08x}"
            if found != leaf.vital_signs.fingerprint:
                message = (
                    f"its fingerprint is {leaf.vital_signs.fingerprint} there, and that of its "
                    f"bytes is {found}; its digests are right, so its vital signs are wrong"
                )
                yield item, leaf.name, message
