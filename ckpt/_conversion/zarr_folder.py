"""Zarr v3 writer: a directory of groups and arrays that other zarr programs can open.

Source: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt._conversion.tensors import Bytes, ExportedArray, LargeFile, write_pieces
from ckpt._format.array_format import (
    DTYPES,
    choose_chunk,
    chunk_key,
    stored_dtype,
    zarr_metadata_bytes,
)
from ckpt._format.regions import chunk_grid, chunk_region
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import InvalidArgumentError
from ckpt.storage._local.posix import fsync_directory

_DOCUMENT = "zarr.json"
_CHUNK_BYTES = 16 << 20
# Mark in the attributes of an export, so that only exports are ever replaced.
_MARK = "written_by_ckpt"
_CHUNK = re.compile(r"(^|/)c(/[0-9]+)*\Z")


def problem_of(spec: LeafSpec) -> str | None:
    """Return the reason why zarr cannot hold an array, or None."""
    if spec.kind == "key":
        return "it is a PRNG key; save jax.random.key_data of it"
    if stored_dtype(spec.dtype or "") != spec.dtype:
        return f"zarr has no {spec.dtype}; save it as another dtype"
    return None


def is_export(path: Path) -> bool:
    """Return True if this library exported a directory and no other files were added to it."""
    try:
        top = json.loads((path / _DOCUMENT).read_bytes())
        marked = top["attributes"][_MARK] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return marked and all(
        each.name == _DOCUMENT or _CHUNK.search(each.relative_to(path).as_posix())
        for each in path.rglob("*")
        if not each.is_dir()
    )


async def write_zarr(tensors: Sequence[ExportedArray], target: Path, at_once: int) -> None:
    """Write tensors to a directory; durable on return.

    Raises:
        InvalidArgumentError: A key cannot be the name of a directory.
    """
    for tensor in tensors:
        wrong = next((key for key in tensor.keys if not _is_name(key)), None)
        if wrong is not None:
            raise InvalidArgumentError(
                f"{tensor.path!r:.200}: {wrong!r:.80} cannot be the name of a group or an array"
            )
    folders = await run_in_thread(_make_groups, tensors, target)
    await write_pieces(_pieces(tensors, target), at_once)
    await run_in_thread(_sync, folders)


def _is_name(key: str) -> bool:
    """Return True if a key can be the name of a zarr group or array, and of a directory."""
    return not (
        set(key) <= {"."} or key.startswith("__") or key == _DOCUMENT or {"/", "\0"} & set(key)
    )


def _make_groups(tensors: Sequence[ExportedArray], target: Path) -> list[Path]:
    # Documents are too small to need scratch memory.
    scratch = np.empty(0, np.uint8)
    groups = {tensor.keys[:end] for tensor in tensors for end in range(len(tensor.keys))}
    for keys in sorted(groups, key=len):
        path = target.joinpath(*keys)
        path.mkdir(parents=True, exist_ok=True)
        marks = {} if keys else {_MARK: True}
        group = {"zarr_format": 3, "node_type": "group", "attributes": marks}
        _write_file(path / _DOCUMENT, np.frombuffer(json.dumps(group).encode(), np.uint8), scratch)
    found = [target.joinpath(*keys) for keys in groups]
    for tensor in tensors:
        spec, path = tensor.spec, target.joinpath(*tensor.keys)
        path.mkdir(exist_ok=True)
        document = zarr_metadata_bytes(spec.shape, _chunk_of(spec), spec.dtype or "")
        if not tensor.keys:
            # The whole export is this array.
            document = json.dumps(json.loads(document) | {"attributes": {_MARK: True}}).encode()
        _write_file(path / _DOCUMENT, np.frombuffer(document, np.uint8), scratch)
        found.append(path)
    return found


def _chunk_of(spec: LeafSpec) -> tuple[int, ...]:
    itemsize = DTYPES[spec.dtype or ""].itemsize
    return spec.chunk or choose_chunk(spec.shape, spec.shape, itemsize, _CHUNK_BYTES)


def _pieces(tensors: Sequence[ExportedArray], target: Path) -> Iterator[Callable[[Bytes], None]]:
    for tensor in tensors:
        spec = tensor.spec
        if 0 in spec.shape:
            continue
        chunk = _chunk_of(spec)
        for place in itertools.product(*map(range, chunk_grid(spec.shape, chunk))):
            path = target.joinpath(*tensor.keys, chunk_key(place))
            yield partial(_write_chunk, tensor, chunk, place, path)


def _write_chunk(
    tensor: ExportedArray,
    chunk: tuple[int, ...],
    place: tuple[int, ...],
    path: Path,
    scratch: Bytes,
) -> None:
    data: np.ndarray[Any, Any] = tensor.leaf.read(chunk_region(place, chunk, tensor.spec.shape))
    if data.shape != chunk:
        # Chunks at the edge have the full size, too.
        padded = np.zeros(chunk, data.dtype)
        padded[tuple(slice(n) for n in data.shape)] = data
        data = padded
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_file(path, np.ascontiguousarray(data).reshape(-1).view(np.uint8), scratch)


def _write_file(path: Path, data: Bytes, scratch: Bytes) -> None:
    with LargeFile(path, len(data)) as made:
        made.write(data, 0, scratch)
        made.sync()


def _sync(folders: Sequence[Path]) -> None:
    for folder in folders:
        for place, _, _ in os.walk(folder):
            fsync_directory(Path(place))
