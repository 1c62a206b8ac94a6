"""A check of what was restored or verified against the vital signs in its step.

A check of restored arrays against the vital signs in their step. Digests prove the bytes in host
memory. This check proves the values on the devices, on every one of them, however the array was cut
when it was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct, field

from ckpt._engine.memory.staging import host_bytes, shards_of
from ckpt._format.array_format import parse_dtype
from ckpt._format.chunk_locations import ChunkLocation, region_of
from ckpt._format.leaf_table import LeafEntry, LeafTable, has_notes, signs_at
from ckpt._format.manifest import Manifest
from ckpt._format.regions import Region, addressable_regions, whole
from ckpt._plan.targets import ArrayRead
from ckpt._vitals.extension.device_pass import Kernels, can_be_passed, joined, key_of, signs_records
from ckpt._vitals.extension.merged_signs import first_names
from ckpt._vitals.fingerprint import BoxFingerprint
from ckpt._vitals.signs import SIGNS, Array, box_signs, join_signs, signs_of
from ckpt.errors import DeviceMismatchError, InvalidArgumentError

logger = logging.getLogger("ckpt")


def check_arrays(
    kernels: Kernels, leaves: LeafTable, reads: Sequence[ArrayRead], arrays: Sequence[Any]
) -> None:
    """Compare restored arrays with their fingerprints in a manifest.

    Arrays that cannot be compared are named in a warning: those that were cast, cut or put
    together, and those that other processes have parts of.

    Args:
        kernels: The kernels of the engine.
        leaves: The leaves of the item.
        reads: The reads of the restore.
        arrays: The restored array of each read.

    Raises:
        DeviceMismatchError: Arrays differ from the saved ones; names them, and devices.
        InvalidArgumentError: The step has no vital signs.
    """
    if any(read.value is None for read in reads) and not has_notes(leaves):
        raise InvalidArgumentError(
            "verify='device': the step has no vital signs to compare with; it has to be saved with "
            "extensions=[ckpt.extensions.VitalSigns()]"
        )
    wrong: list[str] = []
    left_out: list[str] = []
    for read, array in zip(reads, arrays, strict=True):
        if read.value is not None:
            # The value came from the manifest, which has a digest of its own.
            continue
        saved = None if read.leaf is None else signs_at(leaves, read.leaf)
        data = jax.random.key_data(array) if read.target.kind == "key" else array
        if saved is None or not _is_as_saved(read, data):
            left_out.append(read.path)
            continue
        problem = _problem(data, saved.fingerprint, kernels)
        if problem is not None:
            wrong.append(f"{read.path!r}: {problem}")
    if wrong:
        raise DeviceMismatchError(
            f"{len(wrong)} of {len(arrays)} restored arrays are not what was saved: "
            f"{first_names(wrong)}. verify() of the step tells whether the stored bytes are "
            "wrong; if they are not, a device or the way to it is",
        )
    if left_out:
        logger.warning(
            "verify='device': %d of %d arrays were not compared, since they were changed on their "
            "way, are spread over processes, or were saved without vital signs: %s",
            len(left_out),
            len(arrays),
            first_names(list(map(repr, left_out))),
        )


def _is_as_saved(read: ArrayRead, data: Any) -> bool:
    is_here = isinstance(data, np.ndarray | np.generic) or (
        isinstance(data, jax.Array) and (data.is_fully_addressable or data.is_fully_replicated)
    )
    return is_here and parse_dtype(read.stored) == read.target.dtype


def _problem(data: Any, fingerprint: str, kernels: Kernels) -> str | None:
    """Return the fault of an array that should have `fingerprint`, or None."""
    regions: list[tuple[Region, list[int]]] = [(whole(data.shape), [0])]
    if isinstance(data, jax.Array):
        regions = addressable_regions(data.sharding, data.shape)
    records = _records(data, regions, kernels)
    for _, positions in regions:
        prints = records["fingerprint"][positions]
        if (prints != prints[0]).any():
            devices = ", ".join(str(shards_of(data)[each].device) for each in positions)
            return f"{devices} should hold the same values and do not"
    firsts = records[[positions[0] for _, positions in regions]]
    (joint,) = join_signs(firsts, np.zeros(len(firsts), np.intp), 1)
    found = signs_of(joint)
    assert found is not None
    if found.fingerprint == fingerprint:
        return None
    return f"its fingerprint is {found.fingerprint}, and was {fingerprint}"


def _records(data: Any, regions: Sequence[tuple[Region, list[int]]], kernels: Kernels) -> Array:
    """Return the record of each device's part; for a numpy array, a single record."""
    if isinstance(data, jax.Array):
        shard = data.sharding.shard_shape(data.shape)
        if can_be_passed(data, shard, on_cpus=False):
            key = key_of(data.sharding, data.shape, data.dtype.name, shard)
            for each in kernels.missing([key]):
                kernels.compile(each)
            kernel = kernels.find(key)
            if kernel is not None:
                try:
                    found = signs_records(*map(np.asarray, kernel(joined(data, key))))
                    return found.reshape(-1)
                except Exception as error:
                    # For example a device whose memory is full. Its arrays can still be copied.
                    logger.warning("verify='device': an array is compared on the host (%s)", error)
    records = np.zeros(sum(len(positions) for _, positions in regions), SIGNS)
    for region, positions in regions:
        for position in positions:
            part = shards_of(data)[position].data if isinstance(data, jax.Array) else data
            dtype = np.dtype(part.dtype)
            records[position] = box_signs(host_bytes(part), region.offset, region.shape, dtype, len)
    return records


class _LeafSums(Struct):
    chunks: int = 0
    one: int = 0
    two: int = 0


class ReadFingerprints(Struct):
    """The sums of the chunks that were read and have the right digests, by item and leaf."""

    _leaves: dict[tuple[str, int], _LeafSums] = field(default_factory=dict)

    def of_chunk(self, leaf: LeafEntry, place: ChunkLocation) -> BoxFingerprint | None:
        """Return an object that fingerprints a chunk; None if its leaf has no fingerprint."""
        if leaf.vital_signs is None:
            return None
        region = region_of(leaf, place.number)
        return BoxFingerprint(region.offset, region.shape, parse_dtype(leaf.dtype).itemsize)

    def add(self, item: str, chunks: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """Add the sums of the chunks of one file of an item, with the numbers of their leaves."""
        for leaf, (one, two) in chunks:
            found = self._leaves.setdefault((item, leaf), _LeafSums())
            found.chunks += 1
            found.one += one
            found.two += two

    def problems(self, manifest: Manifest) -> Iterator[tuple[str, str, str]]:
        """Yield item, leaf and fault of leaves with right bytes and a wrong fingerprint."""
        for (item, number), sums in self._leaves.items():
            leaf = manifest.items[item].leaves[number]
            # Unread or damaged leaves are reported elsewhere.
            if leaf.vital_signs is None or sums.chunks < len(leaf.digests):
                continue
            found = f"{sums.two & 0xFFFFFFFF:08x}{sums.one & 0xFFFFFFFF:08x}"
            if found != leaf.vital_signs.fingerprint:
                message = (
                    f"its fingerprint is {leaf.vital_signs.fingerprint} there, and that of its "
                    f"bytes is {found}; its digests are right, so its vital signs are wrong"
                )
                yield item, leaf.name, message
