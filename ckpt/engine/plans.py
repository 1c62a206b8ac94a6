"""What every save of a tree of the same structure needs, worked out once.

The plan, the index of the item's database and the Orbax view depend on names, nodes and specs, not
on values. The second save of the same tree compares those and does nothing else for each leaf.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt.digests import digest
from ckpt.errors import CheckpointError
from ckpt.layout.formatting import FormatRules, Formatted, format_leaves
from ckpt.layout.leaves import SHAREABLE, Classifier, LeafSpec
from ckpt.layout.ocdbt import Index
from ckpt.layout.orbax_view import item_view
from ckpt.layout.plan import Places, SavePlan, database_entries, plan_save
from ckpt.layout.records import record_leaves
from ckpt.layout.structure import Structure, unboxed_names
from ckpt.manifest import FileEntry, ItemEntry, Node

__all__ = ["ItemPlan", "PlanCache"]

# How many problems of one tree are told at once.
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Everything about an item that does not depend on its values.

    Attributes:
        save: Where its bytes go.
        index: Index of its database, or None where it stores no array, or where the places of its
            chunks are only known once they are encoded.
        view: Its files for Orbax, by path relative to the item, with their entries.
        formatted: What the formats came to, where there are any.
        keys: Numbers of the leaves that are PRNG keys.
    """

    save: SavePlan
    index: Index | None
    view: dict[str, tuple[bytes, FileEntry]]
    formatted: Formatted | None = None
    keys: tuple[int, ...] = ()

    def index_over(self, places: Places) -> Index:
        """Return the index of the database where encoded chunks lie at `places`."""
        return Index(database_entries(self.save, places))

    def new_data_files(self) -> list[str]:
        """Return fresh names for the files of the granules, relative to the item."""
        return [new_data_file() for _ in self.save.granules]


@dataclass(slots=True)
class _Known:
    names: tuple[str, ...]
    nodes: tuple[Node, ...]
    specs: list[LeafSpec]
    formatted: bool
    plan: ItemPlan


@dataclass(slots=True)
class PlanCache:
    """The last plan of every item. Used by one save at a time.

    Formats are looked up when a plan is made, so a function is asked once for a structure.
    """

    rules: FormatRules | None = None
    classifier: Classifier = field(default_factory=Classifier)
    known: dict[str, _Known] = field(default_factory=dict)

    def plan(
        self,
        item: str,
        structure: Structure,
        budget: int,
        formatted: bool = True,
        whole: bool = True,
    ) -> ItemPlan:
        """Return the plan for a tree, made anew only if another one was planned last.

        Args:
            item: Name of the item.
            structure: The tree.
            budget: The staging budget in bytes.
            formatted: Whether the rules apply.
            whole: Whether it is the whole item; a part has neither an index nor a view of its own,
                and is not kept.

        Raises:
            UnsupportedLeafError: Leaves that cannot be stored; names the first, notes the others.
        """
        specs = self._classify(structure)
        rules = self.rules if formatted else None
        if not whole:
            return _plan_part(structure, specs, rules, budget)
        known = self.known.get(item)
        if (
            known is not None
            and known.formatted == formatted
            and known.specs == specs
            and known.names == structure.names
            and known.nodes == structure.nodes
        ):
            return known.plan
        plan = _plan(structure, specs, rules, budget)
        self.known[item] = _Known(structure.names, structure.nodes, specs, formatted, plan)
        return plan

    def _classify(self, structure: Structure) -> list[LeafSpec]:
        specs: list[LeafSpec] = []
        problems = []
        first: dict[int, int] = {}
        for name, leaf in zip(structure.names, structure.leaves, strict=True):
            try:
                spec = self.classifier.classify(leaf, name)
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


def new_data_file() -> str:
    """Return a fresh name for a data file, relative to its item."""
    return f"d/{uuid.uuid4().hex}"


def _plan(
    structure: Structure, specs: Sequence[LeafSpec], rules: FormatRules | None, budget: int
) -> ItemPlan:
    plan = _plan_part(structure, specs, rules, budget)
    save = plan.save
    entries = [] if save.is_encoded else list(database_entries(save))
    # The view is a function of what does not change; digests and files are left blank for it.
    blanks = [[""] * len(granule.chunks) for granule in save.granules]
    records = record_leaves(save, structure.leaves, blanks, [])
    item = ItemEntry(
        handler="", nodes=list(structure.nodes), leaves=records.leaves, shardings=records.shardings
    )
    view = {
        path: (data, FileEntry(size=len(data), digest=digest(data)))
        for path, data in item_view(item).items()
    }
    return replace(plan, index=Index(entries) if entries else None, view=view)


def _plan_part(
    structure: Structure, specs: Sequence[LeafSpec], rules: FormatRules | None, budget: int
) -> ItemPlan:
    formatted = None
    if rules is not None:
        paths = unboxed_names(structure.nodes, structure.names)
        formatted = format_leaves(rules, paths, specs)
        specs = formatted.specs
    save = plan_save(structure.names, specs, budget)
    keys = tuple(number for number, leaf in enumerate(save.leaves) if leaf.spec.kind == "key")
    return ItemPlan(save, None, {}, formatted, keys)
