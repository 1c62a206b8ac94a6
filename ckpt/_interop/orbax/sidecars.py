"""`OrbaxSidecars`: the files by which Orbax reads a step, made from its plans and manifest. Pure.

This library does not read these files, only `ckpt.json`. They name leaves as Orbax does
(`orbax_names`). An item with two leaves of the same name is shown as JSON, since Orbax would read
one array for both; so is an item with thousands of Python values. A value that Orbax has no kind
for (complex, bytes, an int beyond 64 bits) appears as its text.

An OCDBT database over the data files of an item shows its arrays to Orbax, TensorStore and zarr.

Checkpointers of Orbax look for a tree at the path of its checkpoint itself. So the item of a save
without names is shown there, too, unless it is a step of a manager. There, typed random keys come
as numbers.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct, field

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry, Manifest, Node, ShardingEntry
from ckpt._format.manifest_head import OWN_DISKS, VIRTUAL, FileEntry, digest, json_metrics
from ckpt._format.step_files import BEGUN, SUCCESS, UNNAMED, success_mark
from ckpt._interop.orbax.database_index import DatabaseIndex, KeyValue
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, MOST_SHOWN, decode_scalar, scalar_array
from ckpt._tree.leaf_names import ROOT, key_text, sibling_names

if TYPE_CHECKING:
    from ckpt._engine.plan_cache import Files
    from ckpt._plan.chunking import LeafPlan
    from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree

logger = logging.getLogger("ckpt")

# Orbax stores private Python paths as handler names; both of its APIs resolve these.
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREE = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_JSON = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
_SEQUENCE, _MAPPING = 1, 2
_MOST_REPR = 1 << 10
_ON_DEVICES = ("jax", "key")
_EMPTY = {
    "dict": "Dict",
    "ordered_dict": "Dict",
    "default_dict": "Dict",
    "list": "List",
    "tuple": "Tuple",
    "none": "None",
    "namedtuple": "NamedTuple",
    "custom": "Dict",
}
# File that Orbax reads of an item that is JSON to it, and of the texts in a tree.
ABOUT_FILE, _TEXTS = "metadata", "_strings.json"
_METADATA = "zarr.json"
_DATABASE = "manifest.ocdbt"


def about_item(item: ItemEntry) -> bytes:
    """Return the `metadata` file of an item without a tree whose handler wrote none."""
    return _json({"handler": item.handler, "data": item.data, "nbytes": item.nbytes})


class OrbaxSidecars(Struct, eq=False):
    """The files for Orbax of the steps that one engine writes; see `Sidecars`.

    Attributes:
        one_shot: True for one-shot checkpoints: the item of a save without names is shown at the
            path of the checkpoint itself, too.
        hidden: Pairs of an item that Orbax cannot read and the reason; each was named in a warning.
    """

    one_shot: bool = False
    hidden: set[tuple[str, str]] = field(default_factory=set)

    def of_tree(self, item: str, tree: PlannedTree) -> OrbaxTreeFiles:
        return OrbaxTreeFiles(self, item, tree)

    def of_step(self, step_dir: str, manifest: Manifest) -> dict[str, bytes]:
        """Return the files of the step itself, and of items that are no trees.

        An item that Orbax cannot read as a tree is shown as JSON: the `metadata` file of its
        handler, or a short description, since Orbax reads all items of a step or none. In a store
        Orbax looks for a mark in every item, too. It would read zeros for the chunks on the disks
        of other processes, and cannot read files that are outside of the step.
        """
        if {OWN_DISKS, VIRTUAL} & set(manifest.requires):
            return {}
        custom = manifest.metadata
        if not isinstance(custom, dict):
            custom = {} if custom is None else {"metadata": custom}
        files, handlers = {}, {}
        for name, item in manifest.items.items():
            is_tree = bool(item.nodes or item.leaves) and not _why_hidden(item)
            handlers[name] = _TREE if is_tree else _JSON
            path = f"{name}/{_TEXTS if is_tree else ABOUT_FILE}"
            if path not in manifest.files:
                made = _texts(item) if is_tree else about_item(item)
                if made is not None:
                    files[path] = made
                    if is_tree and self.is_at_path(name):
                        files[_TEXTS] = made
        if manifest.metrics is not None:
            # Metrics are an item of their own, where Orbax looks; NaN and infinities as in Python's
            # json.
            handlers["metrics"] = _JSON
            files["metrics/metrics"] = _json(json_metrics(manifest.metrics))
        document = {
            "item_handlers": handlers,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": manifest.created_ns,
            "commit_timestamp_nsecs": manifest.committed_ns,
            "custom_metadata": custom,
        }
        mark = success_mark(step_dir)
        if manifest.folder:
            files |= {f"{name}/{SUCCESS}": mark for name in handlers}
        return files | {BEGUN: _json(document), SUCCESS: mark, "orbax.checkpoint": b""}

    def is_at_path(self, item: str) -> bool:
        """Return True if an item is shown at the path of the step itself, too."""
        return self.one_shot and item == UNNAMED

    def say_hidden(self, item: str, why: str) -> None:
        """Warn of an item that Orbax cannot read, once for each reason."""
        if (item, why) not in self.hidden:
            self.hidden.add((item, why))
            logger.warning(
                "Orbax cannot read the item %r: %s. This library reads all of it", item, why
            )


class OrbaxTreeFiles(Struct, eq=False):
    """The files for Orbax of one item with a tree; see `TreeSidecars`.

    Making them takes several times as long as the plan itself. So they are made when they are
    written, and kept for later saves of the same structure.

    Attributes:
        sidecars: The files of its step.
        item: Name of the item.
        tree: The tree.
        view: The files that describe the tree, once they are made.
        indexed: The places in the index of the database, by writer (the number of its files, and
            its rows), and the index, which is None if there are no arrays; None until it is made.
    """

    sidecars: OrbaxSidecars
    item: str
    tree: PlannedTree
    view: Files | None = None
    indexed: tuple[Sequence[tuple[int, Any]], DatabaseIndex | None] | None = None

    def of_structure(self) -> Files:
        """Return the files that describe the tree."""
        if self.view is None:
            # Imported here and below, since copies of steps need no jax.
            from ckpt._plan.item_reports import ChunkTable

            # The places of the chunks are left out, so the files depend on nothing that changes.
            blank = ChunkTable.blank(len(self.tree.leaves))
            entry = self.tree.filled(ItemEntry(handler=""), blank)
            why = _why_hidden(entry)
            if why:
                self.sidecars.say_hidden(self.item, why)
            self.view = {}
            for path, data in ({} if why else _tree_files(entry)).items():
                file = self.view[f"{self.item}/{path}"] = data, FileEntry(len(data), digest(data))
                # A folder would look like another item.
                if "/" not in path and self.sidecars.is_at_path(self.item):
                    self.view[path] = file
        return self.view

    def of_places(self, reports: Sequence[ItemReport], created_ns: int) -> dict[str, bytes]:
        """Return the files that make the data files a database.

        Everything in its index but the names of files depends on the places of the chunks alone,
        so an index is made once for all saves with the same places.
        """
        places = [(len(report.files), report.rows) for report in reports]
        known = self.indexed
        if known is None or not _are_same(places, known[0]):
            from ckpt._plan.item_reports import ChunkTable

            leaves = self.tree.leaves
            entries = list(database_keys(leaves, ChunkTable.merged(leaves, reports)))
            # One value, since another save may be here at the same time.
            known = self.indexed = places, DatabaseIndex(entries) if entries else None
        if known[1] is None:
            return {}
        tree_file = f"d/{uuid.uuid4().hex}"
        data_files = [path for report in reports for path in report.files]
        made = known[1].encode(data_files, tree_file, uuid.uuid4().bytes, created_ns, self.item)
        files = {f"{self.item}/{tree_file}": made.tree, f"{self.item}/{_DATABASE}": made.manifest}
        if self.sidecars.is_at_path(self.item):
            files[_DATABASE] = made.manifest_above
        return files


def _are_same(some: Sequence[tuple[int, Any]], others: Sequence[tuple[int, Any]]) -> bool:
    return len(some) == len(others) and all(
        count == known and np.array_equal(rows, known_rows)
        for (count, rows), (known, known_rows) in zip(some, others, strict=True)
    )


def database_keys(leaves: Sequence[LeafPlan], stored: ChunkTable) -> Iterator[KeyValue]:
    """Yield the keys of the database of these leaves, under the names of Orbax, which reads it.

    Leaves that are one array have the same chunks.
    """
    stored_names = [leaf.name for leaf in leaves]
    names = stored_names if same_name(stored_names) else orbax_names(stored_names)
    firsts, offsets = stored.firsts.tolist(), stored.offsets.tolist()
    files, lengths = stored.files.tolist(), stored.lengths.tolist()
    for number, leaf in enumerate(leaves):
        if leaf.metadata is None:
            continue
        folder = folder_of(names[number])
        yield KeyValue(f"{folder}{_METADATA}".encode(), leaf.metadata)
        source = number if leaf.spec.same_as is None else leaf.spec.same_as
        chunks = range(firsts[source], firsts[source + 1])
        if not chunks:
            continue
        length = math.prod(leaf.chunk) * DTYPES[leaf.spec.dtype or ""].itemsize
        for key, chunk in zip(_chunk_keys(folder, leaf.grid), chunks, strict=True):
            yield KeyValue(key, None, files[chunk], offsets[chunk], lengths[chunk] or length)


def _chunk_keys(folder: str, grid: Sequence[int]) -> list[bytes]:
    """Return the keys of the chunks of a leaf, in C order; see `chunk_key`."""
    keys = [f"{folder}c".encode()]
    for count in grid:
        ends = [b"/%d" % index for index in range(count)]
        keys = [key + end for key in keys for end in ends]
    return keys


def orbax_names(names: Sequence[str]) -> Sequence[str]:
    """Return Orbax's names for leaves, in order: the texts of their keys, joined with dots.

    Names without escapes stay as they are. Several leaves may get the same name; see `same_name`.
    """
    if not any("%" in name for name in names):
        return names
    return [
        "" if name == ROOT else ".".join(map(key_text, name.split("."))) if "%" in name else name
        for name in names
    ]


def same_name(names: Sequence[str]) -> tuple[str, str] | None:
    """Return two leaves for which Orbax has the same name, or None."""
    found = orbax_names(names)
    if found is names:
        return None
    first: dict[str, str] = {}
    for name, folder in zip(names, map(folder_of, found), strict=True):
        if first.setdefault(folder, name) != name:
            return first[folder], name
    return None


def folder_of(name: str) -> str:
    """Return the beginning of the keys of an array with this name in a database of Orbax.

    It is the directory that TensorStore makes of the name.
    """
    return "" if name in ("", "/") else name if name.endswith("/") else f"{name}/"


def _why_hidden(item: ItemEntry) -> str:
    """Return why Orbax is not shown an item as a tree; empty if it is."""
    if len(item.leaves.values) > MOST_SHOWN:
        return f"it has more than {MOST_SHOWN} Python values, and Orbax takes an array for each"
    same = same_name(item.leaves.names)
    return "" if same is None else "it has one name for the leaves {!r} and {!r}".format(*same)


def _tree_files(item: ItemEntry) -> dict[str, bytes]:
    """Return the files of one item that do not depend on its values, by path relative to it.

    Digests and values of the leaves and the places of their chunks do not matter.
    """
    tree = {}
    # Cached: thousands of leaves have a few forms.
    known: dict[tuple[str, Sequence[int]], dict[str, Any]] = {}
    for names, keys, leaf in _paths(item):
        if isinstance(leaf, Node) or leaf.kind not in ARRAY_KINDS:
            about = _value_metadata(leaf)
        else:
            likeness = (leaf.kind, leaf.chunks)
            about = known.get(likeness) or known.setdefault(likeness, _value_metadata(leaf))
        # Text at once: containers for thousands of leaves would set off the garbage collector.
        text = msgspec.json.encode({"key_metadata": keys, "value_metadata": about})
        tree[f"({', '.join(names)}{',' * (len(names) == 1)})"] = msgspec.Raw(text)
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    arrays = [leaf for leaf in item.leaves if leaf.kind in _ON_DEVICES]
    called = orbax_names([leaf.name for leaf in arrays])
    described = [
        {"array_metadata": _array_metadata(leaf, name)}
        for leaf, name in zip(arrays, called, strict=True)
    ]
    # msgspec is ten times as fast as `json`, and all numbers here look the same in both.
    return {
        "_METADATA": msgspec.json.encode(metadata),
        "_sharding": msgspec.json.encode(dict(_shardings(item, arrays, called))),
        "array_metadatas/process_0": msgspec.json.encode({"array_metadatas": described}),
    }


def _texts(item: ItemEntry) -> bytes | None:
    """Return the file of a tree's values that have no array; None if there are none."""
    table = item.leaves
    # Only the scalars are made: arrays, of which there may be thousands, have no value.
    scalars = [table.bare(number) for number in sorted(table.values)]
    scalars = [leaf for leaf in scalars if _value_type(leaf) == "string"]
    names = orbax_names([leaf.name for leaf in scalars])
    texts = {name: _string_value(leaf) for name, leaf in zip(names, scalars, strict=True)}
    return _json(texts) if texts else None


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


