"""One item of a checkpoint of Orbax: what describes its tree and arrays becomes an entry."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from msgspec.structs import replace

from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, JsonValue
from ckpt._interop.orbax.arrays import ArrayStore, describe_arrays, leaf_entry
from ckpt._interop.orbax.database import MANIFEST, Values, read_database
from ckpt._interop.orbax.layout import KEY_FOLDER, MOST_BYTES, OrbaxItem, Sizes
from ckpt._interop.orbax.ocdbt_nodes import ValuePlace
from ckpt._interop.orbax.shardings import SHARDING_FILE, parse_shardings
from ckpt._interop.orbax.tree import TREE_FILE, Param, parse_tree
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.flatten import describe
from ckpt.errors import CorruptCheckpointError, located
from ckpt.storage._base import UNKNOWN_SIZE, Storage

_KEY_ABOUT = "jax_random_key_metadata/metadata"
_STRINGS, _ARRAY_METADATAS = "_strings.json", "array_metadatas/"
# How Orbax calls the one leaf of an item that is an array.
_ONE_LEAF = "checkpoint"


class OrbaxItemReader:
    """Reads what describes the arrays of one item of a checkpoint."""

    def __init__(self, storage: Storage, step_dir: str, item: OrbaxItem, sizes: Sizes) -> None:
        self._storage = storage
        self._step_dir = step_dir
        self._item = item
        self._sizes = sizes

    async def entry(self) -> tuple[ItemEntry, bytes]:
        """Return the item, and the content of its first data file, which is in memory."""
        data = await self._small(TREE_FILE)
        path = f"{self._storage.location}/{self._step_dir}/{self._item.folder}{TREE_FILE}"
        tree = await run_in_thread(partial(parse_tree, data or b"", path))
        if self._item.kind in ("array", "key"):
            tree = replace(tree, tree=_one_leaf(tree.tree))
        structure = await run_in_thread(partial(describe, tree.tree))
        store = ArrayStore(await self._values(), self._range)
        texts, impls = await self._texts(), await self._impls()
        params = list(structure.leaves)
        unknown = next((each for each in params if not isinstance(each, Param)), None)
        if unknown is not None:
            raise CorruptCheckpointError(f"{TREE_FILE} is damaged: a leaf is {unknown!r:.60}")
        arrays = await describe_arrays(
            store, tree, [each for each in params if each.kind != "string"]
        )
        platform = jax.default_backend()
        known = parse_shardings(await self._small(SHARDING_FILE), platform)
        numbers: dict[str, int] = {}
        entries = []
        for name, param in zip(structure.names, params, strict=True):
            if param.kind == "string":
                entries.append(_text(name, param, texts))
                continue
            number = None
            if param.name in known:
                text = repr(known[param.name])
                number = numbers.setdefault(text, len(numbers))
            with located(leaf=name):
                impl = impls.get(param.name)
                entries.append(leaf_entry(param, name, arrays[param.name], number, impl))
        by_text = {repr(entry): entry for entry in known.values()}
        shardings = [by_text[text] for text in numbers]
        table = LeafTable.unchecked(entries)
        nbytes = sum(_nbytes(entry) for entry in entries)
        item = ItemEntry("pytree", list(structure.nodes), table, shardings, store.files, nbytes)
        return item, bytes(store.inline)

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
            path[len(folder) :]: ValuePlace(path[len(folder) :], "", 0, size)
            for path, size in self._sizes.items()
            if size is not None and path.startswith(folder)
        }

    async def _texts(self) -> Mapping[str, Any]:
        return await self._mapping(_STRINGS)

    async def _impls(self) -> Mapping[str, str]:
        """Return the implementations of typed PRNG keys by the name of the leaf."""
        if self._item.kind == "key":
            top = self._item.folder[: -len(f"{KEY_FOLDER}/")]
            path = top + _KEY_ABOUT
            about = await json_file(self._storage, self._step_dir, path, self._sizes)
            typed = isinstance(about, dict) and about.get("typed")
            config: Any = jax.config
            # Orbax does not write it either.
            return {_ONE_LEAF: str(config.jax_default_prng_impl)} if typed else {}
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


def _one_leaf(tree: Any) -> Any:
    """Return the leaf of an item that is one array."""
    leaf = tree.get(_ONE_LEAF) if isinstance(tree, dict) else None
    if not isinstance(leaf, Param):
        raise CorruptCheckpointError(f"{TREE_FILE} is damaged: there is no {_ONE_LEAF!r}")
    return leaf


def _text(name: str, param: Param, texts: Mapping[str, Any]) -> LeafEntry:
    value = texts.get(param.name)
    if not isinstance(value, str):
        raise CorruptCheckpointError(f"its text is not in {_STRINGS}", leaf=name)
    return LeafEntry(name, "str", value=value)


def _nbytes(entry: LeafEntry) -> int:
    if entry.dtype is None:
        return 0
    return math.prod(entry.shape) * parse_dtype(entry.dtype).itemsize


async def json_file(storage: Storage, step_dir: str, path: str, sizes: Sizes) -> JsonValue:
    """Return the content of a JSON file, or None if there is none.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    data = await storage.read(step_dir, path, MOST_BYTES) if path in sizes else None
    return None if data is None else parse_json(data, f"{storage.location}/{step_dir}/{path}")


def parse_json(data: bytes, where: str) -> JsonValue:
    """Return the content of a JSON file that is at `where`.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is damaged: {error!s:.200}") from error
