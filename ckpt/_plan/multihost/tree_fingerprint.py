"""Tree fingerprints: compact descriptions of trees, by which the primary finds differences. Pure.

A fingerprint has one line for every leaf; the fingerprint of a tree has a last line for its inner
nodes. Equal fingerprints have equal signatures, and if two differ, the first different line is
reported. If the lines of all processes would be too many for the primary, fingerprints hold digests
of blocks of lines instead, and the block is reported.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
from msgspec import Struct

from ckpt._format.digests import digest
from ckpt._format.manifest import Node
from ckpt._format.shardings import describe_sharding
from ckpt._plan.save_plan import SavePlan
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, SCALAR_KINDS
from ckpt._tree.leaf_specs import LeafSpec, encode_scalar
from ckpt._tree.table import sharding_text
from ckpt.errors import CheckpointError

# Most bytes of all processes' fingerprints; larger ones are reduced to digests.
_MOST_BYTES = 64 << 20
_LINE_BYTES = 24
_LONGEST_VALUE = 80
# Stands for the inner nodes in the place of a leaf's name.
_STRUCTURE = ""

# The name of a leaf, and its description.
Line = tuple[str, str]


class TreeFingerprint(Struct, frozen=True):
    """Lines about a tree in few bytes.

    Attributes:
        signature: Digest of all lines, 16 bytes.
        block: Number of lines per digest in `packed`; 0 if `packed` holds the lines.
        packed: The lines or digests.
    """

    signature: bytes
    block: int
    packed: bytes


def line_fingerprint(lines: Sequence[Line], processes: int) -> TreeFingerprint:
    """Return the fingerprint of lines; `processes` fingerprints are compared."""
    text = json.dumps(lines).encode()
    room = _MOST_BYTES // processes
    block = 0
    if len(text) > room:
        block = -(-len(lines) // max(room // _LINE_BYTES, 1))
        lines = [
            ("", digest(json.dumps(lines[start : start + block]).encode())[:16])
            for start in range(0, len(lines), block)
        ]
    packed = zlib.compress(json.dumps(lines).encode(), 1)
    return TreeFingerprint(bytes.fromhex(digest(text)), block, packed)


def tree_fingerprint(plan: SavePlan, nodes: Sequence[Node]) -> TreeFingerprint:
    """Return the fingerprint of a tree's structure and leaves, without their values."""
    assert plan.group is not None
    known: dict[int, str] = {}
    shape = digest(b"".join(map(msgspec.json.encode, nodes)))
    index = plan.group.index
    lines = [(leaf.name, _described(leaf.spec, index, known)) for leaf in plan.leaves]
    # The last line, since trees with different leaves have different nodes, too, and the leaves are
    # the more helpful difference.
    lines.append((_STRUCTURE, f"{len(nodes)} inner nodes #{shape[:8]}"))
    return line_fingerprint(lines, plan.group.count)


def _described(spec: LeafSpec, process: int, known: dict[int, str]) -> str:
    if spec.dtype is None or spec.kind in SCALAR_KINDS:
        return spec.kind
    words = [spec.kind, f"{spec.dtype}{list(spec.shape)}"]
    if spec.sharding is not None:
        words.append(_sharding(spec.sharding, process, known))
    more = {
        "impl": spec.impl,
        "the same as leaf": spec.same_as,
        "cast from": spec.cast_from,
        "stored as": spec.format,
    }
    words.extend(f"{name} {value}" for name, value in more.items() if value is not None)
    words.extend(["weakly typed"] * spec.weak_type + ["uncommitted"] * (not spec.committed))
    return ", ".join(words)


def _sharding(sharding: jax.sharding.Sharding, process: int, known: dict[int, str]) -> str:
    found = known.get(id(sharding))
    if found is None:
        devices: set[jax.Device] = sharding.device_set
        if all(device.process_index == process for device in devices):
            # These devices differ between processes.
            found = "on its own devices"
        else:
            entry = describe_sharding(sharding)
            marks = digest(msgspec.json.encode(entry))[:8]
            found = f"{sharding_text(entry)} #{marks}"
        known[id(sharding)] = found
    return found


def value_fingerprint(
    plan: SavePlan, leaves: Sequence[Any], digests: Mapping[int, str]
) -> TreeFingerprint:
    """Return the fingerprint of the values of the leaves that every process has for itself.

    Args:
        plan: The plan.
        leaves: Python scalars and functions at their places; places of arrays are ignored.
        digests: Digest of the bytes of every array among `plan.own`, by number of the leaf.
    """
    assert plan.group is not None
    lines = []
    for number in plan.own:
        leaf = plan.leaves[number]
        kind = leaf.spec.kind
        if kind in ARRAY_KINDS:
            text = f"an array #{digests[number]}"
        elif kind == CALLABLE:
            text = "a function"
        else:
            text = f"{kind} {encode_scalar(kind, leaves[number])}"
            if len(text) > _LONGEST_VALUE:
                text = f"{text[: _LONGEST_VALUE - 35]}... #{digest(text.encode())[:32]}"
        lines.append((leaf.name, text))
    return line_fingerprint(lines, plan.group.count)


def first_difference(one: TreeFingerprint, other: TreeFingerprint) -> tuple[str, str, str]:
    """Return the first leaf in which two different fingerprints differ, and each description of it.

    Raises:
        CheckpointError: A fingerprint is malformed.
    """
    mine, theirs = _lines(one), _lines(other)
    place = next(
        (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if len(set(pair)) > 1), None
    )
    if place is None:
        place = min(len(mine), len(theirs))
    if one.block or other.block or place == len(mine) == len(theirs):
        start = place * max(one.block, other.block)
        what = f"one of the leaves from number {start} on, or what holds them,"
        return what, "something", "something else"
    found = [lines[place] for lines in (mine, theirs) if place < len(lines)]
    names = [name for name, _ in found]
    if len(names) == 2 and names[0] == names[1]:
        what = "its structure" if names[0] == _STRUCTURE else f"leaf {names[0]!r:.400}"
        return what, found[0][1], found[1][1]
    # A leaf that only one has shifts all leaves after it.
    both = dict(mine), dict(theirs)
    lone = next((name for name in names if not all(name in lines for lines in both)), None)
    if lone is None:
        return f"leaf number {place}", f"{names[0]!r:.200}", f"{names[-1]!r:.200}"
    return f"leaf {lone!r:.400}", both[0].get(lone, "missing"), both[1].get(lone, "missing")


def _lines(fingerprint: TreeFingerprint) -> list[Line]:
    try:
        data = zlib.decompressobj().decompress(fingerprint.packed, _MOST_BYTES)
        lines = [(name, text) for name, text in json.loads(data)]
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the fingerprint of a tree cannot be read: {error!s:.100}"
        ) from error
    if not all(isinstance(text, str) for line in lines for text in line):
        raise CheckpointError("the fingerprint of a tree holds something other than text")
    return lines
