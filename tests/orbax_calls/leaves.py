"""Contracts of trees: which leaves and containers come back, and as what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.orbax_calls.contracts import contract, differs, tried
from tests.orbax_calls.managers import blocking, state

SAVED = "Trees without leaves, arrays without elements, and texts in `StandardSave` are saved"


class Pair(NamedTuple):
    """A node of a tree."""

    first: Any
    second: Any


def stored(ocp: Any, root: Path, tree: Any, kind: str = "Standard", **options: Any) -> Any:
    """Return a manager whose step 1 has a tree, saved with arguments of a kind."""
    mngr = ocp.CheckpointManager(root)
    mngr.save(1, args=getattr(ocp.args, f"{kind}Save")(tree, **options))
    mngr.wait_until_finished()
    return mngr


# --- Leaves ---------------------------------------------------------------------------------------


@contract
def arrays_of_many_dtypes(ocp: Any, root: Path) -> Iterator[Any]:
    names = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float8_e4m3fn", "complex64")
    tree = {name: jnp.ones(3).astype(name) for name in names}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)


@contract
def arrays_of_numpy_of_64_bits(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"i": np.arange(3), "f": np.linspace(0, 1, 3), "c": np.ones(2, np.complex128)}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(tree))


@contract
def scalars_of_arrays(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"j": jnp.float32(2.5), "n": np.array(3, np.int16)}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(tree))


@differs(SAVED, {0: ["tuple", 3, 0]})
def arrays_without_elements(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root) as mngr:
        args = ocp.args.StandardSave({"n": np.zeros((3, 0))})
        yield tried(lambda: (mngr.save(1, args=args), mngr.restore(1)["n"].shape)[1])


@contract
def texts_in_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"w": jnp.ones(2), "name": "a/b ü", "empty": ""}
    with stored(ocp, root, tree, "PyTree") as mngr:
        yield mngr.restore(1)
        target = {"w": jnp.zeros(2), "name": "", "empty": "x"}
        yield mngr.restore(1, args=ocp.args.PyTreeRestore(target))


@differs(SAVED, {0: True})
def texts_in_a_standard_tree(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root) as mngr:
        yield tried(lambda: mngr.save(1, args=ocp.args.StandardSave({"name": "x"})))


@contract
def truths_in_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"w": jnp.ones(2), "a": True, "b": False}) as mngr:
        found = mngr.restore(1)
        yield bool(found["a"]), bool(found["b"])


@contract
def nothing_in_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"w": jnp.ones(2), "none": None, "below": {"none": None, "v": 3}}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(tree))


@contract
def empty_containers_in_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"w": jnp.ones(2), "d": {}, "l": [], "below": [{}, 3]}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(tree))


@differs(SAVED, {0: True})
def a_tree_without_leaves(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root) as mngr:
        yield tried(lambda: mngr.save(1, args=ocp.args.StandardSave({})))


@contract
def a_typed_key_in_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"w": jnp.ones(2), "key": jax.random.key(3)}
    with stored(ocp, root, tree) as mngr:
        found = mngr.restore(1, args=ocp.args.StandardRestore(tree))
        yield jax.random.key_data(found["key"]), str(jax.random.key_impl(found["key"]))


@contract
def an_array_that_was_sharded(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with stored(ocp, root, {"w": jax.device_put(jnp.arange(8.0), place)}) as mngr:
        yield mngr.restore(1)
        target = {"w": jax.ShapeDtypeStruct((8,), "float32")}
        yield np.asarray(mngr.restore(1, args=ocp.args.StandardRestore(target))["w"])


@contract
def an_array_of_jax_as_an_array_of_numpy(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state()) as mngr:
        target = {"n": np.zeros(3, np.float32), "w": np.zeros((2, 4), np.float32)}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def an_array_of_numpy_as_an_array_of_jax(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state()) as mngr:
        target = {"n": jnp.zeros(3), "w": jnp.zeros((2, 4))}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def a_snapshot_is_taken(ocp: Any, root: Path) -> Iterator[Any]:
    values = np.zeros(4)
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"n": values}))
        values[:] = 7
        yield mngr.restore(1)


# --- Containers -----------------------------------------------------------------------------------


@contract
def keys_with_marks_in_them(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"a.b": jnp.ones(2), "c d": 3, "é": {"x-y": 4}}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(tree))


@contract
def lists_in_lists(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"l": [[1, 2], [jnp.ones(2), [3]]]}
    with stored(ocp, root, tree) as mngr:
        yield mngr.restore(1)


@contract
def a_list_as_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, [jnp.ones(2), 3]) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore([jnp.zeros(2), 0]))


@contract
def a_named_tuple_onto_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"p": Pair(jnp.ones(2), Pair(3, 4.5))}
    with stored(ocp, root, tree) as mngr:
        target = {"p": Pair(jnp.zeros(2), Pair(0, 0.0))}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def a_class_of_nodes_onto_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"t": TRAIN(jnp.ones(2), 3)}
    with stored(ocp, root, tree) as mngr:
        found = mngr.restore(1, args=ocp.args.StandardRestore({"t": TRAIN(jnp.zeros(2), 0)}))["t"]
        yield type(found) is TRAIN, found.params, found.step


class TRAIN:
    """A class that jax knows as a node."""

    def __init__(self, params: Any, step: Any) -> None:
        self.params, self.step = params, step


jax.tree_util.register_pytree_with_keys(
    TRAIN,
    lambda t: (
        (
            (jax.tree_util.GetAttrKey("params"), t.params),
            (jax.tree_util.GetAttrKey("step"), t.step),
        ),
        None,
    ),
    lambda _, children: TRAIN(*children),
)


@contract
def a_list_that_is_longer_is_an_error(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"l": [1, 2]}) as mngr:
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore({"l": [0, 0, 0]})))


@contract
def another_kind_of_node_is_an_error(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"d": {"a": 1}}) as mngr:
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore({"d": 0})))


# --- Restore args ---------------------------------------------------------------------------------


@contract
def a_number_comes_back_as_another_type(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"i": 3, "a": np.array(4)}, "PyTree") as mngr:
        each = {"i": ocp.RestoreArgs(restore_type=float), "a": ocp.RestoreArgs(restore_type=int)}
        found = mngr.restore(1, args=ocp.args.PyTreeRestore(restore_args=each))
        yield found["i"], found["a"]


@contract
def restore_args_without_a_type(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state() | {"i": 3}, "PyTree") as mngr:
        each = dict.fromkeys(("i", "n", "w"), ocp.RestoreArgs())
        yield mngr.restore(1, args=ocp.args.PyTreeRestore(restore_args=each))


@contract
def restore_args_with_a_strict_shape(ocp: Any, root: Path) -> Iterator[Any]:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with stored(ocp, root, {"w": jnp.ones((2, 4))}, "PyTree") as mngr:
        each = {"w": ocp.ArrayRestoreArgs(sharding=place, global_shape=(4, 4))}
        yield tried(lambda: mngr.restore(1, args=ocp.args.PyTreeRestore(restore_args=each)))


@contract
def restore_args_with_a_dtype_and_a_place(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with stored(ocp, root, {"w": jnp.ones((2, 4))}, "PyTree") as mngr:
        each = {"w": ocp.ArrayRestoreArgs(sharding=place, dtype=jnp.dtype("bfloat16"))}
        yield mngr.restore(1, args=ocp.args.PyTreeRestore(restore_args=each))


@contract
def a_part_of_a_tree_with_all_restore_args(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"a": state(1), "b": state(2)}, "PyTree") as mngr:
        every = ocp.checkpoint_utils.construct_restore_args({"a": state(0), "b": state(0)})
        args = ocp.args.PyTreeRestore({"b": {"w": 0}}, restore_args=every, partial_restore=True)
        yield mngr.restore(1, args=args)


@contract
def a_branch_is_left_out(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"a": state(1), "b": state(2)}, "PyTree") as mngr:
        args = ocp.args.PyTreeRestore({"b": state(0)}, partial_restore=True)
        yield mngr.restore(1, args=args)


@differs("with `partial_restore`, a leaf that is not stored is an error", {0: "ValueError"})
def a_leaf_that_is_not_stored_is_an_error_in_a_part(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state(), "PyTree") as mngr:
        args = ocp.args.PyTreeRestore({"other": jnp.zeros(2)}, partial_restore=True)
        yield tried(lambda: mngr.restore(1, args=args))


@contract
def save_args_of_some_dtypes(ocp: Any, root: Path) -> Iterator[Any]:
    save_args = {"n": ocp.SaveArgs(), "w": ocp.SaveArgs(dtype=jnp.dtype("bfloat16"))}
    with stored(ocp, root, state(), "PyTree", save_args=save_args) as mngr:
        yield mngr.restore(1)
        yield str(mngr.item_metadata(1)["w"].dtype)


@contract
def save_args_that_aggregate(ocp: Any, root: Path) -> Iterator[Any]:
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(aggregate=True), state())
    with stored(ocp, root, state(), "PyTree", save_args=save_args) as mngr:
        yield mngr.restore(1, args=ocp.args.PyTreeRestore(state(0)))


@contract
def transforms_of_leaves_in_a_branch(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"a": {"w": jnp.ones(2)}, "b": jnp.zeros(2)}, "PyTree") as mngr:
        target = {"new": {"v": jnp.zeros(2)}, "b": jnp.ones(2)}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={"new": {"v": ocp.Transform(original_key="a/w")}},
        )
        yield mngr.restore(1, args=args)


@contract
def transforms_of_a_leaf_that_is_not_stored(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state(), "PyTree") as mngr:
        target = {"v": jnp.zeros((2, 4))}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={"v": ocp.Transform(original_key="gone")},
        )
        yield isinstance(tried(lambda: mngr.restore(1, args=args)), str)


@contract
def transforms_that_do_not_default_to_the_original(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state(), "PyTree") as mngr:
        target = {"w": jnp.full((2, 4), 9.0), "v": jnp.zeros(3)}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={"v": ocp.Transform(original_key="n")},
            transforms_default_to_original=False,
        )
        yield mngr.restore(1, args=args)["w"]


@contract
def a_target_of_the_wrong_dtype_of_a_number(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"i": 3, "f": 0.5}) as mngr:
        yield mngr.restore(1, args=ocp.args.StandardRestore({"i": 0.0, "f": 0}))
        yield mngr.restore(1, args=ocp.args.StandardRestore({"i": True, "f": 0.0}))


@differs(
    "A number onto a `jax.ShapeDtypeStruct` comes back as a `jax.Array`",
    {0: {"i": ["jax", "int32", 3, "1 device"]}},
)
def a_number_onto_an_array(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"i": 3}) as mngr:
        target = {"i": jax.ShapeDtypeStruct((), jnp.int32)}
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore(target)))


@contract
def an_array_onto_a_number(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, {"a": jnp.int32(3)}) as mngr:
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore({"a": 0})))
