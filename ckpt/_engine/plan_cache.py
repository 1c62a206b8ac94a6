"""What every save of a tree of the same structure needs, worked out once.

The plan, the index of the item's database and the Orbax view depend on names, nodes and specs, not
on values. The second save of the same tree compares those and does nothing else for each leaf.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt._format.digests import digest
from ckpt._format.manifest import FileEntry, ItemEntry, Node
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.format_rules import FormatRules, Formatted, format_leaves
from ckpt._plan.leaf_entries import StoredChunks, record_chunks
from ckpt._plan.multihost.tree_fingerprint import TreeFingerprint, tree_outline
from ckpt._plan.orbax_view import item_view
from ckpt._plan.ownership import ProcessGroup
from ckpt._plan.save_plan import (
    Places,
    SavePlan,
    database_entries,
    plan_save,
)
from ckpt._tree.flatten import Structure, unboxed_names
from ckpt._tree.leaf_specs import SHAREABLE, Classifier, LeafSpec
from ckpt.errors import CheckpointError

__all__ = ["ItemPlan", "PlanCache"]

# How many problems of one tree are told at once.
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Everything about an item that does not depend on its values.

    Attributes:
        save: Where its bytes go.
        index: Index of its database, or None where it stores no array, where the places of its
            chunks are only known once they are encoded, or where other processes write some.
        view: Its files for Orbax, by path relative to the item, with their entries; of several
            processes the primary has them.
        formatted: What the formats came to, where there are any.
        keys: Numbers of the leaves that are PRNG keys.
        outline: What the processes that save together compare; None for one alone.
    """

    save: SavePlan
    index: DatabaseIndex | None
    view: dict[str, tuple[bytes, FileEntry]]
    formatted: Formatted | None = None
    keys: tuple[int, ...] = ()
    outline: TreeFingerprint | None = None

    def index_over(self, places: Places) -> DatabaseIndex:
        """Return the index of the database where encoded chunks lie at `places`."""
        return DatabaseIndex(database_entries(self.save, places))

    def new_data_files(self) -> list[str]:
        """Return fresh names for the files of the batches, relative to the item."""
        return [new_data_file() for _ in self.save.batches]


@dataclass(frozen=True, slots=True)
class _PlanKey:
    """What a plan depends on besides the tree."""

    rules: FormatRules | None
    budget: int
    team: ProcessGroup | None
    largest: int | None
    usual: int | None


@dataclass(slots=True)
class _CachedPlan:
    names: tuple[str, ...]
    nodes: tuple[Node, ...]
    specs: list[LeafSpec]
    how: _PlanKey
    plan: ItemPlan


@dataclass(slots=True)
class PlanCache:
    """The last plan of every item. Used by one save at a time.

    Formats are looked up when a plan is made, so a function is asked once for a structure.
    """

    rules: FormatRules | None = None
    classifier: Classifier = field(default_factory=Classifier)
    # Of leaves that several processes save.
    spanning: Classifier = field(default_factory=lambda: Classifier(spanning=True))
    known: dict[str, _CachedPlan] = field(default_factory=dict)

    def plan(
        self,
        item: str,
        structure: Structure,
        budget: int,
        formatted: bool = True,
        whole: bool = True,
        team: ProcessGroup | None = None,
        largest_file_bytes: int | None = None,
        usual_file_bytes: int | None = None,
    ) -> ItemPlan:
        """Return the plan for a tree, made anew only if another one was planned last.

        Args:
            item: Name of the item.
            structure: The tree.
            budget: The staging budget in bytes; the same on all processes.
            formatted: Whether the rules apply.
            whole: Whether it is the whole item; a part has neither an index nor a view of its own,
                and is not kept.
            team: The processes that save together; None for one alone.
            largest_file_bytes: Most bytes of a data file, or None.
            usual_file_bytes: About how large data files are best, or None.

        Raises:
            UnsupportedLeafError: Leaves that cannot be stored; names the first, notes the others.
            InvalidArgumentError: The tree cannot be planned; see `plan_save`.
        """
        spread = team is not None and team.count > 1
        specs = _classify(self.spanning if spread else self.classifier, structure)
        how = _PlanKey(
            rules=self.rules if formatted else None,
            budget=budget,
            team=team,
            largest=largest_file_bytes,
            usual=usual_file_bytes,
        )
        if not whole:
            return _plan_part(structure, specs, how)
        known = self.known.get(item)
        if (
            known is not None
            and known.how == how
            and known.specs == specs
            and known.names == structure.names
            and known.nodes == structure.nodes
        ):
            return known.plan
        plan = _plan(structure, specs, how)
        self.known[item] = _CachedPlan(structure.names, structure.nodes, specs, how, plan)
        return plan


def new_data_file() -> str:
    """Return a fresh name for a data file, relative to its item."""
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
        # The leaves are kept by the structure, so an identity is not given twice.
        if first.setdefault(id(leaf), number) != number and spec.kind in SHAREABLE:
            spec = replace(spec, same_as=first[id(leaf)])
        specs.append(spec)
    if problems:
        for other in problems[1:_MOST_PROBLEMS]:
            problems[0].add_note(f"also: {other}")
        raise problems[0]
    return specs


def _plan(structure: Structure, specs: Sequence[LeafSpec], how: _PlanKey) -> ItemPlan:
    plan = _plan_part(structure, specs, how)
    save, team = plan.save, plan.save.team
    if team is not None:
        plan = replace(plan, outline=tree_outline(save, structure.nodes))
        if team.index and team.mode == "shared":
            return plan
    entries = [] if save.is_encoded or team is not None else list(database_entries(save))
    # The view is a function of what does not change; where chunks lie is left out of it.
    blank: list[list[Any]] = [[] for _ in save.leaves]
    chunks = StoredChunks(blank, blank, blank, {})
    records = record_chunks(save, structure.leaves, chunks, [])
    item = ItemEntry(
        handler="", nodes=list(structure.nodes), leaves=records.leaves, shardings=records.shardings
    )
    view = {
        path: (data, FileEntry(size=len(data), digest=digest(data)))
        for path, data in item_view(item).items()
    }
    return replace(plan, index=DatabaseIndex(entries) if entries else None, view=view)


def _plan_part(structure: Structure, specs: Sequence[LeafSpec], how: _PlanKey) -> ItemPlan:
    formatted = None
    if how.rules is not None:
        paths = unboxed_names(structure.nodes, structure.names)
        formatted = format_leaves(how.rules, paths, specs)
        specs = formatted.specs
    save = plan_save(structure.names, specs, how.budget, how.team, how.largest, how.usual)
    keys = tuple(number for number, leaf in enumerate(save.leaves) if leaf.spec.kind == "key")
    return ItemPlan(save, None, {}, formatted, keys)
