"""Boxes: nodes around a single value, such as `flax.nnx.Param`, and leaf paths without them.

Imports no jax: tools that show a tree need no devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt._format.manifest import Node
from ckpt._tree.leaf_names import ROOT
from ckpt.errors import CorruptCheckpointError

_MAX_BOXES = 1000


def is_box(node: Node) -> bool:
    """Return True if a node is a class around a single value, such as a `flax.nnx.Param`.

    A target may have the value without the box, and vice versa.
    """
    return node.kind == "custom" and node.keys == ["value"] and len(node.children) == 1


def unboxed_names(nodes: Sequence[Node], names: Sequence[str]) -> Sequence[str]:
    """Return the names of leaves without the keys of boxes (see `is_box`).

    A tree has the same unboxed names with and without boxes. They are all different, since a box
    has no other child.

    Raises:
        CorruptCheckpointError: Two of them are equal, or the nodes are not a tree.
    """
    if not any(is_box(node) for node in nodes):
        return names
    found = list(_without_boxes(nodes, names))
    if len(set(found)) != len(found):
        raise CorruptCheckpointError("two leaves are stored at one place")
    return found


def _without_boxes(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[str]:
    # The leaves of a node are those of its children, in the order of their numbers.
    depths: dict[int, tuple[int, ...]] = {}
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    seen: set[int] = set()
    while stack:
        number, depth, boxes = stack.pop()
        node = nodes[number]
        if number in seen or len(boxes) > _MAX_BOXES:
            # A few nodes that contain each other twice would unfold into more than fits in memory.
            raise CorruptCheckpointError(f"node {number} does not belong where it is")
        seen.add(number)
        if is_box(node):
            boxes = (*boxes, depth)
        for child in node.children:
            if child >= 0:
                depths[child] = boxes
            elif -child < len(nodes) and -child > number:
                stack.append((-child, depth + 1, boxes))
    for number, name in enumerate(names):
        boxes = depths.get(number, ())
        if not boxes:
            yield name
            continue
        keys = name.split(".")
        kept = [key for place, key in enumerate(keys) if place not in boxes]
        yield ".".join(kept) if kept else ROOT
