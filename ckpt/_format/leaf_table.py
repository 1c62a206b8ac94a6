"""The leaves of an item in columns: shared forms are stored once, and the rest is packed.

A leaf has a *form* (kind, dtype, shape, chunks, place), which thousands share, and chunks, each
with a digest and a place in a data file. The table keeps forms in a list and the rest in arrays, so
that reading and writing it takes no Python object for each leaf. A `LeafEntry` is one leaf of it,
made on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Annotated, Any, ClassVar, overload

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

Value = str | bool | None
Length = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=0, le=1 << 31)]
Integers = np.ndarray[Any, np.dtype[np.int64]]

DIGEST_BYTES = 16
# Stands for the unknown digest of a chunk that another library wrote.
UNCHECKED = "unchecked"
_UNKNOWN = "0" * 2 * DIGEST_BYTES
# Offset of a chunk that is not on this disk.
_ABSENT = -1
_OFFSET = np.dtype("<i8")
_NUMBER = np.dtype("<u4")
_NONE: Integers = np.empty(0, np.int64)
# The columns of the only extension of the writers that knew no `extensions`.
_EARLIER = ("vital_signs", ("fingerprints", "norms", "absmax", "nonfinite", "unequal"))


class LeafForm(Struct, frozen=True, omit_defaults=True, gc=False):
    """The properties that many leaves have in common.

    Attributes:
        kind: `jax`, `key` (a typed PRNG key, stored as its key data), `numpy`, `numpy_scalar`; a
            scalar with a value: `int`, `float`, `complex`, `bool`, `str`, `bytes`,
            `numpy_str`, `numpy_bytes`; or `callable`, of which only the name is stored.
        dtype: Logical dtype of an array leaf, e.g. `bfloat16`.
        shape: Global shape of an array leaf.
        chunks: Shape of one stored chunk; chunks tile the array from the origin.
        count: Number of chunks.
        codec: Codec of every chunk, `zstd` or `blosc`; None if chunks are not encoded.
        packed: True if the array is a single chunk that holds exactly its bytes (a small leaf).
        sharding: Index into the item's `shardings` (`jax` only).
        committed: True if a jax array was bound to its place; jax may move other arrays.
        weak_type: True if the array was weakly typed.
        impl: Name of the implementation of a PRNG key.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[Length, ...] = ()
    chunks: tuple[Length, ...] = ()
    count: Number = 0
    codec: str | None = None
    packed: bool = False
    sharding: int | None = None
    committed: bool = True
    weak_type: bool = False
    impl: str | None = None


class LeafEntry(Struct, frozen=True, gc=False):
    """One leaf. Its form is in the attributes of `LeafForm`.

    Attributes:
        name: The stored name (escaped leaf path); its keys in the database begin with `<name>/`.
        digests: xxh3_128 of the logical bytes (C order, little endian) of every chunk, in C order
            of the chunk grid. For a chunk at the upper edge, only the part inside the array counts.
            Empty for a chunk that another process keeps on a disk of its own; `unchecked` for a
            chunk that another library wrote and that was not verified yet.
        offsets: First byte of every chunk within its data file, in the order of `digests`.
        files: Index into the item's `data_files` of every chunk's file; empty where all are in
            the first.
        lengths: Bytes of every encoded chunk, in the order of `digests`; empty without a codec.
        same_as: Number of an earlier leaf that was the same array object; both have the same
            chunks at the same places.
        value: The value of a Python scalar (`int` and `float` as text, exactly; `bytes` base64).
    """

    name: str
    kind: str
    dtype: str | None = None
    shape: Sequence[int] = ()
    chunks: Sequence[int] = ()
    digests: Sequence[str] = ()
    offsets: Sequence[int] = ()
    files: Sequence[int] = ()
    codec: str | None = None
    lengths: Sequence[int] = ()
    packed: bool = False
    sharding: int | None = None
    committed: bool = True
    weak_type: bool = False
    impl: str | None = None
    same_as: int | None = None
    value: Value = None

    @property
    def form(self) -> LeafForm:
        """The form of the leaf, which other leaves may share."""
        return LeafForm(
            self.kind,
            self.dtype,
            tuple(self.shape),
            tuple(self.chunks),
            len(self.digests),
            self.codec,
            self.packed,
            self.sharding,
            self.committed,
            self.weak_type,
            self.impl,
        )


