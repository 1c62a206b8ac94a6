"""How single leaves are saved and restored."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax

NO_LAYOUTS = "support_layout=True: layouts are not restored; use jax.device_put afterwards"


@dataclasses.dataclass
class SaveArgs:
    """How a leaf is saved.

    Attributes:
        aggregate: Without effect: small arrays share files anyway.
        dtype: Dtype of the stored array.
        chunk_byte_size: Without effect: chunks are chosen by the size of shards.
        shard_axes: Without effect.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclasses.dataclass
class RestoreArgs:
    """How a leaf comes back.

    Attributes:
        restore_type: `jax.Array`, `numpy.ndarray`, `int`, `float` or `str`; None as it was saved.
        dtype: Dtype of the array; None as it was saved.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How an array of jax comes back.

    Attributes:
        mesh: A mesh, with `mesh_axes`, instead of `sharding`.
        mesh_axes: A `jax.sharding.PartitionSpec`.
        sharding: Place of the array; None as it was saved.
        global_shape: Shape of the array; None as it was saved.
        shape: The same, if there is no `global_shape`.
        strict: False pads the array with zeros, or cuts it, where the stored shape differs.
    """

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


@dataclasses.dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """As `ArrayRestoreArgs`. Each host reads what it needs.

    Attributes:
        single_replica_sharding: Without effect.
        replica_axis_index: Without effect.
        primary_replica_id: Without effect.
    """

    single_replica_sharding: Any = None
    replica_axis_index: int | None = 0
    primary_replica_id: int | None = 0


class TypeHandler:
    """Leaves of types of your own are not supported this way; a subclass cannot be registered."""


def register_type_handler(ty: Any, handler: Any, **_: Any) -> NoReturn:
    """Refuse a handler for a type of leaves.

    Raises:
        NotImplementedError: Always; the message says what to do.

    Example:
        ```python
        ocp.type_handlers.register_type_handler(MyType, MyHandler())  # raises
        ```
    """
    raise NotImplementedError(
        f"register_type_handler({getattr(ty, '__name__', ty)}, {type(handler).__name__}): handlers "
        "of types of leaves are not supported. Register the class with jax as a tree, or save with "
        "ckpt.CheckpointManager and ckpt.handlers.LeafType(cls, pack, unpack)"
    )
