"""Plans of items: the data that every save of a tree of the same structure needs, made once.

The plan, the index of the item's database and the Orbax view depend on names, nodes and specs, not
on values. The second save of the same tree compares those and does no other work for each leaf.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._format.manifest import ItemEntry, Node
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.orbax_view import item_view
from ckpt._plan.save_plan import FormatRules, Formatted, SavePlan, plan_save
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS, MOST_SHOWN
from ckpt._tree.leaf_specs import SHAREABLE, Classifier, LeafSpec
from ckpt._tree.structure import Structure
from ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from ckpt._job.division import ProcessGroup
    from ckpt._job.process_reports import TreeFingerprint
    from ckpt._plan.save_plan import TreeDivision

# Most problems of one tree that one error names.
_MOST_PROBLEMS = 20


# Files by path relative to their item: bytes and entries.
Files = dict[str, tuple[bytes, FileEntry]]
# Sets of chunks, each as a leaf number and the chunk's number in the leaf.
SeparateChunks = Sequence[Set[tuple[int, int]]]


class ItemPlan(Struct, frozen=True):
    """The parts of an item that do not depend on its values.

    Attributes:
        save: The places of its bytes.
        compat_files: Files for other readers, which this library does not need; None for a part.
        formatted: The effect of the format rules, if there are any.
        keys: Numbers of the leaves that are PRNG keys.
        fingerprint: Fingerprint that the processes of one save compare; None for a single process.
        kept: Chunks that are in files of the step before, and are not written.
    """

    save: SavePlan
    compat_files: CompatFiles | None = None
    formatted: Formatted | None = None
    keys: tuple[int, ...] = ()
    fingerprint: TreeFingerprint | None = None
    kept: ItemReport | None = None

    def new_data_files(self) -> list[str]:
        """Return fresh names for the files of the batches, relative to the item."""
        return [new_data_file() for _ in self.save.batches]


class CompatFiles:
    """The files that other readers need of an item: made at the first save of a structure.

    Making them takes several times as long as the plan itself. So they are made when they are
    written, and not while the caller of the first save waits.
    """

    def __init__(self, plan: SavePlan, structure: Structure) -> None:
        """Prepare the files of the tree `structure`, which is saved as `plan` says."""
        self._plan = plan
        self._kept: ItemReport | None = None
        # The files of the whole item, which have the same view.
        self._whole: CompatFiles | None = None
        # This object outlives the save, and must not keep the caller's arrays alive.
        values = [
            None if leaf.spec.kind in ARRAY_KINDS else value
            for leaf, value in zip(plan.leaves, structure.leaves, strict=True)
        ]
        self._tree = PlannedTree(structure.nodes, plan.leaves, values)
        self._index: DatabaseIndex | None = None
        self._view: Files | None = None

    def of_rest(self, plan: SavePlan, kept: ItemReport | None) -> CompatFiles:
        """Return the files of a save that writes only the chunks of `plan`; others are kept."""
        found = copy.copy(self)
        found._plan, found._kept, found._whole, found._index = plan, kept, self, None
        return found

    def index(self) -> DatabaseIndex | None:
        """Return the index of the database.

        None if the item stores no array, or if the index depends on the sizes of encoded chunks.
        There is one only where no other writer has chunks.
        """
        plan = self._plan
        stores_arrays = any(leaf.metadata is not None for leaf in plan.leaves)
        if plan.is_encoded or not stores_arrays:
            return None
        if self._index is None:
            # Numbers stand for the real names, which are put in, in this order, when it is encoded.
            names = [str(number) for number in range(len(plan.batches))]
            report = ItemReport.of(plan.batches, names)
            if self._kept is not None:
                report = ItemReport.joined([self._kept, report])
            self._index = index_over(plan.leaves, report)
        return self._index

    def view(self) -> Files:
        """Return the files for Orbax; in a group of processes only the primary writes them."""
        if self._whole is not None:
            return self._whole.view()
        if self._view is None:
            # The places of the chunks are left out, so the view depends on nothing that changes.
            blank = ChunkTable.blank(len(self._plan.leaves))
            item = self._tree.filled(ItemEntry(handler=""), blank)
            self._view = {
                path: (data, FileEntry(size=len(data), digest=digest(data)))
                for path, data in item_view(item).items()
            }
        return self._view


def index_over(leaves: Sequence[LeafPlan], report: ItemReport) -> DatabaseIndex:
    """Return the index of a database whose chunks are all listed in one report."""
    return DatabaseIndex(ChunkTable.merged(leaves, [report]).keys(leaves))


class _PlanKey(Struct, frozen=True):
    """The inputs of a plan besides the tree."""

    rules: FormatRules | None
    budget: int
    group: ProcessGroup | None
    largest: int | None
    usual: int | None


class _CachedPlan(Struct):
    names: tuple[str, ...]
    nodes: tuple[Node, ...]
    specs: list[LeafSpec]
    key: _PlanKey
    plan: ItemPlan


class _CachedRest(Struct):
    whole: ItemPlan
    kept: ItemReport | None
    separate: SeparateChunks
    plan: ItemPlan


class PlanCache(Struct):
    """The last plan of every item. Used by one save at a time.

    Formats are looked up when a plan is made, so a format function is called once for a structure.
    """

    rules: FormatRules | None = None
    # By whether arrays may span processes.
    classifiers: dict[bool, Classifier] = field(
        default_factory=lambda: {spans: Classifier(spanning=spans) for spans in (False, True)}
    )
    known: dict[str, _CachedPlan] = field(default_factory=dict)
    rests: dict[str, _CachedRest] = field(default_factory=dict)
    # Pairs of an item that Orbax cannot read and the reason; each was named in a warning.
    hidden: set[tuple[str, str]] = field(default_factory=set)

    def plan(
        self,
        item: str,
        structure: Structure,
        budget: int,
        division: TreeDivision,
        formatted: bool = True,
        whole: bool = True,
        largest_file_bytes: int | None = None,
        usual_file_bytes: int | None = None,
    ) -> ItemPlan:
        """Return the plan for a tree, made anew only if it differs from the last one.

        Args:
            item: Name of the item.
            structure: The tree.
            budget: The staging budget in bytes; the same on all processes.
            division: The division of the tree among the processes that save together.
            formatted: True if the format rules apply.
            whole: True for the whole item; a part has no index and no view of its own, and is not
                cached.
            largest_file_bytes: Largest size of a data file in bytes, or None.
            usual_file_bytes: Approximate best size of a data file in bytes, or None.

        Raises:
            UnsupportedLeafError: Leaves cannot be stored; the error names the first, its notes the
                others.
            InvalidArgumentError: The tree cannot be planned; see `plan_save`.
        """
        specs = _classify(self.classifiers[division.spans], structure)
        key = _PlanKey(
            rules=self.rules if formatted else None,
            budget=budget,
            group=division.group,
            largest=largest_file_bytes,
            usual=usual_file_bytes,
        )
        if not whole:
            return _plan_part(structure, specs, key, division)
        known = self.known.get(item)
        if (
            known is not None
            and known.key == key
            and known.specs == specs
            and known.names == structure.names
            and known.nodes == structure.nodes
        ):
            return known.plan
        plan = _plan(structure, specs, key, division)
        self.known[item] = _CachedPlan(structure.names, structure.nodes, specs, key, plan)
        return plan

    def rest(
        self, item: str, whole: ItemPlan, kept: ItemReport | None, separate: SeparateChunks
    ) -> ItemPlan:
        """Return the plan of a save that reuses some chunks, made anew only if the chunks differ.

        Args:
            item: Name of the item.
            whole: The plan for all chunks.
            kept: The chunks that are reused.
            separate: Sets of other chunks that get batches of their own; see `SavePlan.rest`.
        """
        known = self.rests.get(item)
        if (
            known is not None
            and known.whole is whole
            and known.separate == separate
            and _are_alike(known.kept, kept)
        ):
            return known.plan
        done: set[tuple[int, int]] = set()
        if kept is not None:
            rows = kept.rows
            done.update(zip(rows["leaf"].tolist(), rows["number"].tolist(), strict=True))
        save = whole.save.rest(done, separate)
        compat_files = (
            None if whole.compat_files is None else whole.compat_files.of_rest(save, kept)
        )
        plan = replace(whole, save=save, compat_files=compat_files, kept=kept)
        self.rests[item] = _CachedRest(whole, kept, separate, plan)
        return plan


def _are_alike(one: ItemReport | None, other: ItemReport | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.files == other.files and np.array_equal(one.rows, other.rows)


def new_data_file() -> str:
    """Return a new random name for a data file, relative to its item."""
    return f"d/{uuid.uuid4().hex}"


def _classify(classifier: Classifier, structure: Structure) -> list[LeafSpec]:
    specs: list[LeafSpec] = []
    problems = []
    first: dict[int, int] = {}
    for name, leaf in zip(structure.names, structure.leaves, strict=True):
        try:
            spec = classifier.classify(leaf, name)
        except CheckpointError as error:
            problems.append(error)
            continue
        number = len(specs)
        # The structure keeps the leaves alive, so no identity occurs twice.
        if first.setdefault(id(leaf), number) != number and spec.kind in SHAREABLE:
            spec = replace(spec, same_as=first[id(leaf)])
        specs.append(spec)
    if problems:
        for other in problems[1:_MOST_PROBLEMS]:
            problems[0].add_note(f"also: {other}")
        raise problems[0]
    if sum(spec.kind not in ARRAY_KINDS for spec in specs) > MOST_SHOWN:
        return [spec if spec.kind in ARRAY_KINDS else LeafSpec(spec.kind) for spec in specs]
    return specs


def _plan(
    structure: Structure, specs: Sequence[LeafSpec], key: _PlanKey, division: TreeDivision
) -> ItemPlan:
    plan = _plan_part(structure, specs, key, division)
    return replace(
        plan,
        compat_files=CompatFiles(plan.save, structure),
        fingerprint=division.fingerprint(plan.save, structure.nodes),
    )


def _plan_part(
    structure: Structure, specs: Sequence[LeafSpec], key: _PlanKey, division: TreeDivision
) -> ItemPlan:
    formatted = None
    if key.rules is not None:
        paths = unboxed_names(structure.nodes, structure.names)
        formatted = key.rules.formatted(paths, specs)
        specs = formatted.specs
    save = plan_save(structure.names, specs, key.budget, division, key.largest, key.usual)
    keys = tuple(number for number, leaf in enumerate(save.leaves) if leaf.spec.kind == "key")
    return ItemPlan(save, None, formatted, keys)
