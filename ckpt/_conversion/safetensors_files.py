"""Safetensors writer. The header is computed first, so each piece goes straight to its place.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import Struct

from ckpt._conversion.tensors import (
    Bytes,
    ExportedArray,
    LargeFile,
    pieces_of,
    write_pieces,
    write_region,
)
from ckpt._format.array_format import DTYPES
from ckpt._format.regions import Region
from ckpt._interop.safetensors import DTYPE_NAMES, LENGTH_BYTES, MOST_HEADER_BYTES, parse_index
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.exports import Safetensors
from ckpt.storage._local.posix import fsync_directory

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PYTORCH = {"format": "pt"}
# Arrays begin at multiples of this number of bytes.
_ALIGNMENT = 8
_METADATA = "__metadata__"
_ADVICE = {
    "complex128": "cast it to complex64 first, with convert(formats={...: 'complex64'})",
    "float8_e4m3": "their float8 is float8_e4m3fn: convert it to that first",
}


class _TensorFile(Struct, frozen=True, eq=False):
    """A planned file.

    Attributes:
        name: Its name; empty if it is the only one.
        header: All bytes before the first array.
        places: The arrays by name, each with the offset of its first byte behind the header.
        size: Bytes of the file.
    """

    name: str
    header: bytes
    places: Mapping[str, tuple[ExportedArray, int]]
    size: int


def problem_of(spec: LeafSpec) -> str | None:
    """Return the reason why safetensors cannot hold an array, or None."""
    if spec.kind == "key":
        return "it is a PRNG key; save jax.random.key_data of it"
    if spec.dtype in DTYPE_NAMES:
        return None
    advice = _ADVICE.get(
        spec.dtype or "", "convert it to another dtype first, with convert(formats=...)"
    )
    return f"safetensors have no {spec.dtype}; {advice}"


def is_export(path: Path) -> bool:
    """Return True if a directory has an index and the files in it, and nothing else."""
    try:
        listed = set(parse_index((path / INDEX).read_bytes()).values())
    except (OSError, CorruptCheckpointError):
        return False
    found = list(path.iterdir())
    return all(each.is_file() for each in found) and {each.name for each in found} == {
        INDEX,
        *listed,
    }


async def write_safetensors(
    tensors: Sequence[ExportedArray], options: Safetensors, target: Path, at_once: int
) -> None:
    """Write tensors to one file, or to a directory of files; durable on return.

    Args:
        tensors: The tensors.
        options: Settings of the format.
        target: The file or directory, which must not exist.
        at_once: Number of pieces that may be in memory.

    Raises:
        InvalidArgumentError: Two tensors get the same name, or a name is not a text.
    """
    files = await run_in_thread(_planned, tensors, options)
    if options.file_bytes is None:
        [only] = files
        await _write(only, target, at_once)
    else:
        await run_in_thread(target.mkdir)
        for file in files:
            await _write(file, target / file.name, at_once)
        await run_in_thread(_write_index, files, target)


async def _write(file: _TensorFile, path: Path, at_once: int) -> None:
    with await run_in_thread(LargeFile, path, file.size) as made:
        await write_pieces(_pieces(file, made), at_once)
        await run_in_thread(made.sync)


def _pieces(file: _TensorFile, made: LargeFile) -> Iterator[Callable[[Bytes], None]]:
    header = np.frombuffer(file.header, np.uint8)
    yield lambda scratch: made.write(header, 0, scratch)
    for tensor, start in file.places.values():
        for region in pieces_of(tensor.spec):
            yield partial(_copy, tensor, region, made, len(header) + start)


def _copy(
    tensor: ExportedArray, region: Region, made: LargeFile, start: int, scratch: Bytes
) -> None:
    data = tensor.leaf.read(region)
    write_region(made, start, tensor.spec.shape, region, data, scratch)


def _planned(tensors: Sequence[ExportedArray], options: Safetensors) -> list[_TensorFile]:
    named = _name_tensors(tensors, options.names)
    # Largest elements first, so that no array needs padding in front of it.
    order = sorted(named, key=lambda name: (-DTYPES[named[name].spec.dtype or ""].itemsize, name))
    groups: list[list[str]] = [[]]
    filled = 0
    for name in order:
        nbytes = named[name].spec.nbytes
        if options.file_bytes is not None and groups[-1] and filled + nbytes > options.file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    total = len(groups)
    return [
        _file(_name_of(number, total), {name: named[name] for name in group}, options)
        for number, group in enumerate(groups)
    ]


def _name_of(number: int, total: int) -> str:
    return f"model-{number + 1:05d}-of-{total:05d}{_SUFFIX}"


def _name_tensors(
    tensors: Sequence[ExportedArray], names: Callable[[str], str] | None
) -> dict[str, ExportedArray]:
    found: dict[str, ExportedArray] = {}
    for tensor in tensors:
        name: object = ".".join(tensor.keys) if names is None else names(tensor.path)
        if not isinstance(name, str) or name == _METADATA or not _is_text(name):
            raise InvalidArgumentError(
                f"Safetensors(names=...): {name!r:.80} for {tensor.path!r:.200}; expected the name "
                "of a tensor"
            )
        if name in found:
            raise InvalidArgumentError(
                f"{found[name].path!r:.200} and {tensor.path!r:.200} would both be the tensor "
                f"{name!r:.200}; give them other names with Safetensors(names=...)"
            )
        found[name] = tensor
    return found


def _is_text(name: str) -> bool:
    """Return True if a text can be encoded as UTF-8."""
    return name == name.encode(errors="replace").decode()


def _file(name: str, tensors: Mapping[str, ExportedArray], options: Safetensors) -> _TensorFile:
    metadata = dict(_PYTORCH if options.metadata is None else options.metadata)
    members: dict[str, object] = {_METADATA: metadata} if metadata else {}
    begin = 0
    places = {}
    for each, tensor in tensors.items():
        spec = tensor.spec
        members[each] = {
            "dtype": DTYPE_NAMES[spec.dtype or ""],
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        places[each] = tensor, begin
        begin += spec.nbytes
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise InvalidArgumentError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes, and such a file may have "
            f"{MOST_HEADER_BYTES}: write several, with Safetensors(file_bytes=...)"
        )
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return _TensorFile(name, header, places, len(header) + begin)


def _write_index(files: Sequence[_TensorFile], target: Path) -> None:
    listed = {name: file.name for file in files for name in file.places}
    nbytes = sum(tensor.spec.nbytes for file in files for tensor, _ in file.places.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(listed.items()))}
    data = json.dumps(index, indent=2, ensure_ascii=False).encode()
    with LargeFile(target / INDEX, len(data)) as made:
        made.write(np.frombuffer(data, np.uint8), 0, np.empty(0, np.uint8))
        made.sync()
    fsync_directory(target)
