"""Contracts of the manager: what it saves and restores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.orbax_calls.contracts import contract, differs, tried


def state(number: float = 1.0) -> dict[str, Any]:
    return {"n": np.full(3, number, np.float32), "w": jnp.full((2, 4), number, jnp.float32)}


def saved(ocp: Any, root: Path, *steps: int, **options: Any) -> Any:
    mngr = ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))
    for step in steps:
        mngr.save(step, args=ocp.args.StandardSave(state(step)))
    mngr.wait_until_finished()
    return mngr


def blocking(ocp: Any, root: Path, **more: Any) -> Any:
    """Return a manager for saves that Orbax refuses: its threads would go on for minutes."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(root, options=options, **more)


# --- One item -------------------------------------------------------------------------------------


@contract
def a_tree_comes_back_without_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    mngr = saved(ocp, root, 1)
    yield mngr.restore(1)
    yield mngr.restore(1, args=ocp.args.StandardRestore())
    yield mngr.restore(None)
    mngr.close()


@contract
def a_tree_comes_back_onto_shapes(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))["w"]


@contract
def a_tree_comes_back_onto_arrays(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        yield mngr.restore(1, args=ocp.args.StandardRestore(state(0)))


@contract
def a_tree_comes_back_with_other_dtypes(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        for dtype in ("bfloat16", "float16", "int32"):
            target = {"n": np.zeros(3), "w": jax.ShapeDtypeStruct((2, 4), dtype)}
            yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def a_tree_comes_back_on_another_mesh(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with saved(ocp, root, 1) as mngr:
        target = {"n": np.zeros(3), "w": jax.ShapeDtypeStruct((2, 4), "float32", sharding=place)}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def another_shape_is_an_error(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = {"n": np.zeros(3), "w": jax.ShapeDtypeStruct((2, 5), "float32")}
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore(target)))


@contract
def arrays_are_padded_and_cut_if_not_strict(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = {"n": np.zeros(3), "w": jax.ShapeDtypeStruct((3, 2), "float32")}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target, strict=False))["w"]


@differs("jax would cut it to 32 bits", {0: "ValueError"})
def numbers_of_64_bits_onto_an_array_of_jax(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"n": np.arange(3)}))
        target = {"n": jax.ShapeDtypeStruct((3,), "int64")}
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore(target)))


@contract
def a_target_of_another_kind_of_numbers(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = {"n": np.zeros(3, np.int32), "w": jnp.zeros((2, 4), jnp.int32)}
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def a_leaf_that_is_not_stored_is_an_error(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = state() | {"more": jnp.zeros(2)}
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore(target)))


@contract
def a_leaf_that_is_not_in_the_target_is_an_error(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        args = ocp.args.StandardRestore({"w": state()["w"]})
        yield tried(lambda: mngr.restore(1, args=args))


@contract
def a_placeholder_skips_a_leaf(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        target = {"n": ocp.PLACEHOLDER, "w": state()["w"]}
        found = mngr.restore(1, args=ocp.args.PyTreeRestore(target))
        yield found["n"] is ocp.PLACEHOLDER, found["w"]


@contract
def a_fallback_sharding_is_for_arrays_without_a_place(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"w": jnp.ones(2), "l": [3, jnp.ones(4)]}))
        args = ocp.args.StandardRestore(fallback_sharding=place)
        found = mngr.restore(1, args=args)
        yield found["w"], found["l"][1]


@contract
def python_numbers_come_back(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"i": 3, "f": 0.5}))
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore({"i": 0, "f": 0.0}))


@contract
def containers_without_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"t": (1, 2.5), "l": [3, 4]}))
        yield mngr.restore(1)["t"]
        yield mngr.restore(1)["l"]


class Pair(NamedTuple):
    left: Any
    right: Any


@contract
def classes_without_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        item: Any = {"pair": Pair(1, jnp.ones(2)), "none": None, "empty": {}, "nothing": ()}
        mngr.save(1, args=ocp.args.PyTreeSave(item))
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.PyTreeRestore())


