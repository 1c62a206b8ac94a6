"""One item of a checkpoint of Orbax as an entry, from the files that describe it."""

from __future__ import annotations

import base64
import binascii
import json
import math
import posixpath
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, JsonValue, ShardingEntry
from ckpt._format.per_process import combine, own_path, owner_of, renamed
from ckpt._interop.orbax.arrays import ArrayStore, describe_arrays, leaf_entry, packed_entry
from ckpt._interop.orbax.database import MANIFEST, ValueLocation, Values, read_database
from ckpt._interop.orbax.layout import MOST_BYTES, ONE_LEAF, PACKED_FILE, OrbaxItem, Sizes
from ckpt._interop.orbax.tree import TREE_FILE, UNKNOWN, OrbaxTree, Param, parse_packed, parse_tree
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_kinds import unreadable_leaf
from ckpt._tree.structure import describe
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from ckpt.handlers._stateful import files_entry
from ckpt.storage._base import UNKNOWN_SIZE, Storage

SHARDING_FILE = "_sharding"
# `cpu:0`, `TFRT_CPU_0`, `TPU_0(process=0,...)`, `cuda:1`: Orbax writes devices as jax prints them.
_DEVICE = re.compile(r"^(?:TFRT_)?([A-Za-z]+)[_:](\d+)")
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def parse_shardings(data: bytes | None, platform: str) -> Mapping[str, ShardingEntry]:
    """Return the shardings of arrays by their names in Orbax.

    A restore can do without the placement of arrays, so unreadable shardings are left out.

    Args:
        data: Content of the file, or None if there is none.
        platform: Platform of devices that are only numbered.
    """
    try:
        found = json.loads(data or b"{}")
        pairs = {base64.urlsafe_b64decode(key).decode(): text for key, text in found.items()}
    except (ValueError, AttributeError, TypeError, binascii.Error, RecursionError):
        return {}
    entries = {}
    for name, text in pairs.items():
        try:
            entry = _entry(json.loads(text), platform)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        if entry is not None:
            entries[name] = entry
    return entries


def _entry(about: Any, platform: str) -> ShardingEntry | None:
    kind = about.get("sharding_type")
    if kind == "SingleDeviceSharding":
        found = _DEVICE.match(about["device_str"])
        if found is None:
            return None
        name = found[1].lower()
        return ShardingEntry(
            kind="single",
            platform=_PLATFORMS.get(name, name),
            device_ids=[int(found[2])],
            text=about["device_str"],
        )
    if kind != "NamedSharding" or not about.get("device_mesh"):
        return None
    grid = np.array(about["device_mesh"]["mesh"], dtype=object)
    sizes = [int(size) for size in about["shape"]]
    types = about.get("axis_types") or ["Auto"] * len(sizes)
    return ShardingEntry(
        kind="named",
        platform=platform,
        device_ids=[int(device["id"]) for device in grid.flat],
        memory_kind=about.get("memory_kind"),
        axis_names=[str(name) for name in about["axis_names"]],
        axis_sizes=sizes,
        axis_types=[str(each).removeprefix("AxisType.") for each in types],
        spec=[
            part if part is None or isinstance(part, str) else list(part)
            for part in about["partition_spec"]
        ],
    )


_STRINGS, _ARRAY_METADATAS = "_strings.json", "array_metadatas/"
# Limit of a msgpack file. It may hold all arrays of an item, but only their places are kept.
_MOST_PACKED_BYTES = 4 << 30


