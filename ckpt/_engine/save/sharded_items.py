"""Items whose leaves are shared out over the processes of a job."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt._engine.memory.staging import host_bytes
from ckpt._engine.plan_cache import ItemPlan, new_data_file
from ckpt._engine.save.multihost import WriteReport
from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.multihost.write_reports import (
    ItemReport,
    disagreement,
    join,
    record_item,
)
from ckpt._plan.save_plan import Places
from ckpt._tree.leaf_specs import ARRAY_KINDS
from ckpt.errors import CoordinationError, located

__all__ = ["TreeWrite", "check_alike", "joined_trees", "own_digests"]

# Of what every process has of its own, larger arrays are not compared: on accelerators all of them
# would have to be copied to the hosts of all processes, where only the primary's are stored.
_COMPARED_BYTES = 1 << 20


@dataclass(slots=True)
class TreeWrite:
    """An item whose leaves are shared out, as one process writes it.

    Attributes:
        plan: The plan of this process.
        leaves: Python scalars at their places.
        own: Digests of the arrays that every process has of its own, by number of the leaf.
        record: What this process has written, once it is durable.
    """

    plan: ItemPlan
    leaves: Sequence[Any]
    own: Mapping[int, str]
    record: ItemReport | None = None

    def finish(
        self, digests: Sequence[Sequence[str]], files: Sequence[str], places: Places
    ) -> None:
        """Take what was written: digests of the chunks by batch, and the batches' files."""
        outline = self.plan.outline
        assert outline is not None
        self.record = record_item(
            self.plan.save, outline, self.leaves, self.own, digests, files, places
        )


def own_digests(plan: ItemPlan, leaves: Sequence[Any]) -> dict[int, str]:
    """Return the digests of the small arrays that every process has of its own, by leaf."""
    found = {}
    for number in plan.save.own:
        spec = plan.save.leaves[number].spec
        if spec.kind in ARRAY_KINDS:
            compared = spec.nbytes <= _COMPARED_BYTES
            found[number] = digest(host_bytes(leaves[number]).data) if compared else ""
    return found


def check_alike(trees: Mapping[str, TreeWrite], reports: Sequence[WriteReport]) -> None:
    """Raise unless the processes have saved the same trees.

    Raises:
        CoordinationError: They have not; names the first leaf.
    """
    for name in trees:
        with located(item=name):
            difference = disagreement([report.records[name] for report in reports])
            if difference is not None:
                raise CoordinationError(difference)


def joined_trees(
    entries: Mapping[str, ItemEntry],
    trees: Mapping[str, TreeWrite],
    reports: Sequence[WriteReport],
    created_ns: int,
) -> tuple[dict[str, ItemEntry], dict[str, bytes]]:
    """Return the entries of items over what all processes have written, and files over that.

    Args:
        entries: The entries that the primary's handlers made.
        trees: What the primary has written of the items that are shared out.
        reports: What every process has written, by its number.
        created_ns: Unix time in nanoseconds.

    Raises:
        CoordinationError: The processes saved different trees; names the first leaf.
    """
    check_alike(trees, reports)
    found = dict(entries)
    files: dict[str, bytes] = {}
    for name, tree in trees.items():
        with located(item=name):
            records = [report.records[name] for report in reports]
            joined = join(tree.plan.save, tree.leaves, records)
            made = joined.records
            found[name] = found[name].model_copy(
                update={
                    "leaves": made.leaves,
                    "shardings": made.shardings,
                    "data_files": made.data_files,
                    "nbytes": made.nbytes,
                }
            )
            if joined.entries:
                tree_file = new_data_file()
                database = DatabaseIndex(joined.entries).encode(
                    made.data_files, tree_file, uuid.uuid4().bytes, created_ns
                )
                files[f"{name}/{tree_file}"] = database.tree
                files[f"{name}/manifest.ocdbt"] = database.manifest
    return found, files
