"""Vital signs as an extension of saves: `SignsOfManager`, `SignsOfSave` and `SignsOfItem`.

They are a `ChunkExtension`, and what it makes for a save and for an item of it.

Frozen leaves: leaves that the user declares unchanged, checked on their devices. No result depends
on that declaration: it only selects the leaves that are worth a check before they are copied from
their devices.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._arguments import invalid
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest import Manifest, Node
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ChunkNotes, ItemReport
from ckpt._plan.write_batches import Chunk, WriteBatch
from ckpt._redaction import redact
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_names import Pattern, compile_pattern, near_miss
from ckpt._vitals.extension.device_pass import DevicePass, Kernels, SignsPlace, begin_pass
from ckpt._vitals.signs import SIGNS, Array, Taker, box_signs, no_copies, no_signs, whole_signs
from ckpt._vitals.stored_signs import NAME, first_names, nonfinite_leaves
from ckpt.errors import InvalidArgumentError

logger = logging.getLogger("ckpt")
# Only exact signs can prove equality; norms depend on the order of summation.
_EXACT = ("fingerprint", "nonfinite", "absmax")


@functools.lru_cache(maxsize=16)
def covered(patterns: tuple[Pattern, ...], paths: tuple[str, ...]) -> Sequence[int]:
    """Return the numbers of the paths that patterns cover."""
    # Cached: every save of a run asks for the same, while its caller waits.
    return tuple(
        number
        for number, path in enumerate(paths)
        if any(pattern.covers(path) for pattern in patterns)
    )


def frozen_patterns(frozen: object) -> tuple[Pattern, ...]:
    """Return the patterns in `frozen` of `VitalSigns`.

    Raises:
        InvalidArgumentError: The argument has no patterns of leaf paths.
    """
    expected = "a pattern of leaf paths, such as 'base.**', or a list of them"
    if not isinstance(frozen, Iterable) or isinstance(frozen, bytes):
        raise invalid("frozen", frozen, expected, of="VitalSigns")
    texts = [frozen] if isinstance(frozen, str) else list(frozen)
    for text in texts:
        if not isinstance(text, str):
            raise invalid("frozen", text, expected, of="VitalSigns")
    return tuple(map(compile_pattern, texts))


def changed_leaves(numbers: Sequence[int], before: ItemReport, after: ItemReport) -> list[int]:
    """Return the leaves whose bytes differ between two reports of the same plan.

    Args:
        numbers: The leaves to compare.
        before: The report of the step before.
        after: The report of this step.
    """
    known, found = (_contents(numbers, report) for report in (before, after))
    return sorted({leaf for leaf, _, _ in found - known})


def _contents(numbers: Sequence[int], report: ItemReport) -> set[tuple[int, int, bytes]]:
    """Return leaf, number and digest of the chunks of some leaves."""
    places = np.flatnonzero(np.isin(report.rows["leaf"], list(numbers)))
    rows, digests = report.rows[places], map(bytes, report.digests[places])
    return set(zip(rows["leaf"].tolist(), rows["number"].tolist(), digests, strict=True))


# Bytes of small arrays whose signs are taken together.
_TOGETHER_BYTES = 1 << 19
_NONE = ChunkNotes(no_signs(0), no_signs(1)[0], no_copies())


class SignsOfManager(Struct):
    """The vital signs that the saves of a manager take.

    Attributes:
        name: Name of the extension.
    """

    _place: SignsPlace
    # Patterns of leaves that are checked for changes before they are staged.
    _frozen: tuple[Pattern, ...]
    _kernels: Kernels
    # Leaves in which the last save found values that are not finite.
    _odd_leaves: frozenset[str] = frozenset()
    name: str = NAME

    def begin_save(self) -> SignsOfSave:
        """See `ChunkExtension.begin_save`."""
        return SignsOfSave(self._place, self._frozen, self._kernels)

    def committed(self, manifest: Manifest, where: str) -> None:
        """Warn of the leaves of a step that have values that are not finite.

        In the steps of a root, leaves are named again only if they differ from those of the step
        before: every step has the infinite values of, say, a mask.
        """
        found = nonfinite_leaves(manifest)
        are_known = manifest.step is not None and found.keys() == self._odd_leaves
        self._odd_leaves = frozenset(found)
        if not found or are_known:
            return
        logger.warning(
            "%s was saved with NaN or infinite values in %s: %s",
            redact(where) if manifest.step is None else f"step {manifest.step}",
            "1 leaf" if len(found) == 1 else f"{len(found)} leaves",
            first_names([f"{leaf:.80} ({count})" for leaf, count in found.items()]),
        )

    async def after_save(self, goes_on: Callable[[], bool]) -> None:
        """Compile the kernels that saves wanted."""
        await self._kernels.compile_wanted(goes_on)


class SignsOfSave(Struct):
    """The vital signs of one save."""

    _place: SignsPlace
    _frozen: tuple[Pattern, ...]
    _kernels: Kernels
    # The leaf paths of the items so far, if there are patterns that are to cover some.
    _paths: list[str] = []

    def of_item(self, item: str, nodes: Sequence[Node], names: Sequence[str]) -> SignsOfItem:
        """See `NotesOfSave.of_item`."""
        frozen: Sequence[int] = ()
        if self._frozen:
            paths = unboxed_names(nodes, names)
            self._paths += paths
            frozen = covered(self._frozen, tuple(paths))
        return SignsOfItem(item, self._place, frozen, self._kernels)

    def check_items(self) -> None:
        """Check that every pattern of frozen leaves covers a leaf of the save.

        Raises:
            InvalidArgumentError: A pattern does not; suggests the path that was probably meant.
        """
        for pattern in self._frozen:
            if not any(pattern.covers(path) for path in self._paths):
                raise InvalidArgumentError(
                    f"frozen: {pattern.text!r:.80} covers no leaf"
                    f"{near_miss(pattern.text, self._paths)}"
                )


class SignsOfItem(Struct):
    """The vital signs of one item of a save.

    Attributes:
        none: Notes on no chunk.
    """

    _item: str
    _place: SignsPlace
    _frozen: Sequence[int]
    _kernels: Kernels
    _plans: Sequence[LeafPlan] = ()
    _pass: DevicePass = field(default_factory=lambda: DevicePass({}))
    # Leaves whose replicas an earlier save has compared, so devices need not compare them again.
    _unseen: list[int] = []
    none: ChunkNotes = _NONE

    def unchanged(
        self,
        plans: Sequence[LeafPlan],
        leaves: Sequence[Any],
        base: ItemReport,
        same: Sequence[int],
    ) -> list[int]:
        """Return the frozen leaves whose chunks all have the vital signs of the step before.

        Waits for the devices. Leaves whose signs the devices do not take are left out, and so are
        leaves whose earlier signs are unknown.
        """
        notes, frozen = base.notes.get(NAME), set(self._frozen).difference(same)
        if notes is None or not frozen:
            return []
        # Digests find unchanged leaves among the others.
        others = set(range(len(plans))) - frozen
        passed = begin_pass(self._place, plans, leaves, others, self._kernels)
        found = []
        for leaf in sorted(passed.looked_at):
            places = np.flatnonzero(base.rows["leaf"] == leaf)
            numbers = base.rows["number"][places].tolist()
            records = [passed.record(leaf, number) for number in numbers]
            pairs = zip(records, notes.records[places], strict=True)
            if records and all(
                own is not None
                and known["norm"] >= 0
                and all((own[name] == known[name]).all() for name in _EXACT)
                for own, known in pairs
            ):
                found.append(leaf)
        return found

    def begin(
        self,
        plans: Sequence[LeafPlan],
        leaves: Sequence[Any],
        base: ItemReport | None,
        same: Sequence[int],
    ) -> None:
        """Let devices take the signs of arrays; see `NotesOfItem.begin`."""
        known = None if base is None else base.notes.get(NAME)
        if known is not None:
            self._unseen = sorted(known.seen.intersection(same))
        self._plans = plans
        self._pass = begin_pass(self._place, plans, leaves, self._unseen, self._kernels)

    def records(
        self, batch: WriteBatch, bytes_of: Callable[[Chunk], Array], takes: Sequence[Taker]
    ) -> Array:
        """Return the signs that devices have taken, and take the others here."""
        if batch.packed:
            return _packed_signs(batch, self._plans, bytes_of, takes)
        records = np.empty(len(batch.chunks), SIGNS)
        for number, (chunk, take) in enumerate(zip(batch.chunks, takes, strict=True)):
            data, known = bytes_of(chunk), self._pass.record(chunk.leaf, chunk.number)
            if known is None:
                dtype, region = DTYPES[self._plans[chunk.leaf].spec.dtype or ""], chunk.region
                known = box_signs(data, region.offset, region.shape, dtype, take)
            else:
                take(data.data)
            records[number] = known
        return records

    def finish(self, report: ItemReport, base: ItemReport | None, process: int) -> ChunkNotes:
        """Return the signs of all chunks, and the replicas on devices of this process.

        A warning names devices of this process that should hold the same values and do not;
        another one names frozen leaves that have changed.
        """
        self._pass.warn_of_unequal(self._item)
        copies = self._pass.copies(process)
        if base is not None:
            if self._unseen:
                earlier = base.notes[NAME].others
                copies = np.concatenate([copies, earlier[np.isin(earlier["leaf"], self._unseen)]])
            if self._frozen:
                self._warn_of_changes(base, report)
        seen = self._pass.looked_at.union(self._unseen)
        return replace(report.notes[NAME], others=copies, seen=seen)

    def _warn_of_changes(self, base: ItemReport, report: ItemReport) -> None:
        changed = changed_leaves(self._frozen, base, report)
        if changed:
            names = [repr(self._plans[number].name) for number in changed]
            logger.warning(
                "item %r: frozen leaves have changed, and were written: %s",
                self._item,
                first_names(names),
            )


def _packed_signs(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    bytes_of: Callable[[Chunk], Array],
    takes: Sequence[Taker],
) -> Array:
    """Return the records of small leaves; equal shapes and dtypes are taken together."""
    signs = np.zeros(len(batch.chunks), SIGNS)
    # Keyed by shape and dtype, of which thousands of leaves have a few.
    alike: dict[tuple[tuple[int, ...], str], list[int]] = {}
    data = [bytes_of(chunk) for chunk in batch.chunks]
    for number, (chunk, take) in enumerate(zip(batch.chunks, takes, strict=True)):
        take(data[number].data)
        spec = plans[chunk.leaf].spec
        if chunk.nbytes:
            alike.setdefault((spec.shape, spec.dtype or ""), []).append(number)
    for (shape, dtype), numbers in alike.items():
        nbytes = batch.chunks[numbers[0]].nbytes
        step = max(_TOGETHER_BYTES // nbytes, 1)
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            arrays = np.concatenate([data[number] for number in some]).reshape(-1, nbytes)
            signs[some] = whole_signs(arrays, shape, DTYPES[dtype])
    return signs