@contract
def metadata_makes_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    ckptr = ocp.PyTreeCheckpointer()
    ckptr.save(root / "one", [Pair(2, jnp.ones(2)), {"w": np.zeros(3)}])
    metadata = ckptr.metadata(root / "one").item_metadata
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
    yield ckptr.restore(root / "one", args=ocp.args.PyTreeRestore(restore_args=restore_args))
    with ocp.CheckpointManager(root / "run") as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"pair": Pair(jnp.ones(2), jnp.ones(1))}))
    with ocp.CheckpointManager(root / "run", item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, mngr.item_metadata(1))
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))


@contract
def containers_onto_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"t": (1, 2.5), "l": [3, 4]}))
        yield mngr.restore(1, args=ocp.args.StandardRestore({"t": (0, 0.0), "l": [0, 0]}))


@contract
def nothing_to_save(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        yield tried(lambda: mngr.save(1))
        yield tried(lambda: mngr.save(1, ocp.args.StandardSave(state())))
        yield tried(lambda: mngr.save(1, args=state()))
        yield mngr.all_steps()


# --- Several items --------------------------------------------------------------------------------


def composite(ocp: Any, number: float = 1.0) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave(state(number)),
        config=ocp.args.JsonSave({"lr": 0.5, "names": ["a", "b"], "none": None}),
    )


@contract
def several_items_come_back(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        yield mngr.save(1, args=composite(ocp))
        found = mngr.restore(1)
        yield found
        yield found.state, found["config"], "state" in found, "other" in found, len(found)
        yield sorted(found.keys()), found.get("other"), found.get("other", 7)
        yield tried(lambda: found["other"])
        yield tried(lambda: found.other)


@contract
def some_of_several_items_come_back(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=composite(ocp))
        yield mngr.restore(1, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        target = ocp.args.StandardRestore(state(0))
        yield mngr.restore(1, args=ocp.args.Composite(state=target))


@contract
def an_item_that_is_not_there(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=composite(ocp))
        args = ocp.args.Composite(other=ocp.args.StandardRestore())
        yield tried(lambda: mngr.restore(1, args=args))


@contract
def several_items_by_a_manager_that_is_opened_later(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=composite(ocp))
    with ocp.CheckpointManager(root) as mngr:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(state(0)), config=ocp.args.JsonRestore()
        )
        yield mngr.restore(1, args=args)


@contract
def names_of_items_that_are_declared(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, item_names=("state", "config")) as mngr:
        yield mngr.save(1, args=composite(ocp))
        yield mngr.restore(1, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        yield tried(lambda: mngr.save(2, args=ocp.args.StandardSave(state())))


@contract
def one_item_and_several_are_not_mixed(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root / "one") as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state()))
        yield tried(lambda: mngr.save(2, args=composite(ocp)))
    with ocp.CheckpointManager(root / "several") as mngr:
        mngr.save(1, args=composite(ocp))
        yield tried(lambda: mngr.save(2, args=ocp.args.StandardSave(state())))
        yield tried(lambda: mngr.restore(1, args=ocp.args.StandardRestore()))


@differs("an item would hide the metrics of the step", {0: "ValueError"})
def an_item_called_metrics(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        args = ocp.args.Composite(metrics=ocp.args.JsonSave({}))
        yield tried(lambda: mngr.save(1, args=args))


@contract
def an_array_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(mask=ocp.args.ArraySave(jnp.arange(5))))
        yield mngr.restore(1, args=ocp.args.Composite(mask=ocp.args.ArrayRestore()))


@contract
def a_key_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        key = jax.random.key(7)
        mngr.save(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeySave(key)))
        found = mngr.restore(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeyRestore()))
        yield jax.random.key_data(found.key)


