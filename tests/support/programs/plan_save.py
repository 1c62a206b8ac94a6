"""A process of a job that plans the save of real arrays over all of its devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt._job.division import Division, ProcessGroup
from ckpt._job.process_reports import tree_fingerprint
from ckpt._plan.save_plan import plan_save
from ckpt._tree.leaf_specs import Classifier
from ckpt.errors import UnsupportedLeafError
from tests.support.real_jobs import tell

MESH = Mesh(np.array(jax.devices())[::-1].reshape(2, -1), ("x", "y"))


def spread(shape: tuple[int, ...], *spec: Any) -> jax.Array:
    values = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index])


leaves = [
    spread((400, 400), "x"),
    spread((400, 400), None, "y"),
    spread((400, 401)),
    spread((8,), "x"),
    spread((5,)),
    jax.random.wrap_key_data(spread((2,))),
    jnp.ones(3),
    np.zeros(4),
    7,
]
names = [f"leaf{number}" for number in range(len(leaves))]
refusals = []
for name, leaf in zip(names, leaves, strict=True):
    try:
        Classifier().classify(leaf, name)
    except UnsupportedLeafError as error:
        refusals.append(str(error))
classifier = Classifier(spanning=True)
specs = [classifier.classify(*pair) for pair in zip(leaves, names, strict=True)]
group = ProcessGroup(jax.process_index(), jax.process_count())
plan = plan_save(names, specs, 1 << 30, Division(group))
wrong = []
for chunk in [chunk for batch in plan.batches for chunk in batch.chunks]:
    for part in chunk.parts:
        if specs[chunk.leaf].kind != "jax":
            continue
        shard = leaves[chunk.leaf].addressable_shards[part.shard]
        found = np.asarray(shard.data)[part.source.slices]
        shape = specs[chunk.leaf].shape
        whole = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        wrong += [] if np.array_equal(found, whole[chunk.region.slices]) else [str(chunk)]
tell(
    {
        "chunks": [[c.leaf, c.number] for batch in plan.batches for c in batch.chunks],
        "count": sum(int(np.prod(leaf.grid)) for leaf in plan.leaves),
        "own": plan.own,
        "outline": tree_fingerprint(plan, []).signature.hex(),
        "refusals": refusals,
        "wrong": wrong,
    }
)
