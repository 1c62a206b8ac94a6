"""Fingerprints of leaves that were read whole, compared with those in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from ckpt._engine.verify.report import Problem
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import FILE_NAME


class _LeafSums(Struct):
    chunks: int = 0
    one: int = 0
    two: int = 0


class ReadFingerprints(Struct):
    """The sums of the chunks that were read and have the right digests, by item and leaf."""

    _leaves: dict[tuple[str, int], _LeafSums] = field(default_factory=dict)

    def add(self, item: str, sums: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """Add the sums of one file of an item."""
        for leaf, (one, two) in sums:
            found = self._leaves.setdefault((item, leaf), _LeafSums())
            found.chunks += 1
            found.one += one
            found.two += two

    def problems(self, manifest: Manifest) -> Iterator[Problem]:
        """Yield the leaves whose bytes are right, and whose fingerprint in the manifest is not."""
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
                yield Problem(FILE_NAME, item, leaf.name, message)
