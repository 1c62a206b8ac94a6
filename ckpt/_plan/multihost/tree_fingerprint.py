"""What a process tells the primary of its tree, so that trees that differ are found. Pure.

An outline has one line for every leaf, and that of a tree a last one for what holds them. Equal
outlines have equal signatures, and of those that differ the first line that does is told. Where the
outlines of all processes would be too much for one of them, they hold digests of blocks of lines
instead, and a block is told.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ckpt._format.digests import digest
from ckpt._format.manifest import Node
from ckpt._format.shardings import describe_sharding
from ckpt._plan.save_plan import SavePlan
from ckpt._tree.leaf_specs import (
    ARRAY_KINDS,
    CALLABLE,
    SCALAR_KINDS,
    LeafSpec,
    encode_scalar,
)
from ckpt._tree.table import sharding_text
from ckpt.errors import CheckpointError

__all__ = ["TreeFingerprint", "first_difference", "outline_of", "tree_outline", "value_outline"]

# Of the outlines of all processes together; what is larger is cut to digests.
_OUTLINES_BYTES = 64 << 20
_LINE_BYTES = 24
_LONGEST_VALUE = 80


# Stands for the inner nodes where a line has the name of a leaf.
_STRUCTURE = ""

# The name of a leaf, and what there is to say of it.
Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TreeFingerprint:
    """Lines about a tree, as few bytes.

    Attributes:
        signature: Digest of all lines, 16 bytes.
        block: How many lines a digest in `packed` is of; 0 where the lines themselves are there.
        packed: The lines or digests.
    """

    signature: bytes
    block: int
    packed: bytes


def outline_of(lines: Sequence[Line], processes: int) -> TreeFingerprint:
    """Return the outline of lines, of so many processes each one."""
    text = json.dumps(lines).encode()
    room = _OUTLINES_BYTES // processes
    block = 0
    if len(text) > room:
        block = -(-len(lines) // max(room // _LINE_BYTES, 1))
        lines = [
            ("", digest(json.dumps(lines[start : start + block]).encode())[:16])
            for start in range(0, len(lines), block)
        ]
    packed = zlib.compress(json.dumps(lines).encode(), 1)
    return TreeFingerprint(bytes.fromhex(digest(text)), block, packed)


def tree_outline(plan: SavePlan, nodes: Sequence[Node]) -> TreeFingerprint:
    """Return what must be the same on all processes but for values: structure and leaves."""
    assert plan.team is not None
    known: dict[int, str] = {}
    shape = digest("".join(node.model_dump_json() for node in nodes).encode())
    index = plan.team.index
    lines = [(leaf.name, _what(leaf.spec, index, known)) for leaf in plan.leaves]
    # The last line: trees of different leaves have different nodes, and it is the leaves that help.
    lines.append((_STRUCTURE, f"{len(nodes)} inner nodes #{shape[:8]}"))
    return outline_of(lines, plan.team.count)


def _what(spec: LeafSpec, process: int, known: dict[int, str]) -> str:
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
            # Every process has others.
            found = "on its own devices"
        else:
            entry = describe_sharding(sharding)
            marks = digest(entry.model_dump_json().encode())[:8]
            found = f"{sharding_text(entry)} #{marks}"
        known[id(sharding)] = found
    return found


def value_outline(
    plan: SavePlan, leaves: Sequence[Any], digests: Mapping[int, str]
) -> TreeFingerprint:
    """Return the values of the leaves of which every process has its own.

    Args:
        plan: The plan.
        leaves: Python scalars and functions at their places; arrays are not looked at.
        digests: Of every array among `plan.own` the digest of its bytes, by number of the leaf.
    """
    assert plan.team is not None
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
    return outline_of(lines, plan.team.count)


def first_difference(one: TreeFingerprint, other: TreeFingerprint) -> tuple[str, str, str]:
    """Return the first leaf of two different outlines that differs, and what either says of it.

    Raises:
        CheckpointError: An outline is none.
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
    # A leaf that only one has shifts all that come after it.
    both = dict(mine), dict(theirs)
    lone = next((name for name in names if not all(name in lines for lines in both)), None)
    if lone is None:
        return f"leaf number {place}", f"{names[0]!r:.200}", f"{names[-1]!r:.200}"
    return f"leaf {lone!r:.400}", both[0].get(lone, "missing"), both[1].get(lone, "missing")


def _lines(outline: TreeFingerprint) -> list[Line]:
    try:
        data = zlib.decompressobj().decompress(outline.packed, _OUTLINES_BYTES)
        lines = [(name, text) for name, text in json.loads(data)]
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the outline of a tree cannot be read: {error!s:.100}") from error
    if not all(isinstance(text, str) for line in lines for text in line):
        raise CheckpointError("the outline of a tree has something else than text in it")
    return lines
