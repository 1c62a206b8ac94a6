"""Plans of items: the data that every save of a tree of the same structure needs, made once.

The plan and most files for other readers depend on names, nodes and specs, not on values. The
second save of the same tree compares those and does no other work for each leaf.

`Sidecars` is the interface of files for other readers, which lie beside those of the library.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._format.manifest import Manifest, Node
from ckpt._format.manifest_head import FileEntry
from ckpt._plan.item_reports import ItemReport, PlannedTree
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


# Files by path relative to their step: bytes and entries.
Files = dict[str, tuple[bytes, FileEntry]]
# Sets of chunks, each as a leaf number and the chunk's number in the leaf.
SeparateChunks = Sequence[Set[tuple[int, int]]]


class TreeSidecars(Protocol):
    """The files for other readers of one item with a tree.

    They are kept as long as the structure of the item stays the same. No two threads of a save call
    them at once.
    """

    def of_structure(self) -> Files:
        """Return the files that depend on the structure alone, by path relative to the step.

        Called early: they are written beside the data.
        """

    def of_places(self, reports: Sequence[ItemReport], created_ns: int) -> dict[str, bytes]:
        """Return the files that depend on the places of the chunks, by path relative to the step.

        Called as soon as the places are known, which is before the data is written unless chunks
        are encoded. The digests in the reports do not count.

        Args:
            reports: The reports of all writers of the item.
            created_ns: Start of the save, in Unix nanoseconds.
        """


class Sidecars(Protocol):
    """The files of steps that are written for other readers; this library reads none of them."""

    def of_tree(self, item: str, tree: PlannedTree) -> TreeSidecars:
        """Return the files of a tree, which are made later: the caller of a save waits.

        Args:
            item: Name of the item.
            tree: The tree. It keeps none of the caller's arrays.
        """

    def of_step(self, step_dir: str, manifest: Manifest) -> dict[str, bytes]:
        """Return the other files of a step, by path relative to it.

        Called late: only the manifest itself is written after them. Whatever depends on the values
        of an item is left out if it is among the files of the manifest already.

        Args:
            step_dir: Name of the step's directory.
            manifest: The manifest, complete but for these files.
        """


class NoSidecars:
    """No files for other readers: `Sidecars`, and those of any tree."""

    def of_tree(self, item: str, tree: PlannedTree) -> TreeSidecars:
        return self

    def of_step(self, step_dir: str, manifest: Manifest) -> dict[str, bytes]:
        return {}

    def of_structure(self) -> Files:
        return {}

    def of_places(self, reports: Sequence[ItemReport], created_ns: int) -> dict[str, bytes]:
        return {}


NO_SIDECARS = NoSidecars()


def planned(structure: Structure, plan: SavePlan) -> PlannedTree:
    """Return a tree with its plan, which outlives the save: it keeps no array of the caller."""
    values = [
        None if leaf.spec.kind in ARRAY_KINDS else value
        for leaf, value in zip(plan.leaves, structure.leaves, strict=True)
    ]
    return PlannedTree(structure.nodes, plan.leaves, values)


class ItemPlan(Struct, frozen=True):
    """The parts of an item that do not depend on its values.

    Attributes:
        save: The places of its bytes.
        sidecars: The files for other readers; a part of an item has none of its own.
        formatted: The effect of the format rules, if there are any.
        keys: Numbers of the leaves that are PRNG keys.
        fingerprint: Fingerprint that the processes of one save compare; None for a single process.
        kept: Chunks that are in files of the step before, and are not written.
    """

    save: SavePlan
    sidecars: TreeSidecars = NO_SIDECARS
    formatted: Formatted | None = None
    keys: tuple[int, ...] = ()
    fingerprint: TreeFingerprint | None = None
    kept: ItemReport | None = None

    def new_data_files(self) -> list[str]:
        """Return fresh names for the files of the batches, relative to the item."""
        return [new_data_file() for _ in self.save.batches]


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
        sidecars: Sidecars = NO_SIDECARS,
    ) -> ItemPlan:
        """Return the plan for a tree, made anew only if it differs from the last one.

        Args:
            item: Name of the item.
            structure: The tree.
            budget: The staging budget in bytes; the same on all processes.
            division: The division of the tree among the processes that save together.
            formatted: True if the format rules apply.
            whole: True for the whole item; a part has no sidecars of its own, and is not cached.
            largest_file_bytes: Largest size of a data file in bytes, or None.
            usual_file_bytes: Approximate best size of a data file in bytes, or None.
            sidecars: The files for other readers; always the same object.

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
            return _plan(structure, specs, key, division)
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
        plan = replace(
            plan,
            sidecars=sidecars.of_tree(item, planned(structure, plan.save)),
            fingerprint=division.fingerprint(plan.save, structure.nodes),
        )
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
        plan = replace(whole, save=save, kept=kept)
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
    formatted = None
    if key.rules is not None:
        paths = unboxed_names(structure.nodes, structure.names)
        formatted = key.rules.formatted(paths, specs)
        specs = formatted.specs
    save = plan_save(structure.names, specs, key.budget, division, key.largest, key.usual)
    keys = tuple(number for number, leaf in enumerate(save.leaves) if leaf.spec.kind == "key")
    return ItemPlan(save, formatted=formatted, keys=keys)
