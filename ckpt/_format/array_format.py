"""Array formats: dtypes, chunks and compression, as the caller wants them and as zarr has them.

Array formats: how the caller wants arrays to be stored, in dtype, chunks and compression. The zarr
v3 codecs are those of the specification (`blosc`) and of its registry of extensions (`zstd`):
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/index.html

Zarr v3 as this library writes it: chunk shapes, chunk keys and `zarr.json`. Chunks are stored
whole, in C order, little endian, and uncompressed unless they have a codec. A dtype that zarr has
no name for (`uint4`, `uint2`, `float8_e4m3`) is stored as its bytes in memory, `uint8`; the
manifest keeps the real dtype. Source:
https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from ckpt._arguments import invalid, one_of, whole_number
from ckpt.errors import CorruptCheckpointError

# Dtypes are parsed from files, and a file can name only these.
_NUMPY_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ML_DTYPES = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_DTYPES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES if hasattr(ml_dtypes, name)},
}
# Floating dtypes that other numbers are not cast to: the first has only powers of two, without sign
# and zero; the second has no NaN and no infinity, so that a diverged value would look right.
UNROUNDED = frozenset({"float8_e8m0fnu", "float4_e2m1fn"})


def parse_dtype(name: str | None) -> np.dtype[Any]:
    """Return the dtype called `name` in a manifest.

    Raises:
        CorruptCheckpointError: The name is not in the closed list of storable dtypes.
    """
    found = DTYPES.get(name or "")
    if found is None:
        raise CorruptCheckpointError(f"a stored leaf has the unknown dtype {name!r:.80}")
    return found


def storable_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype that a caller means by `"bfloat16"` or `jnp.bfloat16`, or None."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        # np.dtype(None) is float64.
        found: np.dtype[Any] = np.dtype("none" if dtype is None else dtype)
    except (TypeError, ValueError):
        return None
    return found if DTYPES.get(found.name) == found else None


BloscName = Literal["blosclz", "lz4", "lz4hc", "zlib", "zstd"]
BloscShuffle = Literal["noshuffle", "shuffle", "bitshuffle"]
# Names of codecs in manifests; a closed list. Old checkpoints of Orbax have the last one.
CODECS = frozenset({"zstd", "blosc", "gzip"})
# A chunk costs a key in the index and a few tens of bytes in the manifest.
MIN_CHUNK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Zstd:
    """Zstandard.

    Attributes:
        level: 1 (fast) to 22 (small).

    Example:
        ```python
        packed = ckpt.ArrayFormat(compression=ckpt.Zstd(level=3))
        await ckpt.save("exports/packed", state, formats={"params": packed})
        ```
    """

    level: int = 1

    def __post_init__(self) -> None:
        level = whole_number("level", self.level, of="Zstd", most=22)
        object.__setattr__(self, "level", level)

    @property
    def name(self) -> str:
        """Name of the codec in manifests."""
        return "zstd"

    def codec(self, itemsize: int) -> dict[str, Any]:
        """Return the zarr v3 codec for elements of `itemsize` bytes."""
        return {"name": self.name, "configuration": {"level": self.level, "checksum": False}}


@dataclass(frozen=True, slots=True)
class Blosc:
    """Blosc: a shuffle of bytes or bits before a fast compressor, which suits floats.

    Attributes:
        cname: The compressor.
        clevel: 0 (none) to 9 (small).
        shuffle: Unit of the shuffle: bytes (`shuffle`), bits (`bitshuffle`) or nothing.

    Example:
        ```python
        packed = ckpt.ArrayFormat(compression=ckpt.Blosc(shuffle="bitshuffle"))
        await ckpt.save("exports/packed", state, formats={"params": packed})
        ```
    """

    cname: BloscName = "lz4"
    clevel: int = 5
    shuffle: BloscShuffle = "shuffle"

    def __post_init__(self) -> None:
        one_of("cname", self.cname, get_args(BloscName), of="Blosc")
        one_of("shuffle", self.shuffle, get_args(BloscShuffle), of="Blosc")
        clevel = whole_number("clevel", self.clevel, of="Blosc", least=0, most=9)
        object.__setattr__(self, "clevel", clevel)

    @property
    def name(self) -> str:
        """Name of the codec in manifests."""
        return "blosc"

    def codec(self, itemsize: int) -> dict[str, Any]:
        """Return the zarr v3 codec for elements of `itemsize` bytes."""
        return {
            "name": self.name,
            "configuration": {
                "cname": self.cname,
                "clevel": self.clevel,
                "shuffle": self.shuffle,
                "typesize": itemsize,
                "blocksize": 0,
            },
        }


Compression = Zstd | Blosc
_BY_NAME: dict[str, type[Zstd | Blosc]] = {"zstd": Zstd, "blosc": Blosc}


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """How an array is stored; an attribute that is None changes nothing.

    Attributes:
        dtype: The dtype it is cast to, within its kind: floating or complex to any of the same
            kind, integers to one that holds all their values. A restore finds an array of this
            dtype.
        chunk_bytes: Upper bound of one stored chunk, before compression. (A quarter of the staging
            budget is another.)
        split_axes: The axes along which chunks are cut first, evenly where their lengths allow;
            negative ones count from the last. None means with `chunk_bytes` the sharded axes, and
            without it the first ones.
        compression: `"zstd"`, `"blosc"`, or one of them with settings, such as `Zstd(level=3)`.
            Arrays of up to 256 KiB stay uncompressed.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        half = ckpt.ArrayFormat(dtype="bfloat16", compression="zstd")
        await ckpt.save("exports/half", state, formats={"params": half})
        ```
    """

    dtype: Any = None
    chunk_bytes: int | None = None
    split_axes: tuple[int, ...] | None = None
    compression: Compression | Literal["zstd", "blosc"] | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        if self.chunk_bytes is not None:
            size = whole_number(
                "chunk_bytes", self.chunk_bytes, of="ArrayFormat", least=MIN_CHUNK_BYTES
            )
            object.__setattr__(self, "chunk_bytes", size)
        if self.split_axes is not None:
            object.__setattr__(self, "split_axes", _axes(self.split_axes))
        if self.compression is not None:
            object.__setattr__(self, "compression", _compression(self.compression))

    @property
    def codec(self) -> Compression | None:
        """The compression with its settings."""
        found = self.compression
        assert not isinstance(found, str)
        return found

    @property
    def is_default(self) -> bool:
        """True if it changes nothing."""
        chosen = (self.dtype, self.chunk_bytes, self.split_axes, self.compression)
        return chosen == (None, None, None, None)


def cast_refusal(source: str, target: str) -> str | None:
    """Return why arrays of dtype `source` are not cast to `target` in a save, or None."""
    kinds = _kind(source), _kind(target)
    if kinds[0] != kinds[1] or kinds[0] == "other":
        return f"{source} is not cast to {target}, which is of another kind"
    if kinds[0] == "integer" and not _holds_all(source, target):
        return f"{source} is not cast to {target}, which does not hold all of its values"
    return None


def _kind(dtype: str) -> str:
    if dtype in UNROUNDED:
        return "other"
    for kind, start in (("floating", ("float", "bfloat")), ("complex", ("complex",))):
        if dtype.startswith(start):
            return kind
    return "integer" if dtype.startswith(("int", "uint")) else "other"


def _holds_all(source: str, target: str) -> bool:
    bits = [int(name.lstrip("uint")) for name in (source, target)]
    if source.startswith("uint"):
        return bits[1] >= bits[0] + (not target.startswith("uint"))
    return not target.startswith("uint") and bits[1] >= bits[0]


def _dtype_name(dtype: Any) -> str:
    found = storable_dtype(dtype)
    if found is None:
        what = "a dtype that can be stored, such as 'bfloat16'"
        raise invalid("dtype", dtype, what, of="ArrayFormat")
    return found.name


def _axes(axes: Any) -> tuple[int, ...]:
    if not (
        isinstance(axes, tuple | list)
        and axes
        and all(type(axis) is int for axis in axes)
        and len(set(axes)) == len(axes)
    ):
        raise invalid("split_axes", axes, "different axes, such as (0, 1)", of="ArrayFormat")
    return tuple(axes)


def compression_of(name: str) -> Compression:
    """Return the compression of a codec in a manifest, with the settings of a new one.

    Chunks that were encoded with other settings can be decoded with these.

    Raises:
        InvalidArgumentError: This library does not write the codec.
    """
    return _compression(name)


def _compression(value: Any) -> Compression:
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]()
    if isinstance(value, Zstd | Blosc):
        return value
    what = "'zstd', 'blosc', Zstd(...) or Blosc(...)"
    raise invalid("compression", value, what, of="ArrayFormat")


# Largest factor by which an even cut may take more pieces than an uneven one.
_MOST_PIECES = 8
_NOT_IN_ZARR = frozenset({"uint2", "uint4", "float8_e4m3"})


def stored_dtype(dtype: str) -> str:
    """Return the zarr data type under which arrays of `dtype` are stored."""
    return "uint8" if dtype in _NOT_IN_ZARR else dtype


def zarr_metadata(
    shape: Sequence[int], chunk: Sequence[int], dtype: str, compression: Compression | None = None
) -> dict[str, Any]:
    """Return the zarr v3 array metadata of a stored array, without the version fields."""
    data_type = stored_dtype(dtype)
    fill_value: Any = 0.0 if "float" in data_type else 0
    if data_type == "bool":
        fill_value = False
    elif data_type.startswith("complex"):
        fill_value = [0.0, 0.0]
    one_byte = DTYPES[data_type].itemsize == 1
    endian = {} if one_byte else {"configuration": {"endian": "little"}}
    itemsize = DTYPES[data_type].itemsize
    codecs = [] if compression is None else [compression.codec(itemsize)]
    return {
        "shape": list(shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "data_type": data_type,
        "codecs": [{"name": "bytes", **endian}, *codecs],
        "fill_value": fill_value,
    }


def zarr_metadata_bytes(
    shape: Sequence[int], chunk: Sequence[int], dtype: str, compression: Compression | None = None
) -> bytes:
    metadata = zarr_metadata(shape, chunk, dtype, compression)
    document = {"zarr_format": 3, "node_type": "array", **metadata}
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


# Readers refuse a longer key of a chunk or a document: TensorStore's databases have this limit.
MAX_KEY_BYTES = 65_535


def chunk_key(place: Sequence[int]) -> str:
    """Return the key of the chunk at grid `place` below its array, e.g. `c/0/1`."""
    return "/".join(("c", *map(str, place)))


def choose_chunk(
    shape: Sequence[int],
    shard: Sequence[int],
    itemsize: int,
    target_bytes: int,
    axes: Sequence[int] = (),
    most_bytes: int | None = None,
) -> tuple[int, ...]:
    """Return the chunk shape for an array whose shards have the shape `shard`.

    The first axes are split first: such chunks are one run of memory within a shard. A length with
    a suitable divisor is split evenly, so that no chunk crosses a shard and none is padded. For any
    other length, such as a prime, chunks cross shards or are padded at the edge of the array. Every
    chunk has at most `target_bytes`.

    With `most_bytes` no chunk ever crosses a shard, since another process may hold the next one. If
    a shard has no good divisor, its chunks are larger than `target_bytes`, but not larger than
    `most_bytes` if a divisor allows that.

    Before that, `axes` are cut in turn into equal parts, each as often as the others, as long as
    their lengths have small divisors: finer shards along them then consist of whole chunks.

    Args:
        shape: Global shape.
        shard: Shape of every shard; divides `shape`.
        itemsize: Bytes of one element.
        target_bytes: Upper bound of a chunk.
        axes: Axes to be split before the others, not negative.
        most_bytes: Upper bound of a chunk that must not cross shards; None if chunks may.

    Returns:
        The chunk shape, at least 1 along every axis.
    """
    chunk = [max(n, 1) for n in shard]
    _cut_evenly(chunk, itemsize, target_bytes, axes)
    nbytes = math.prod(chunk) * itemsize
    uneven = []
    for axis in (*axes, *range(len(chunk))):
        if nbytes <= target_bytes:
            break
        row = nbytes // chunk[axis]
        step = _part(chunk[axis], max(target_bytes // row, 1))
        if most_bytes is not None and chunk[axis] % step and shard[axis] != shape[axis]:
            uneven.append(axis)
            continue
        nbytes = row * step
        chunk[axis] = step
    for axis in uneven:
        row = nbytes // chunk[axis]
        chunk[axis] = _divisor(chunk[axis], row, target_bytes, most_bytes or target_bytes)
        nbytes = row * chunk[axis]
    return tuple(chunk)


def _cut_evenly(chunk: list[int], itemsize: int, target_bytes: int, axes: Sequence[int]) -> None:
    """Divide lengths of `chunk` by small factors, always of the axis with the fewest pieces."""
    pieces = dict.fromkeys(axes, 1)
    while pieces and math.prod(chunk) * itemsize > target_bytes:
        # The first of the axes with the same number of pieces.
        axis = min(pieces, key=pieces.__getitem__)
        factor = next((n for n in range(2, _MOST_PIECES + 1) if chunk[axis] % n == 0), None)
        if factor is None:
            del pieces[axis]
            continue
        chunk[axis] //= factor
        pieces[axis] *= factor


def _divisor(length: int, row: int, target_bytes: int, most_bytes: int) -> int:
    """Return the divisor of `length` for the best chunks, of that many rows of `row` bytes."""
    small = (n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
    divisors = sorted({each for n in small for each in (n, length // n)})
    below = [n for n in divisors if n * row <= target_bytes]
    # One chunk that is too large is better than very many that are too small.
    if below and below[-1] * row * _MOST_PIECES**2 >= target_bytes:
        return below[-1]
    above = next(n for n in divisors if n * row > target_bytes or n == length)
    return above if above * row <= most_bytes or not below else below[-1]


def _part(length: int, longest: int) -> int:
    """Return the length of the parts when `length` is cut into parts of at most `longest`."""
    pieces = -(-length // longest)
    # An even cut with a few more pieces is better than a ragged one: no chunk is padded.
    divisors = (n for n in range(pieces, min(_MOST_PIECES * pieces, length) + 1) if length % n == 0)
    count = next(divisors, None)
    if count is not None:
        return length // count
    return -(-length // pieces)
