"""Array formats: how the caller wants arrays to be stored, in dtype, chunks and compression.

The zarr v3 codecs are those of the specification (`blosc`) and of its registry of extensions
(`zstd`): https://zarr-specs.readthedocs.io/en/latest/v3/codecs/index.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt._arguments import invalid, one_of, whole_number
from ckpt._format.dtypes import UNROUNDED, storable_dtype

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