@contract
def a_state_of_numpy_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        given = np.random.RandomState(3)
        args = ocp.args.NumpyRandomKeySave(given.get_state())
        mngr.save(1, args=ocp.args.Composite(rng=args))
        found = mngr.restore(1, args=ocp.args.Composite(rng=ocp.args.NumpyRandomKeyRestore()))
        again = np.random.RandomState(0)
        again.set_state(found.rng)
        yield again.rand(3)


# --- Trees with restore args ----------------------------------------------------------------------


@contract
def restore_args_give_types(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        for kind in (np.ndarray, jax.Array):
            each = ocp.RestoreArgs(restore_type=kind)
            if kind is jax.Array:
                each = ocp.ArrayRestoreArgs(
                    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
                )
            args = ocp.args.PyTreeRestore(restore_args={"n": each, "w": each})
            yield mngr.restore(1, args=args)


@contract
def restore_args_give_dtypes(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        each = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16)
        args = ocp.args.PyTreeRestore(state(0), restore_args={"n": each, "w": each})
        yield mngr.restore(1, args=args)


@contract
def restore_args_give_places(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        spec = jax.sharding.PartitionSpec("x")
        restore_args = {
            "n": ocp.RestoreArgs(restore_type=np.ndarray),
            "w": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=spec),
        }
        yield mngr.restore(1, args=ocp.args.PyTreeRestore(restore_args=restore_args))


@contract
def restore_args_give_shapes(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        restore_args = {
            "n": ocp.RestoreArgs(restore_type=np.ndarray),
            "w": ocp.ArrayRestoreArgs(sharding=place, global_shape=(4, 4), strict=False),
        }
        args = ocp.args.PyTreeRestore(restore_args=restore_args)
        yield mngr.restore(1, args=args)["w"]


@contract
def restore_args_of_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        restore_args = ocp.checkpoint_utils.construct_restore_args(state(0))
        args = ocp.args.PyTreeRestore(state(0), restore_args=restore_args)
        yield mngr.restore(1, args=args)


@contract
def a_part_of_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        args = ocp.args.PyTreeRestore({"w": state(0)["w"]}, partial_restore=True)
        yield mngr.restore(1, args=args)


@contract
def save_args_give_dtypes(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.dtype("float16")), state())
        mngr.save(1, args=ocp.args.PyTreeSave(state(), save_args=save_args))
        yield mngr.restore(1)["w"]


@contract
def transforms_leave_leaves_out(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        target = {"w": state(0)["w"]}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={},
        )
        yield mngr.restore(1, args=args)


@contract
def transforms_rename_leaves(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        target = {"v": state(0)["w"]}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={"v": ocp.Transform(original_key="w")},
        )
        yield mngr.restore(1, args=args)


@contract
def transforms_keep_leaves_of_the_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave(state()))
        target = {"w": jnp.full((2, 4), 9.0), "n": np.zeros(3)}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms={"w": ocp.Transform(use_fallback=True)},
        )
        yield mngr.restore(1, args=args)["n"]


# --- The legacy calls -----------------------------------------------------------------------------


@contract
def a_checkpointer_instead_of_handlers(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, ocp.PyTreeCheckpointer()) as mngr:
        yield mngr.save(1, state())
        yield mngr.restore(1)
        yield mngr.restore(1, items=state(0))
        yield mngr.latest_step()


@contract
def checkpointers_by_name(ocp: Any, root: Path) -> Iterator[Any]:
    names = {
        "params": ocp.PyTreeCheckpointer(),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    with ocp.CheckpointManager(root, names) as mngr:
        yield mngr.save(1, {"params": state(), "config": {"lr": 0.5}})
        yield mngr.restore(1, items={"params": None, "config": None})


@contract
def arguments_of_legacy_calls(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, ocp.PyTreeCheckpointer()) as mngr:
        mngr.save(1, state())
        restore_args = ocp.checkpoint_utils.construct_restore_args(state(0))
        yield mngr.restore(1, items=state(0), restore_kwargs={"restore_args": restore_args})
