"""One process of a job that loads its rows of safetensors: `load_tensors.py FILE ROWS COLUMNS`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt.sync
from ckpt.storage._local.storage import LocalStorage
from tests.support.real_jobs import tell

path, shape = sys.argv[1], (int(sys.argv[2]), int(sys.argv[3]))
read: list[int] = []
plain = LocalStorage.read_block


async def counted(
    self: Any, step_dir: str, path: str, offset: int, target: Any, *more: Any
) -> None:
    read.append(len(target))
    await plain(self, step_dir, path, offset, target, *more)


setattr(LocalStorage, "read_block", counted)  # noqa: B010
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
target: Any = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=rows)}
found = ckpt.sync.load(path, like=target)["w"]
expected = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
same = all(np.array_equal(each.data, expected[each.index]) for each in found.addressable_shards)
tell({"read": sum(read), "same": same})
