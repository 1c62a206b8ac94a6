"""The pass over a state: its fingerprints are those of vital signs, on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._proof.state_pass import StatePass
from ckpt._vitals.signs import box_signs

SHAPES = [(), (16,), (8, 16), (4, 8, 12), (5, 7), (0, 3)]
DTYPES = ["float32", "bfloat16", "int8", "uint16", "bool", "float8_e4m3fn", "complex64", "int4"]
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("d", "m"))
PART = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("d", "m"))
SHARDINGS: dict[str, Any] = {
    "one": SingleDeviceSharding(jax.devices()[1]),
    "rows": NamedSharding(MESH, PartitionSpec("d")),
    "rows over all": NamedSharding(MESH, PartitionSpec(("d", "m"))),
    "columns of some": NamedSharding(PART, PartitionSpec(None, "d")),
    "both": NamedSharding(MESH, PartitionSpec("m", "d")),
    "replicas": NamedSharding(MESH, PartitionSpec()),
}


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(shape))
    return np.asarray(rng.integers(-7 if dtype[0] != "u" else 0, 7, shape)).astype(jnp.dtype(dtype))


def fits(shape: tuple[int, ...], sharding: Any) -> bool:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return False
    return len(getattr(sharding, "spec", ())) <= len(shape) and 0 not in shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_and_norms_are_those_of_the_values(dtype: str) -> None:
    host = {str(shape): values(dtype, shape) for shape in SHAPES}
    tree = {
        shape: {
            "numpy": array,
            **{
                name: jax.device_put(array, sharding)
                for name, sharding in SHARDINGS.items()
                if fits(array.shape, sharding)
            },
        }
        for shape, array in host.items()
    }
    mark, unequal = StatePass().begin(1, tree).finish()
    assert not unequal
    for (path, leaf), found in zip(
        jax.tree_util.tree_flatten_with_path(tree)[0], mark.leaves, strict=True
    ):
        array = host[path[0].key]
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        expected = box_signs(data, (0,) * array.ndim, array.shape, array.dtype, len)
        assert (found["fingerprint"] == expected["fingerprint"]).all(), (path, leaf.sharding)
        if jnp.issubdtype(array.dtype, jnp.floating):
            np.testing.assert_allclose(found["norm"], expected["norm"], rtol=1e-5)
    assert len(mark.leaves) >= 6
