"""What it means that a tree comes back: the one check that all of these tests are made of."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.trees import structure

__all__ = ["abstract", "by_jax", "comes_back", "comes_back_with_a_target", "told", "told_at_load"]


def abstract(tree: Any) -> Any:
    """The tree with shapes for its jax arrays: nothing of their values is left."""

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)

    return jax.tree.map(shape_of, tree)


def by_jax(tree: Any) -> Any:
    """The tree as jax makes it again, with the keys of dicts sorted."""
    return jax.tree.map(lambda leaf: leaf, tree)


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The warnings that the library logs meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("ckpt")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def told_at_load(path: Path, **options: Any) -> tuple[Any, list[str]]:
    """What is loaded without a target, and the warnings."""
    with told() as messages:
        found = ckpt.sync.load(path, **options)
    return found, messages


def comes_back(path: Path, tree: Any) -> Any:
    """Save it and load it, with and without a target; everything is as it was, and quietly."""
    with told() as messages:
        ckpt.sync.save(path, tree)
        found = ckpt.sync.load(path)
        assert structure(found) == structure(tree)
        assert differences(tree, found) == []
        comes_back_with_a_target(path, tree)
    assert messages == []
    return found


def comes_back_with_a_target(path: Path, tree: Any) -> None:
    """Load what is saved onto the tree itself, and onto one of which only the shapes are left."""
    for like in (tree, abstract(tree)):
        found = ckpt.sync.load(path, like=like)
        assert structure(found) == structure(tree)
        assert differences(by_jax(tree), found) == []
