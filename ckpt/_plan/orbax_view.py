"""The Orbax view: the files that let Orbax read a step, made from its manifest entries. Pure.

This library does not read these files, only `ckpt.json`. They name leaves as Orbax does
(`orbax_names`). An item with two leaves of the same name is shown as JSON, since Orbax would read
one array for both; so is an item with thousands of Python values. A value that Orbax has no kind
for (complex, bytes, an int beyond 64 bits) appears as its text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry, Node, ShardingEntry
from ckpt._format.manifest_head import json_metrics
from ckpt._format.step_files import BEGUN, SUCCESS, success_mark
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, MOST_SHOWN, decode_scalar
from ckpt._tree.leaf_names import orbax_key, orbax_names, same_name, sibling_names

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


# File that Orbax reads of an item that is JSON to it.
ABOUT_FILE = "metadata"


def root_view(metadata: Mapping[str, Any]) -> bytes:
    """Return the file `_ROOT_METADATA` of the root's directory `metadata`."""
    return _json({"internal_metadata": {}, "custom_metadata": dict(metadata)})


def about_item(item: ItemEntry) -> bytes:
    """Return the `metadata` file of an item without a tree whose handler wrote none."""
    return _json({"handler": item.handler, "data": item.data, "nbytes": item.nbytes})


def step_view(
    step_dir: str,
    items: Mapping[str, ItemEntry],
    metrics: Mapping[str, Any] | None,
    metadata: Any,
    created_ns: int,
    committed_ns: int,
    written: Collection[str] = (),
    *,
    in_store: bool = False,
) -> dict[str, bytes]:
    """Return the files of the step itself, by path relative to it.

    An item that Orbax cannot read as a tree is shown as JSON: the `metadata` file of its handler,
    or a short description, since Orbax reads all items of a step or none.

    Args:
        step_dir: Name of the step's directory.
        items: The items.
        metrics: User metrics.
        metadata: User metadata.
        created_ns: Start of the save, in Unix nanoseconds.
        committed_ns: Time of the manifest, in Unix nanoseconds.
        written: Files of the step that are already written.
        in_store: True if the step is in an object store. There Orbax looks for a mark in every
            item, too.
    """
    if metadata is None:
        custom: dict[str, Any] = {}
    else:
        custom = metadata if isinstance(metadata, dict) else {"metadata": metadata}
    trees = {name for name, it in items.items() if (it.nodes or it.leaves) and not why_hidden(it)}
    handlers = {name: _TREE if name in trees else _JSON for name in items}
    files = {}
    for name, item in items.items():
        if handlers[name] == _JSON and f"{name}/{ABOUT_FILE}" not in written:
            files[f"{name}/{ABOUT_FILE}"] = about_item(item)
    if metrics is not None:
        # Metrics are an item of their own, where Orbax looks; NaN and infinities as in Python's
        # json.
        handlers["metrics"] = _JSON
        files["metrics/metrics"] = _json(json_metrics(metrics))
    document = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": created_ns,
        "commit_timestamp_nsecs": committed_ns,
        "custom_metadata": custom,
    }
    if in_store:
        files |= item_marks(step_dir, handlers)
    return files | {
        BEGUN: _json(document),
        SUCCESS: success_mark(step_dir),
        "orbax.checkpoint": b"",
    }


def why_hidden(item: ItemEntry) -> str:
    """Return why Orbax is not shown an item as a tree; empty if it is."""
    if len(item.leaves.values) > MOST_SHOWN:
        return f"it has more than {MOST_SHOWN} Python values, and Orbax takes an array for each"
    same = same_name(item.leaves.names)
    return "" if same is None else "it has one name for the leaves {!r} and {!r}".format(*same)


def item_marks(step_dir: str, items: Iterable[str]) -> dict[str, bytes]:
    """Return the marks that Orbax looks for in the items of a step in a store.

    `items` are the items that Orbax knows of; its metrics are one of them.
    """
    return {f"{name}/{SUCCESS}": success_mark(step_dir) for name in items}


def item_view(item: ItemEntry) -> dict[str, bytes]:
    """Return the files of one item that do not depend on its values, by path relative to it.

    Digests and values of the leaves and the places of their chunks do not matter.
    """
    if why_hidden(item):
        return {}
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


def text_view(item: ItemEntry) -> dict[str, bytes]:
    """Return the file of an item's values that have no array; empty if there are none."""
    table = item.leaves
    if why_hidden(item):
        return {}
    # Only the scalars are made: arrays, of which there may be thousands, have no value.
    scalars = [table.bare(number) for number in sorted(table.values)]
    scalars = [leaf for leaf in scalars if _value_type(leaf) == "string"]
    names = orbax_names([leaf.name for leaf in scalars])
    texts = {name: _string_value(leaf) for name, leaf in zip(names, scalars, strict=True)}
    return {"_strings.json": _json(texts)} if texts else {}


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
    # Imported here and below, since copies of steps need no jax.
    from ckpt._tree.static_values import decode_key

    if node.kind in ("list", "tuple"):
        return [str(number) for number in range(len(node.children))]
    return [orbax_key(name) for name in sibling_names([decode_key(key) for key in node.keys])]


def _value_type(leaf: LeafEntry) -> str:
    from ckpt._tree.leaf_specs import scalar_array

    if leaf.kind in ARRAY_KINDS:
        return "jax.Array" if leaf.kind in _ON_DEVICES else "np.ndarray"
    if leaf.kind == CALLABLE:
        return "string"
    return "string" if scalar_array(leaf.kind, decode_scalar(leaf)) is None else "scalar"


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
