"""Trees of JAX arrays: what a restore is aimed at, and whether it gave back every bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

PyTree = Any


class JaxTrees:
    """The part of a peer that takes JAX arrays as they are."""

    def adopt(self, tree: PyTree) -> PyTree:
        return tree

    def target(self, tree: PyTree) -> PyTree:
        return abstract(tree)

    def as_jax(self, restored: PyTree, like: PyTree) -> PyTree:
        return restored


def abstract(tree: PyTree) -> PyTree:
    """Returns the restore target of a tree: shape, dtype and sharding of each leaf."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def size_bytes(tree: PyTree) -> int:
    """Returns the bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def check_equal(restored: PyTree, expected: PyTree) -> None:
    """Compares two trees bit by bit.

    Raises:
        TypeError: A leaf is not a JAX array.
        ValueError: A peer gave back something else; its times would mean nothing.
    """
    wants = jax.tree.leaves_with_path(expected)
    gots = jax.tree.leaves(restored)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (restored, expected)]
    if structures[0] != structures[1]:
        raise ValueError("the restored tree has another structure")
    for (path, want), got in zip(wants, gots, strict=True):
        place = jax.tree_util.keystr(path)
        if not isinstance(got, jax.Array):
            raise TypeError(f"{place} was restored as {type(got).__name__}, not as a jax.Array")
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{place} was restored as {got.dtype}{list(got.shape)}")
        if not got.sharding.is_equivalent_to(want.sharding, want.ndim):
            raise ValueError(f"{place} was restored onto {got.sharding}")
        if np.asarray(got).tobytes() != np.asarray(want).tobytes():
            raise ValueError(f"{place} was restored with other values")