class LeafColumns(Struct, frozen=True, omit_defaults=True):
    """A table as it is in the file. Bytes are base64 there, and numbers little endian.

    Attributes:
        names: Name of every leaf.
        forms: The distinct forms.
        form: Number of every leaf's form, 4 bytes each; empty if all leaves have the first one.
        digests: Digest of every chunk, leaf by leaf, 16 bytes each; zeros for an unknown digest.
        offsets: Offset of every chunk, 8 bytes each, signed; -1 for a chunk on another disk.
        files: Number of every chunk's file, 4 bytes each; empty if all chunks are in the first one.
        lengths: Bytes of every encoded chunk, 8 bytes each, 0 for a plain one; empty if all are
            plain.
        same_as: Leaves that are the same array as an earlier leaf, each with the number of that
            leaf. They have no chunks of their own.
        values: Leaves with a value, each with the value.
        extensions: The columns of each extension that has noted something of the leaves. Only the
            extension knows what they mean; they belong to these leaves in this order.
        fingerprints, norms, absmax, nonfinite, unequal: Earlier writers had such columns here. They
            are read, and never written.
    """

    names: list[str]
    forms: list[LeafForm]
    form: bytes = b""
    digests: bytes = b""
    offsets: bytes = b""
    files: bytes = b""
    lengths: bytes = b""
    same_as: list[tuple[Number, Number]] = []
    values: list[tuple[Number, Value]] = []
    extensions: dict[str, Raw] = {}
    fingerprints: Raw = Raw()
    norms: Raw = Raw()
    absmax: Raw = Raw()
    nonfinite: Raw = Raw()
    unequal: Raw = Raw()