class OrbaxItemReader:
    """Reads the description of the arrays of one item of a checkpoint."""

    def __init__(self, storage: Storage, step_dir: str, item: OrbaxItem, sizes: Sizes) -> None:
        self._storage = storage
        self._step_dir = step_dir
        self._item = item
        self._sizes = sizes

    async def entry(self) -> tuple[ItemEntry, Mapping[str, bytes]]:
        """Return the item, and its files in memory by path relative to the item."""
        tree = await self._tree()
        structure = await run_in_thread(partial(describe, tree.tree))
        store = ArrayStore(await self._values(), self._range)
        texts, impls = await self._texts(), await self._impls()
        platform = jax.default_backend()
        known = parse_shardings(await self._small(SHARDING_FILE), platform)
        leaves = [_with_kind(leaf, known, texts) for leaf in structure.leaves]
        params = [leaf for leaf in leaves if isinstance(leaf, Param)]
        arrays = await describe_arrays(
            store, tree, [each for each in params if each.kind != "string"]
        )
        numbers: dict[str, int] = {}
        entries = []
        for name, param in zip(structure.names, leaves, strict=True):
            try:
                if not isinstance(param, Param):
                    entries.append(await packed_entry(store, name, param))
                    continue
                if param.kind == "string":
                    entries.append(_text(name, param, texts))
                    continue
                described = arrays[param.name]
                if isinstance(described, CheckpointError):
                    raise described
                number = None
                if param.name in known:
                    text = repr(known[param.name])
                    number = numbers.setdefault(text, len(numbers))
                impl = impls.get(param.name)
                entries.append(leaf_entry(param, name, described, number, impl))
            except (CorruptCheckpointError, UnsupportedFormatError) as error:
                if self._item.kind != "tree":
                    raise
                entries.append(unreadable_leaf(name, error))
        by_text = {repr(entry): entry for entry in known.values()}
        shardings = [by_text[text] for text in numbers]
        table = LeafTable.of(entries)
        nbytes = sum(_nbytes(entry) for entry in entries)
        item = ItemEntry("pytree", list(structure.nodes), table, shardings, store.files, nbytes)
        return item, {store.files[0]: bytes(store.inline)}

    async def _tree(self) -> OrbaxTree:
        data = await self._small(TREE_FILE)
        folder = f"{self._storage.location}/{self._step_dir}/{self._item.folder}"
        about = await self._about_key()
        is_array = self._item.kind in ("array", "key") and "legacy" not in about
        if data is None and is_array:
            # Orbax itself restores keys as jax arrays, whatever they were when saved.
            kind = "jax.Array" if self._item.kind == "key" else UNKNOWN
            return OrbaxTree(Param(ONE_LEAF, kind), is_v3=False, has_all_chunks=False)
        if data is None:
            return OrbaxTree(await self._packed(folder), is_v3=False, has_all_chunks=False)
        tree = await run_in_thread(partial(parse_tree, data, folder + TREE_FILE))
        if is_array:
            return replace(tree, tree=_one_leaf(tree.tree))
        if about.get("legacy") and isinstance(tree.tree, list):
            # `numpy.random.set_state` takes a tuple.
            return replace(tree, tree=tuple(tree.tree))
        return replace(tree, tree=await self._packed(folder, tree.tree)) if tree.is_packed else tree

    async def _about_key(self) -> Mapping[str, Any]:
        """Return the description of a random key; empty for other items."""
        if self._item.kind != "key":
            return {}
        found = await json_file(self._storage, self._step_dir, self._item.files[0], self._sizes)
        return found if isinstance(found, dict) else {}

    async def _packed(self, folder: str, tree: Any = None) -> Any:
        """Return the tree of the msgpack file, or `tree` with the values in that file."""
        full = self._item.folder + PACKED_FILE
        data = await self._storage.read(self._step_dir, full, _MOST_PACKED_BYTES)
        if data is None:
            raise CorruptCheckpointError(f"{folder}{PACKED_FILE} is missing; it was damaged")
        return await run_in_thread(partial(parse_packed, data, folder + PACKED_FILE, tree))

    async def _values(self) -> Values:
        folder = self._item.folder
        manifest = await self._small(MANIFEST)
        if manifest is not None:
            return await read_database(manifest, self._range)
        if any(path.startswith(f"{folder}ocdbt.process_") for path in self._sizes):
            raise CorruptCheckpointError(
                f"there is no {MANIFEST}: Orbax never finished it, or it was damaged"
            )
        return {
            path[len(folder) :]: ValueLocation(path[len(folder) :], "", 0, size)
            for path, size in self._sizes.items()
            if size is not None and path.startswith(folder)
        }

    async def _texts(self) -> Mapping[str, Any]:
        """Return the texts among the leaves by name of the leaf."""
        folder = self._item.folder
        # Some years ago, the directory of the first text had all texts.
        found: dict[str, Any] = {}
        paths = [
            path
            for path in self._sizes
            if path.startswith(folder) and f"/{path}".endswith(f"/{_STRINGS}")
        ]
        for path in sorted(paths):
            found |= await self._mapping(path[len(folder) :])
        return found

    async def _impls(self) -> Mapping[str, str]:
        """Return the implementations of typed PRNG keys by name of the leaf."""
        if self._item.kind == "key":
            typed = (await self._about_key()).get("typed")
            config: Any = jax.config
            # The file does not name the implementation, so Orbax assumes the default, too.
            return {ONE_LEAF: str(config.jax_default_prng_impl)} if typed else {}
        found = {}
        top = self._item.folder + _ARRAY_METADATAS
        for path in sorted(each for each in self._sizes if each.startswith(top)):
            document = await self._mapping(path[len(self._item.folder) :])
            for each in document.get("array_metadatas", ()):
                about = each.get("array_metadata", {})
                impl = (about.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    found[str(about.get("param_name"))] = str(impl)
        return found

    async def _mapping(self, path: str) -> Mapping[str, Any]:
        full = self._item.folder + path
        found = await json_file(self._storage, self._step_dir, full, self._sizes)
        return found if isinstance(found, dict) else {}

    async def _small(self, path: str) -> bytes | None:
        full = self._item.folder + path
        if full not in self._sizes:
            return None
        return await self._storage.read(self._step_dir, full, MOST_BYTES)

    async def _range(self, path: str, offset: int, length: int) -> bytes:
        full = self._item.folder + path
        size = self._sizes.get(full)
        if size is None:
            raise CorruptCheckpointError(f"{full:.200} is missing; the checkpoint was damaged")
        if length == UNKNOWN_SIZE:
            return await self._storage.read(self._step_dir, full, MOST_BYTES) or b""
        if size not in (UNKNOWN_SIZE, None) and offset + length > size:
            raise CorruptCheckpointError(
                f"{full:.200} has {size} bytes, and {offset + length} are expected; it was damaged"
            )
        target = bytearray(length)
        await self._storage.read_block(self._step_dir, full, offset, memoryview(target))
        return bytes(target)


def _with_kind(leaf: Any, shardings: Mapping[str, Any], texts: Mapping[str, Any]) -> Any:
    """Return a leaf with its kind; some years ago, only other files identified arrays and texts."""
    if not isinstance(leaf, Param) or leaf.kind != UNKNOWN:
        return leaf
    if leaf.name in texts:
        return Param(leaf.name, "string")
    return Param(leaf.name, "jax.Array") if leaf.name in shardings else leaf


def _one_leaf(tree: Any) -> Any:
    leaf = tree.get(ONE_LEAF) if isinstance(tree, dict) else None
    if not isinstance(leaf, Param):
        raise CorruptCheckpointError(f"{TREE_FILE} is damaged: there is no {ONE_LEAF!r}")
    return leaf


def _text(name: str, param: Param, texts: Mapping[str, Any]) -> LeafEntry:
    value = texts.get(param.name)
    if not isinstance(value, str):
        raise CorruptCheckpointError(f"its text is not in {_STRINGS}")
    return LeafEntry(name, "str", value=value)


def _nbytes(entry: LeafEntry) -> int:
    if entry.dtype is None:
        return 0
    return math.prod(entry.shape) * parse_dtype(entry.dtype).itemsize


async def json_file(storage: Storage, step_dir: str, path: str, sizes: Sizes) -> JsonValue:
    """Return the content of a JSON file, or None if there is none.

    Raises:
        CorruptCheckpointError: The file is damaged.
    """
    data = await storage.read(step_dir, path, MOST_BYTES) if path in sizes else None
    return None if data is None else parse_json(data, f"{storage.location}/{step_dir}/{path}")


def parse_json(data: bytes, where: str) -> JsonValue:
    """Return the content of a JSON file at `where`.

    Raises:
        CorruptCheckpointError: The file is damaged.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is damaged: {error!s:.200}") from error


# Limit of files that are read to describe the step; states of iterators are smaller.
_MOST_BYTES = 64 << 20
_CONCURRENT_READS = 16
# For items of one file: their handler here, the name of the file, and the data of the entry.
_ONE_FILE: Mapping[str, tuple[str, str, Mapping[str, JsonValue]]] = MappingProxyType(
    {"json": ("json", "metadata", {"model": None}), "proto": ("bytes", "text.txt", {"type": "str"})}
)
# The entry, and its files by path relative to it.
Plain = tuple[ItemEntry, Mapping[str, bytes]]


async def plain_item(storage: Storage, step_dir: str, item: OrbaxItem, sizes: Sizes) -> Plain:
    """Return an item without a tree.

    Raises:
        CorruptCheckpointError: A file of the item is missing.
        UnsupportedFormatError: The item has too many bytes, or states of several jobs.
        StorageError: The store refused.
    """
    where = f"{storage.location}/{step_dir}/{item.folder}".rstrip("/")
    if not item.files:
        raise CorruptCheckpointError(f"{where} is missing, or has no files; it was damaged")
    nbytes = sum(sizes[path] or 0 for path in item.files)
    if nbytes > _MOST_BYTES:
        raise UnsupportedFormatError(
            f"{where} has {nbytes} bytes in files of a kind that is not known here: read them with "
            "the program that wrote them"
        )
    found: dict[str, bytes] = {}

    async def read(path: str) -> None:
        found[path] = await storage.read(step_dir, path, _MOST_BYTES) or b""

    await for_each(read, item.files, _CONCURRENT_READS)
    # In the order of the list, whichever read ended first.
    files = {posixpath.relpath(path, item.folder or "."): found[path] for path in item.files}
    if item.kind in _ONE_FILE:
        [content] = files.values()
        handler, name, about = _ONE_FILE[item.kind]
        return ItemEntry(handler, nbytes=len(content), data={**about}), {name: content}
    return _by_process(files, where)


def _by_process(files: Mapping[str, bytes], where: str) -> Plain:
    """Return files as states of the processes in their names; of one process if none is named."""
    owners = {path: owner_of(path) for path in files}
    counts = {owner[1] for owner in owners.values() if owner is not None} or {1}
    owned = {owner[0] for owner in owners.values() if owner is not None} or {0}
    [count, *others] = sorted(counts)
    if others:
        raise UnsupportedFormatError(
            f"{where} has states of jobs of {count} and of {others[0]} processes"
        )
    if len(owned) != count:
        raise CorruptCheckpointError(
            f"{where} has the states of {len(owned)} of {count} processes; it was damaged"
        )
    parts: list[ItemEntry] = []
    kept: dict[str, bytes] = {}
    for process in range(count):
        own = [path for path in files if owners[path] in (None, (process, count))]
        parts.append(files_entry({renamed(path, 0, 1): len(files[path]) for path in own}))
        kept |= {own_path(renamed(path, 0, 1), process, count): files[path] for path in own}
    return combine(parts), kept
