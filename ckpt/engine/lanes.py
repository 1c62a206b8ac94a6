"""Write lanes: parallel OCDBT databases, merged by reference into the item's own.

One OCDBT database has a single flush stream, so one stream of writes cannot keep a disk busy. Every
lane is a database of its own; merging copies references to the lanes' data files, not the data. An
item with a single granule needs one lane, and that lane is the item's database itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import numpy as np
import tensorstore as ts

from ckpt.engine.tensors import as_stored, open_array, open_database, settle, translated
from ckpt.layout.chunks import chunk_key
from ckpt.layout.leaves import ARRAY_KINDS, scalar_array
from ckpt.layout.plan import Chunk, Granule, LeafPlan
from ckpt.manifest import digest

__all__ = ["ChunkDigests", "Lane", "merge_lanes"]

Array = np.ndarray[Any, Any]
ChunkDigests = dict[tuple[int, tuple[int, ...]], str]


@dataclass(slots=True)
class _Pending:
    """Started writes of one granule. All of its futures are owned here until they are done."""

    commit: Any
    writes: list[Any]
    digests: ChunkDigests


@dataclass(slots=True)
class Lane:
    """One write stream.

    Attributes:
        number: Number of the lane within its item.
        path: Its directory, relative to the attempt.
        url: The same as TensorStore writes it.
        context: TensorStore context shared by the lanes of one save.
        database: The opened database, once something was written.
    """

    number: int
    path: str
    url: str
    context: ts.Context
    database: ts.KvStore | None = field(default=None)

    async def write(
        self, granule: Granule, plans: Sequence[LeafPlan], arrays: Sequence[Array]
    ) -> ChunkDigests:
        """Write one granule in one transaction; durable on return.

        The memory of `arrays` is read until this returns, also when it raises or is cancelled: no
        input or output of this granule is under way afterwards.

        Raises:
            StorageError: The store refused; names the leaf, or the first of several.
        """
        pending = await anyio.to_thread.run_sync(partial(self._begin, granule, plans, arrays))
        names = list(dict.fromkeys(plans[chunk.leaf].name for chunk in granule.chunks))
        more = f" (or one of {len(names) - 1} others)" if len(names) > 1 else ""
        await _finish(pending, f"write it{more}", names[0])
        return pending.digests

    async def write_values(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Write small key-value pairs in one transaction; durable on return."""
        pending = await anyio.to_thread.run_sync(partial(self._begin_values, values))
        await _finish(pending, "write array metadata")

    def _open(self) -> ts.KvStore:
        if self.database is None:
            with translated("open a database", reading=False):
                self.database = open_database(self.url, self.context)
        return self.database

    def _begin(
        self, granule: Granule, plans: Sequence[LeafPlan], arrays: Sequence[Array]
    ) -> _Pending:
        # Before anything is started: what follows a start must not fail and lose sight of it.
        digests = {
            (chunk.leaf, chunk.place): array_digest(array)
            for chunk, array in zip(granule.chunks, arrays, strict=True)
        }
        if granule.packed:
            # One at a time, since each value is a copy until TensorStore has made its own.
            pending = self._begin_values(
                value
                for chunk, array in zip(granule.chunks, arrays, strict=True)
                for value in _packed_values(plans[chunk.leaf], array.tobytes())
            )
        else:
            pending = self._begin_arrays(granule.chunks, plans, arrays)
        pending.digests.update(digests)
        return pending

    def _begin_values(self, values: Iterable[tuple[str, bytes]]) -> _Pending:
        transaction = ts.Transaction()
        view = self._open().with_transaction(transaction)
        writes: list[Any] = [view.write(key, value) for key, value in values]
        return _Pending(transaction.commit_async(), writes, {})

    def _begin_arrays(
        self, chunks: Sequence[Chunk], plans: Sequence[LeafPlan], arrays: Sequence[Array]
    ) -> _Pending:
        transaction = ts.Transaction()
        writes: list[Any] = []
        try:
            self._add_writes(transaction, writes, chunks, plans, arrays)
        except BaseException:
            # What was added so far refers to staged memory; it has to end before that is reused.
            transaction.abort()
            for write in writes:
                with contextlib.suppress(Exception):
                    write.result()
            raise
        return _Pending(transaction.commit_async(), writes, {})

    def _add_writes(
        self,
        transaction: ts.Transaction,
        writes: list[Any],
        chunks: Sequence[Chunk],
        plans: Sequence[LeafPlan],
        arrays: Sequence[Array],
    ) -> None:
        database = self._open()
        view = database.with_transaction(transaction)
        opened: dict[int, ts.TensorStore] = {}
        for chunk, array in zip(chunks, arrays, strict=True):
            plan = plans[chunk.leaf]
            if chunk.leaf not in opened:
                dtype = plan.spec.dtype or ""
                with translated("open an array", reading=False, leaf=plan.name):
                    opened[chunk.leaf] = open_array(
                        database,
                        self.context,
                        plan.name,
                        plan.spec.shape,
                        plan.chunk,
                        dtype,
                        transaction,
                    )
            if not any(chunk.place) and plan.metadata is not None:
                writes.append(view.write(f"{plan.name}/zarr.json", plan.metadata))
            # Referenced, not copied: the array's memory is ours until the commit has ended.
            writes.append(
                opened[chunk.leaf][chunk.region.slices].write(
                    as_stored(array), can_reference_source_data_indefinitely=True
                )
            )


async def merge_lanes(url: str, context: ts.Context, lanes: Sequence[Lane]) -> None:
    """Make the database at `url` of references to the lanes' data; durable on return.

    Nothing else may be in the transaction: TensorStore 0.1.86 silently empties the copied values
    where a write precedes a copy. The lanes must share one context.

    Raises:
        StorageError: The store refused.
    """

    def begin() -> _Pending:
        with translated("open a database", reading=False):
            transaction = ts.Transaction()
            view = open_database(url, context).with_transaction(transaction)
            copies = [
                lane.database.experimental_copy_range_to(view)
                for lane in lanes
                if lane.database is not None
            ]
            # A copy adds its references when its own future is done; only then may we commit.
            for copy in copies:
                copy.result()
        return _Pending(transaction.commit_async(), [], {})

    await _finish(await anyio.to_thread.run_sync(begin), "merge the lanes")


def unstaged_values(plans: Sequence[LeafPlan], leaves: Sequence[Any]) -> list[tuple[str, bytes]]:
    """Return the entries of leaves that no granule holds: scalars and arrays without elements."""
    values = []
    for plan, leaf in zip(plans, leaves, strict=True):
        if plan.metadata is None:
            continue
        if plan.spec.kind not in ARRAY_KINDS:
            array = scalar_array(plan.spec.kind, leaf)
            if array is not None:
                values.extend(_packed_values(plan, array.tobytes()))
        elif 0 in plan.spec.shape:
            values.append((f"{plan.name}/zarr.json", plan.metadata))
    return values


def array_digest(array: Array) -> str:
    """Return the digest of an array's logical bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return digest(flat.view(np.uint8).data)


def _packed_values(plan: LeafPlan, data: bytes) -> list[tuple[str, bytes]]:
    place = (0,) * len(plan.spec.shape)
    assert plan.metadata is not None
    return [
        (f"{plan.name}/zarr.json", plan.metadata),
        (f"{plan.name}/{chunk_key(place)}", data),
    ]


async def _finish(pending: _Pending, what: str, leaf: str | None = None) -> None:
    await settle(pending.commit)
    for write in pending.writes:
        await settle(write)
    with translated(what, reading=False, leaf=leaf):
        pending.commit.result()
        for write in pending.writes:
            write.result()