class LeafTable(Sequence[LeafEntry]):
    """The leaves of an item; a sequence of `LeafEntry`.

    Attributes:
        names: Name of every leaf.
        forms: The distinct forms.
        form: Number of every leaf's form.
        firsts: Number of every leaf's first chunk; the last entry is the number of chunks.
        digests: Digest of every chunk, one after the other.
        offsets: Offset of every chunk; negative for a chunk on another disk.
        files: Number of every chunk's file; empty if all chunks are in the first one.
        lengths: Bytes of every encoded chunk; empty if there are no encoded chunks.
        same_as: Leaves that are the same array as an earlier leaf, with the number of that leaf.
        values: Leaves with a value.
        extensions: The columns of extensions, by name, as JSON; see `LeafColumns`.

    Example:
        ```python
        leaves = manifest.items["default"].leaves
        dtypes = {leaf.name: leaf.dtype for leaf in leaves}
        ```
    """

    __slots__ = (
        "_entries",
        "digests",
        "extensions",
        "files",
        "firsts",
        "form",
        "forms",
        "lengths",
        "names",
        "offsets",
        "same_as",
        "values",
    )

    def __init__(
        self,
        names: Sequence[str] = (),
        forms: Sequence[LeafForm] = (),
        form: Sequence[int] | Integers = _NONE,
        digests: bytes = b"",
        offsets: Integers = _NONE,
        files: Integers = _NONE,
        lengths: Integers = _NONE,
        same_as: Mapping[int, int] | None = None,
        values: Mapping[int, Value] | None = None,
        extensions: Mapping[str, Raw] | None = None,
    ) -> None:
        """Make a table of its columns.

        Raises:
            ValueError: The columns do not fit each other.
        """
        self.names: Sequence[str] = names
        self.forms: Sequence[LeafForm] = forms
        self.form: Integers = np.asarray(form, np.int64)
        self.digests: bytes = digests
        self.offsets: Integers = offsets
        self.files: Integers = files
        self.lengths: Integers = lengths
        self.same_as: Mapping[int, int] = same_as or {}
        self.values: Mapping[int, Value] = values or {}
        self.extensions: Mapping[str, Raw] = extensions or {}
        self._entries: list[LeafEntry] | None = None
        count = len(names)
        if len(self.form) != count or (count and not 0 <= self.form.max() < len(forms)):
            raise ValueError(f"{count} names and {len(self.form)} forms do not fit each other")
        if any(not 0 <= number < count for number in self.values):
            raise ValueError("a value is of a leaf that does not exist")
        for number, first in self.same_as.items():
            if not 0 <= first < number < count or first in self.same_as:
                raise ValueError(f"leaf {number} cannot be the same array as leaf {first}")
            # Compared by number: a form may be long, and many leaves may have it.
            if self.form[number] != self.form[first]:
                raise ValueError(f"leaf {number} is not like leaf {first}, which it is to be")
        # Checked before the arrays with an entry for every leaf are made.
        members = np.bincount(self.form, minlength=len(forms)).tolist()
        total = sum(form.count * times for form, times in zip(forms, members, strict=True))
        total -= sum(forms[int(self.form[number])].count for number in self.same_as)
        found = (len(digests) // DIGEST_BYTES, len(offsets), len(files), len(lengths))
        if (
            len(digests) != total * DIGEST_BYTES
            or len(offsets) != total
            or len(files) not in (0, total)
            or len(lengths) not in (0, total)
        ):
            raise ValueError(
                f"{total} chunks and {found[0]} digests, {found[1]} offsets, {found[2]} files, "
                f"{found[3]} lengths do not fit each other"
            )
        counts = np.array([form.count for form in forms] or [0], np.int64)[self.form]
        if self.same_as:
            counts[list(self.same_as)] = 0
        self.firsts: Integers = np.zeros(count + 1, np.int64)
        np.cumsum(counts, out=self.firsts[1:])

    @classmethod
    def of(cls, entries: Iterable[LeafEntry]) -> LeafTable:
        """Return the table of some leaves, without columns of extensions.

        Raises:
            ValueError: A leaf contradicts itself.

        Example:
            ```python
            leaves = manifest.items["default"].leaves
            assert ckpt.manifest.LeafTable.of(list(leaves)) == leaves
            ```
        """
        leaves = list(entries)
        numbers: dict[LeafForm, int] = {}
        form = [numbers.setdefault(leaf.form, len(numbers)) for leaf in leaves]
        own = [leaf for leaf in leaves if leaf.same_as is None]
        for leaf in own:
            count = len(leaf.digests)
            for column in (leaf.offsets, leaf.files, leaf.lengths):
                if len(column) not in (0, count):
                    raise ValueError(
                        f"{leaf.name}: {count} digests and {len(column)} offsets, files or lengths "
                        "do not fit each other"
                    )
        digests = [
            _UNKNOWN if digest in ("", UNCHECKED) else digest
            for leaf in own
            for digest in leaf.digests
        ]
        if not {len(each) for each in digests} <= {2 * DIGEST_BYTES}:
            raise ValueError("a digest has not 32 hex digits")
        offsets = [
            offset if digest else _ABSENT
            for leaf in own
            for digest, offset in zip(
                leaf.digests, leaf.offsets or [_ABSENT] * len(leaf.digests), strict=True
            )
        ]
        files = [file for leaf in own for file in leaf.files or [0] * len(leaf.digests)]
        lengths = [length for leaf in own for length in leaf.lengths or [0] * len(leaf.digests)]
        return cls(
            [leaf.name for leaf in leaves],
            list(numbers),
            form,
            bytes.fromhex("".join(digests)),
            np.array(offsets, np.int64),
            np.array(files if any(files) else (), np.int64),
            np.array(lengths if any(lengths) else (), np.int64),
            {n: leaf.same_as for n, leaf in enumerate(leaves) if leaf.same_as is not None},
            {n: leaf.value for n, leaf in enumerate(leaves) if leaf.value is not None},
        )

    @classmethod
    def read(cls, columns: LeafColumns) -> LeafTable:
        """Return the table that a file holds.

        Raises:
            ValueError: Its columns do not fit each other.

        Example:
            ```python
            leaves = manifest.items["default"].leaves
            assert ckpt.manifest.LeafTable.read(leaves.columns()) == leaves
            ```
        """
        form = np.frombuffer(columns.form, _NUMBER).astype(np.int64)
        for listed in (columns.same_as, columns.values):
            if len(dict(listed)) != len(listed):
                raise ValueError("a leaf is listed twice")
        return cls(
            columns.names,
            columns.forms,
            form if len(form) else np.zeros(len(columns.names), np.int64),
            columns.digests,
            np.frombuffer(columns.offsets, _OFFSET).astype(np.int64, copy=False),
            np.frombuffer(columns.files, _NUMBER).astype(np.int64),
            np.frombuffer(columns.lengths, _OFFSET).astype(np.int64, copy=False),
            dict(columns.same_as),
            dict(columns.values),
            # Copied, so that they do not keep the whole manifest in memory.
            {name: each.copy() for name, each in (columns.extensions or _earlier(columns)).items()},
        )

    def columns(self) -> LeafColumns:
        """Return the table as it is written.

        Example:
            ```python
            columns = manifest.items["default"].leaves.columns()
            assert len(columns.digests) == 2 * len(columns.offsets)
            ```
        """
        return LeafColumns(
            list(self.names),
            list(self.forms),
            self.form.astype(_NUMBER).tobytes() if self.form.any() else b"",
            self.digests,
            self.offsets.astype(_OFFSET).tobytes(),
            self.files.astype(_NUMBER).tobytes() if self.files.any() else b"",
            self.lengths.astype(_OFFSET).tobytes() if self.lengths.any() else b"",
            sorted(self.same_as.items()),
            sorted(self.values.items()),
            dict(self.extensions),
        )

    def replaced(
        self, *, digests: bytes | None = None, extensions: Mapping[str, Raw] | None = None
    ) -> LeafTable:
        """Return the same leaves with other digests, or with other columns of extensions.

        Example:
            ```python
            leaves = manifest.items["default"].leaves
            assert leaves.replaced(extensions={}) == ckpt.manifest.LeafTable.of(leaves)
            ```
        """
        table = copy(self)
        if digests is not None:
            table.digests, table._entries = digests, None
        if extensions is not None:
            table.extensions = extensions
        return table

    def unchecked(self) -> Integers:
        """Return the numbers of the chunks whose digests are unknown, counted over all leaves.

        Example:
            ```python
            assert not len(manifest.items["default"].leaves.unchecked())
            ```
        """
        halves = np.frombuffer(self.digests, np.uint64).reshape(-1, 2)
        return np.flatnonzero(~halves.any(axis=1) & (self.offsets >= 0))

    def bare(self, number: int) -> LeafEntry:
        """Return a leaf without its chunks; no other leaf is made.

        Example:
            ```python
            leaves = manifest.items["default"].leaves
            assert leaves.bare(0).name == leaves[0].name
            ```
        """
        form = self.forms[int(self.form[number])]
        name, value = self.names[number], self.values.get(number)
        return LeafEntry(name, form.kind, same_as=self.same_as.get(number), value=value)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafTable):
            return NotImplemented
        if self is other:
            return True
        return self.extensions == other.extensions and list(self) == list(other)

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LeafTable.of({list(self)!r})"

    @overload
    def __getitem__(self, index: int) -> LeafEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[LeafEntry]: ...
    def __getitem__(self, index: int | slice) -> LeafEntry | list[LeafEntry]:
        return self._all()[index]

    def __iter__(self) -> Iterator[LeafEntry]:
        return iter(self._all())

    def _all(self) -> list[LeafEntry]:
        """Return all leaves, which are made once."""
        if self._entries is None:
            text = self.digests.hex()
            size = 2 * DIGEST_BYTES
            hexadecimal = [text[start : start + size] for start in range(0, len(text), size)]
            for chunk in self.unchecked().tolist():
                hexadecimal[chunk] = UNCHECKED
            for chunk in np.flatnonzero(self.offsets < 0).tolist():
                hexadecimal[chunk] = ""
            # Tuples of plain values cost the garbage collector nothing.
            digests, offsets = tuple(hexadecimal), tuple(np.maximum(self.offsets, 0).tolist())
            files, lengths = tuple(self.files.tolist()), tuple(self.lengths.tolist())
            forms, same_as, values = self.forms, self.same_as, self.values
            ranges = list(pairwise(self.firsts.tolist()))
            entries: list[LeafEntry] = []
            for number, (name, at) in enumerate(zip(self.names, self.form.tolist(), strict=True)):
                form = forms[at]
                source = same_as.get(number)
                if source is not None:
                    # The leaf shares the lists: thousands of leaves may be one array of thousands
                    # of chunks.
                    entries.append(
                        replace(
                            entries[source],
                            name=name,
                            same_as=source,
                            value=values.get(number),
                        )
                    )
                    continue
                first, end = ranges[number]
                entries.append(
                    LeafEntry(
                        name,
                        form.kind,
                        form.dtype,
                        form.shape,
                        form.chunks,
                        digests[first:end],
                        offsets[first:end],
                        files[first:end],
                        form.codec,
                        lengths[first:end] if form.codec is not None else (),
                        form.packed,
                        form.sharding,
                        form.committed,
                        form.weak_type,
                        form.impl,
                        None,
                        values.get(number),
                    )
                )
            self._entries = entries
        return self._entries


def _earlier(columns: LeafColumns) -> dict[str, Raw]:
    """Return the columns of an extension that earlier writers had beside the others."""
    name, members = _EARLIER
    found = {each: getattr(columns, each) for each in members if getattr(columns, each)}
    return {name: Raw(msgspec.json.encode(found))} if found else {}
