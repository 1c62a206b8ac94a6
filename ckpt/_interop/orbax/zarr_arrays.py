"""Arrays of zarr v2 and v3, from their metadata. Pure.

Sources: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html and
https://zarr-specs.readthedocs.io/en/latest/v3/core/v3.0.html, with the codecs of its registry. Only
the part of them that Orbax has written is supported: chunks in C order, little endian.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ckpt._format.array_format import DTYPES
from ckpt._format.regions import chunk_grid
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

V2_FILE, V3_FILE = ".zarray", "zarr.json"
# numpy's names of dtypes; zarr v2 names one-byte dtypes differently, and has none for `bfloat16`.
_V2_DTYPES = {
    DTYPES[name].str: name
    for name in DTYPES
    if DTYPES[name].isbuiltin == 1 and DTYPES[name].str[0] in "<|"
}
_V2_CODECS = {"zstd": "zstd", "blosc": "blosc", "gzip": "gzip", "zlib": "gzip"}
_V3_CODECS = {"zstd": "zstd", "blosc": "blosc", "gzip": "gzip"}
_MAX_RANK = 64
# The index of a shard has an offset and a length for every chunk, and a checksum.
_PLACE_BYTES, _CHECKSUM_BYTES = 16, 4


class ZarrArray(Struct, frozen=True):
    """One array.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype in this library.
        chunks: Shape of one encoded chunk.
        codec: Codec of the chunks; None if they are not encoded.
        shards: Shape of the parts that have keys, each of one or more chunks; None if each chunk
            has a key.
        keys: First part of the keys of chunks, and separator of their numbers.
        fill: Value of the elements of chunks that are not stored.
        index_bytes: Length of the index at the end of a shard.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    codec: str | None
    shards: tuple[int, ...] | None
    keys: tuple[str, str]
    fill: Any
    index_bytes: int = 0

    @property
    def keyed(self) -> tuple[int, ...]:
        """Shape of the parts that have keys: shards, or chunks."""
        return self.chunks if self.shards is None else self.shards

    def grid(self) -> Iterator[tuple[int, ...]]:
        """Yield the position of every part that has a key, in C order."""
        return itertools.product(*map(range, chunk_grid(self.shape, self.keyed)))

    def key(self, place: Sequence[int]) -> str:
        """Return the key of a chunk or a shard, relative to the array."""
        first, between = self.keys
        if not place:
            return first or "0"
        return first + (between if first else "") + between.join(map(str, place))


class _V2(Struct):
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    zarr_format: int
    compressor: dict[str, Any] | None = None
    fill_value: Any = None
    order: str = "C"
    filters: list[Any] | None = None
    dimension_separator: str = "."


class _Named(Struct):
    name: str
    configuration: dict[str, Any] = {}


class _V3(Struct):
    shape: tuple[int, ...]
    data_type: str
    chunk_grid: _Named
    chunk_key_encoding: _Named
    zarr_format: int
    fill_value: Any = None
    codecs: list[_Named] = []


def parse_array(data: bytes, *, is_v3: bool) -> ZarrArray:
    """Return the array that a metadata file describes.

    Raises:
        CorruptCheckpointError: The file is damaged, or contradicts itself.
        UnsupportedFormatError: The array has an unsupported codec, order or dtype.
    """
    try:
        found = _parse_v3(data) if is_v3 else _parse_v2(data)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError) as error:
        name = V3_FILE if is_v3 else V2_FILE
        raise CorruptCheckpointError(f"its {name} is damaged: {error!s:.200}") from error
    sizes = (found.shape, found.chunks, found.keyed)
    if (
        len({len(each) for each in sizes}) != 1
        or len(found.shape) > _MAX_RANK
        or any(n < 0 for n in found.shape)
        or any(n < 1 for n in (*found.chunks, *found.keyed))
        or any(a % b for a, b in zip(found.keyed, found.chunks, strict=True))
    ):
        raise CorruptCheckpointError(
            f"shape {list(found.shape[:8])}, chunks {list(found.chunks[:8])} and shards "
            f"{list(found.keyed[:8])} do not fit each other"
        )
    return found