def _paths(
    item: ItemEntry,
) -> Iterator[tuple[list[str], list[dict[str, Any]], LeafEntry | Node]]:
    """Yield every leaf and empty container, with its keys in Python's form and in Orbax's."""
    leaves = list(item.leaves)
    if not item.nodes:
        for leaf in leaves:
            yield [], [], leaf
        return
    stack: list[tuple[Node, list[str], list[dict[str, Any]]]] = [(item.nodes[0], [], [])]
    while stack:
        node, names, keys = stack.pop()
        if not node.children:
            if keys:
                yield names, keys, node
            continue
        kind = _SEQUENCE if node.kind in ("list", "tuple") else _MAPPING
        for name, child in zip(_child_names(node), node.children, strict=True):
            below = [*names, repr(name)], [*keys, {"key": name, "key_type": kind}]
            if child >= 0:
                yield *below, leaves[child]
            else:
                stack.append((item.nodes[-child], *below))


def _child_names(node: Node) -> Sequence[str]:
    from ckpt._tree.static_values import decode_key

    if node.kind in ("list", "tuple"):
        return [str(number) for number in range(len(node.children))]
    return [key_text(name) for name in sibling_names([decode_key(key) for key in node.keys])]


def _value_type(leaf: LeafEntry) -> str:
    if leaf.kind in ARRAY_KINDS:
        return "jax.Array" if leaf.kind in _ON_DEVICES else "np.ndarray"
    is_text = leaf.kind == CALLABLE or scalar_array(leaf.kind, decode_scalar(leaf)) is None
    return "string" if is_text else "scalar"


