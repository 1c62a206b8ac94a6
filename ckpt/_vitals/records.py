"""Records of vital signs: the four numbers of an array, or of a box of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._vitals.weights import CHANNELS

Array = np.ndarray[Any, Any]

# The signs of a box, or of an array. A norm of -1 means that they are unknown.
SIGNS = np.dtype(
    [("fingerprint", "<u4", (CHANNELS,)), ("nonfinite", "<u8"), ("norm", "<f8"), ("absmax", "<f8")]
)
UNKNOWN = -1.0
# Copy of a chunk in a process: leaf, number of the chunk, and fingerprint. If the devices of the
# process do not agree, there is one record for each fingerprint.
COPY = np.dtype(
    [("process", "<u4"), ("leaf", "<u4"), ("number", "<u4"), ("fingerprint", "<u4", (2,))]
)


class LeafSigns(Struct, frozen=True, gc=False):
    """Figures about the values of an array, the same however it is sharded and cut into chunks.

    Attributes:
        fingerprint: 16 hex digits. Two arrays of one shape and dtype have different fingerprints if
            they differ in a single bit, and the same one if they are equal.
        nonfinite: Number of values that are NaN or infinite.
        norm: Square root of the sum of the squares of the finite values.
        absmax: Largest absolute value of the finite values.

    Example:
        ```python
        extensions = [ckpt.extensions.VitalSigns()]
        info = await ckpt.save("runs/signed", {"w": jnp.ones(4)}, extensions=extensions)
        signs = (await ckpt.metadata(info.path)).tree["w"].vital_signs
        assert (signs.nonfinite, signs.norm) == (0, 2.0)
        ```
    """

    fingerprint: str
    nonfinite: int
    norm: float
    absmax: float


def no_signs(count: int) -> Array:
    """Return records of arrays whose signs are unknown."""
    found = np.zeros(count, SIGNS)
    found["norm"] = UNKNOWN
    return found


def are_known(records: Array) -> Array:
    """Return, for each record, whether it has signs; impossible numbers do not count."""
    norm, absmax = records["norm"], records["absmax"]
    known: Array = np.isfinite(norm) & (norm >= 0) & np.isfinite(absmax) & (absmax >= 0)
    return known


def signs_of(record: Array) -> LeafSigns | None:
    """Return the signs of one record; None if it has none."""
    if not are_known(record):
        return None
    (one, two), nonfinite, norm, absmax = record.tolist()
    return LeafSigns(f"{two:08x}{one:08x}", nonfinite, norm, absmax)


def record_of(signs: LeafSigns | None) -> Array:
    """Return the record of signs; the inverse of `signs_of`.

    Raises:
        ValueError: The fingerprint has not 16 hex digits.
    """
    if signs is None:
        return no_signs(1).reshape(())
    if len(signs.fingerprint) != 16:
        raise ValueError(f"a fingerprint has 16 hex digits, not {signs.fingerprint!r:.40}")
    words = int(signs.fingerprint[8:], 16), int(signs.fingerprint[:8], 16)
    return np.array((words, signs.nonfinite, signs.norm, signs.absmax), SIGNS)


def no_copies() -> Array:
    return np.zeros(0, COPY)


def records_of(signs: Sequence[LeafSigns | None]) -> Array:
    """Return the records of the signs of leaves."""
    return np.array([record_of(each) for each in signs], SIGNS)


def read(
    count: int,
    fingerprints: bytes,
    norms: bytes,
    absmax: bytes,
    nonfinite: Sequence[tuple[int, int]],
) -> Array:
    """Return the records of `count` leaves from their columns in a manifest.

    Raises:
        ValueError: The columns do not fit each other.
    """
    listed = dict(nonfinite)
    sizes = {8 * count, len(fingerprints), len(norms)}
    if sizes != {len(absmax)} or any(number >= count for number in listed):
        raise ValueError("the columns of the vital signs do not fit each other")
    if len(listed) != len(nonfinite):
        raise ValueError("a leaf with values that are not finite is listed twice")
    found = np.zeros(count, SIGNS)
    found["fingerprint"] = np.frombuffer(fingerprints, "<u4").reshape(-1, 2)
    found["norm"] = np.frombuffer(norms, "<f8")
    found["absmax"] = np.frombuffer(absmax, "<f8")
    found["nonfinite"][list(listed)] = list(listed.values())
    return found


def written(records: Array) -> tuple[bytes, bytes, bytes, list[tuple[int, int]]]:
    """Return the columns of records in a manifest; the inverse of `read`."""
    numbers = np.flatnonzero(records["nonfinite"])
    counts = records["nonfinite"][numbers].tolist()
    return (
        records["fingerprint"].tobytes(),
        records["norm"].tobytes(),
        records["absmax"].tobytes(),
        list(zip(numbers.tolist(), counts, strict=True)),
    )