def _parse_v2(data: bytes) -> ZarrArray:
    found = msgspec.json.decode(data, type=_V2)
    if found.zarr_format != 2:
        raise ValueError(f"it is of zarr {found.zarr_format}")
    if found.order != "C" and len(found.shape) > 1:
        raise _unknown(f"the order {found.order!r:.20} of elements")
    if found.filters:
        raise _unknown(f"the filters {found.filters!r:.80}")
    name = None if found.compressor is None else found.compressor.get("id")
    if name is not None and name not in _V2_CODECS:
        raise _unknown(f"the compressor {name!r:.40}")
    dtype = _V2_DTYPES.get(found.dtype, found.dtype)
    return ZarrArray(
        found.shape,
        _check_dtype(dtype),
        # An axis of length 0 may have chunks of length 0.
        tuple(max(each, 1) for each in found.chunks),
        None if name is None else _V2_CODECS[name],
        None,
        ("", found.dimension_separator),
        found.fill_value,
    )


def _parse_v3(data: bytes) -> ZarrArray:
    found = msgspec.json.decode(data, type=_V3)
    if found.zarr_format != 3 or found.chunk_grid.name != "regular":
        raise ValueError(f"it is of zarr {found.zarr_format}, in {found.chunk_grid.name!r:.40}")
    keyed = _shape(found.chunk_grid.configuration["chunk_shape"])
    encoding = found.chunk_key_encoding
    is_default = encoding.name == "default"
    between = encoding.configuration.get("separator", "/" if is_default else ".")
    if encoding.name not in ("default", "v2") or between not in ("/", "."):
        raise _unknown(f"keys of the kind {encoding.name!r:.40}")
    keys = ("c" if is_default else "", between)
    codecs, chunks, index_bytes = found.codecs, keyed, 0
    shards = None
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise _unknown("a codec of whole shards")
        shard = codecs[0].configuration
        if shard.get("index_location", "end") != "end":
            raise _unknown("an index at the beginning of shards")
        chunks, shards = _shape(shard["chunk_shape"]), keyed
        codecs = msgspec.convert(shard["codecs"], list[_Named])
        index_bytes = _index_bytes(keyed, chunks, shard["index_codecs"])
    codec = _codec_of(codecs)
    return ZarrArray(
        found.shape,
        _check_dtype(found.data_type),
        chunks,
        codec,
        shards,
        keys,
        found.fill_value,
        index_bytes,
    )


def _index_bytes(shard: Sequence[int], chunk: Sequence[int], given: Any) -> int:
    codecs = msgspec.convert(given, list[_Named])
    names = [each.name for each in codecs]
    if names not in (["bytes"], ["bytes", "crc32c"]) or not _is_little(codecs[0]):
        raise _unknown(f"an index of shards in {names!r:.80}")
    count = math.prod(chunk_grid(shard, chunk))
    return _PLACE_BYTES * count + (_CHECKSUM_BYTES if len(names) > 1 else 0)


def _codec_of(codecs: Sequence[_Named]) -> str | None:
    """Return the codec of chunks; None if they are not encoded."""
    names = [each.name for each in codecs]
    if not names or names[0] != "bytes" or not _is_little(codecs[0]) or len(names) > 2:
        raise _unknown(f"the codecs {names!r:.120}")
    if len(names) == 1:
        return None
    if names[1] not in _V3_CODECS:
        raise _unknown(f"the codec {names[1]!r:.40}")
    return _V3_CODECS[names[1]]


def _is_little(codec: _Named) -> bool:
    return bool(codec.configuration.get("endian", "little") == "little")


def _shape(given: Any) -> tuple[int, ...]:
    return msgspec.convert(given, tuple[int, ...])


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise _unknown(f"the dtype {dtype!r:.40}")
    return dtype


def _unknown(what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(f"it has {what}, which is not read here: load it with Orbax")
