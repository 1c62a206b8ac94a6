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
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import Manifest
from ckpt._format.regions import Region, addressable_regions, whole
from ckpt._plan.targets import ArrayRead
from ckpt._vitals.extension.device_pass import Kernels, can_be_passed, joined, key_of, signs_records
from ckpt._vitals.fingerprint import BoxFingerprint
from ckpt._vitals.signs import SIGNS, Array, box_signs, join_signs, signs_of
from ckpt._vitals.stored_signs import NAME, first_names, notes_of_step, signs_in
from ckpt.errors import CorruptCheckpointError, DeviceMismatchError, InvalidArgumentError
from ckpt.keep._questions import notes_in

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
    stored = signs_in(leaves)
    if any(read.value is None for read in reads) and NAME not in leaves.extensions:
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
        saved = None if read.leaf is None else stored.of(read.leaf)
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
            kernels.compile(key)
            kernel = kernels.find(key)
            if kernel is not None:
                try:
                    return signs_records(*map(np.asarray, kernel(joined(data, key)))).reshape(-1)
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


class ReadFingerprints(Struct):
    """The sums of the chunks that were read and have the right digests, by item and leaf."""

    # Number of the chunks of each leaf, and their sums in both channels.
    _leaves: dict[tuple[str, int], tuple[int, int, int]] = field(default_factory=dict)

    def of_chunk(self, leaf: LeafEntry, place: ChunkLocation) -> BoxFingerprint:
        """Return an object that fingerprints a chunk."""
        region = region_of(leaf, place.number)
        return BoxFingerprint(region.offset, region.shape, parse_dtype(leaf.dtype).itemsize)

    def add(self, item: str, chunks: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """Add the sums of the chunks of one file of an item, with the numbers of their leaves."""
        for leaf, (one, two) in chunks:
            known = self._leaves.get((item, leaf), (0, 0, 0))
            self._leaves[item, leaf] = known[0] + 1, known[1] + one, known[2] + two

    def problems(self, manifest: Manifest) -> Iterator[tuple[str | None, str | None, str]]:
        """Yield item, leaf and fault of leaves with right bytes and a wrong fingerprint."""
        try:
            stored = {name: signs_in(item.leaves) for name, item in manifest.items.items()}
        except CorruptCheckpointError:
            # Reported with the leaves that contradict themselves.
            return
        told, counted = notes_in(manifest), notes_of_step(manifest)
        # Earlier writers did not count leaves while the signs of others were unknown.
        if (
            told.nonfinite_leaves not in (None, counted.nonfinite_leaves)
            or told.unequal_leaves != counted.unequal_leaves
        ):
            yield (
                None,
                None,
                "its head counts other unhealthy leaves than it has",
            )
        for (item, number), (chunks, one, two) in self._leaves.items():
            leaf, signs = manifest.items[item].leaves[number], stored[item].of(number)
            # Unread or damaged leaves are reported elsewhere.
            if signs is None or chunks < len(leaf.digests):
                continue
            found = f"{two & 0xFFFFFFFF:08x}{one & 0xFFFFFFFF:08x}"
            if found != signs.fingerprint:
                message = (
                    f"its fingerprint is {signs.fingerprint} there, and that of its "
                    f"bytes is {found}; its digests are right, so its vital signs are wrong"
                )
                yield item, leaf.name, message