def _value_metadata(leaf: LeafEntry | Node) -> dict[str, Any]:
    if isinstance(leaf, Node):
        return {"value_type": _EMPTY[leaf.kind], "skip_deserialize": True}
    found: dict[str, Any] = {"value_type": _value_type(leaf), "skip_deserialize": False}
    if leaf.kind in _ON_DEVICES:
        found["write_shape"] = leaf.chunks
    return found


def _string_value(leaf: LeafEntry) -> str:
    value = leaf.value if leaf.kind == CALLABLE else decode_scalar(leaf)
    if isinstance(value, int):
        # Hexadecimal, since Python limits the length of decimal texts.
        return hex(value)
    if isinstance(value, bytes) and len(value) > _MOST_REPR:
        # The `repr` of bytes takes three times as much.
        return f"base64:{leaf.value}"
    return value if isinstance(value, str) else repr(value)


def _array_metadata(leaf: LeafEntry, name: str) -> dict[str, Any]:
    return {
        "param_name": name,
        "write_shape": leaf.chunks,
        "chunk_shape": leaf.chunks,
        # Makes Orbax return such an array as a typed PRNG key.
        "ext_metadata": None if leaf.impl is None else {"random_key_impl": leaf.impl},
    }


def _shardings(
    item: ItemEntry, arrays: Sequence[LeafEntry], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    texts = [_sharding_text(entry) for entry in item.shardings]
    for leaf, name in zip(arrays, names, strict=True):
        text = None if leaf.sharding is None else texts[leaf.sharding]
        if text is not None:
            yield base64.urlsafe_b64encode(name.encode()).decode(), text


def _sharding_text(entry: ShardingEntry) -> str | None:
    if entry.kind == "single":
        document: dict[str, Any] = {
            "sharding_type": "SingleDeviceSharding",
            "device_str": entry.text,
        }
    elif entry.kind == "named":
        ids = np.array([{"id": number} for number in entry.device_ids], dtype=object)
        document = {
            "sharding_type": "NamedSharding",
            "shape": entry.axis_sizes,
            "axis_names": entry.axis_names,
            "axis_types": [f"AxisType.{name}" for name in entry.axis_types],
            "partition_spec": entry.spec,
            "device_mesh": {"mesh": ids.reshape(entry.axis_sizes).tolist()},
        }
        if entry.memory_kind is not None:
            document["memory_kind"] = entry.memory_kind
    else:
        return None
    return json.dumps(document)
