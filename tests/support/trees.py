"""Trees and comparisons shared by the tests."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["P", "abstract", "assert_same", "bits", "mesh", "plain_id", "sharded"]


def mesh(rows: int = 2, columns: int = 4) -> Mesh:
    """A mesh ("data", "model") of the first devices."""
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("data", "model"))


def sharded(array: Any, *spec: Any, on: Mesh | None = None) -> jax.Array:
    """`array` on a mesh, partitioned by `spec`."""
    return jax.device_put(jnp.asarray(array), NamedSharding(on or mesh(), P(*spec)))


def abstract(tree: Any) -> Any:
    """The tree as a target: every jax array by its shape, dtype and sharding."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def bits(array: Any) -> bytes:
    """The bytes of an array, without leaving a host copy on a jax array."""
    if isinstance(array, jax.Array):
        out = np.empty(array.shape, array.dtype)
        for shard in array.addressable_shards:
            out[shard.index] = np.asarray(shard.data)
        return out.tobytes()
    return np.asarray(array).tobytes()


def structure(tree: Any) -> Any:
    """The structure of a tree; of what jax calls it, mypy does not know that it has `==`."""
    return jax.tree.structure(tree)


def assert_same(found: Any, wanted: Any, *, placed: bool = True) -> None:
    """Every leaf has the kind, dtype, shape, bits (and place) it had, in the same structure."""
    assert structure(found) == structure(wanted)
    found_leaves, wanted_leaves = jax.tree.leaves(found), jax.tree.leaves(wanted)
    for path, mine, theirs in zip(
        jax.tree_util.tree_flatten_with_path(wanted)[0], found_leaves, wanted_leaves, strict=True
    ):
        where = jax.tree_util.keystr(path[0])
        kinds: tuple[Any, ...] = (jax.Array, np.ndarray)
        kind: Any = next((k for k in kinds if isinstance(theirs, k)), type(theirs))
        assert isinstance(mine, kind), f"{where}: {type(mine)} for {type(theirs)}"
        if hasattr(theirs, "dtype"):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), where
            assert bits(mine) == bits(theirs), f"{where}: other bits"
        else:
            assert type(mine) is type(theirs), where
            assert repr(mine) == repr(theirs), where
        if placed and isinstance(theirs, jax.Array):
            assert mine.sharding.is_equivalent_to(theirs.sharding, theirs.ndim), where
            assert mine.committed == theirs.committed, where


def plain_id(value: object) -> str:
    """Return a text for the id of a test: the same in every process, without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
