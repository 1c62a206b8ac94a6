"""Contracts of the manager."""

from __future__ import annotations

import contextlib
import datetime
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@differs("a tuple comes back as a tuple, not as a list", {0: ["tuple", 1, 2.5]})
def containers_without_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"t": (1, 2.5), "l": [3, 4]}))
        yield mngr.restore(1)["t"]
        yield mngr.restore(1)["l"]


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


# --- Lists ----------------------------------------------------------------------------------------


@contract
def a_step_under_way_is_in_the_lists(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        for step in (3, 4):
            mngr.save(step, args=ocp.args.StandardSave(state()))
            yield mngr.all_steps(), mngr.latest_step()


@contract
def steps_of_others_are_seen_by_reload(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        saved(ocp, root, 3, 4).close()
        yield mngr.all_steps(), mngr.latest_step()
        mngr.reload()
        yield mngr.all_steps(), mngr.latest_step()
        yield mngr.restore(4)


@contract
def the_lists_are_read_again_if_asked(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        saved(ocp, root, 3, 4).close()
        yield mngr.all_steps(), mngr.all_steps(read=True), mngr.all_steps()


@contract
def lists_of_a_closed_manager(ocp: Any, root: Path) -> Iterator[Any]:
    mngr = saved(ocp, root, 3, 4)
    mngr.close()
    yield mngr.all_steps(), mngr.latest_step(), mngr.best_step()


@contract
def a_root_that_does_not_exist_is_made(ocp: Any, root: Path) -> Iterator[Any]:
    ocp.CheckpointManager(root / "new" / "run").close()
    yield (root / "new" / "run").is_dir()


@contract
def the_directory(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 3) as mngr:
        yield (mngr.directory / "3").exists(), str(mngr.directory) == str(root)


@contract
def best_of_a_run_without_a_function(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 3, 4) as mngr:
        yield mngr.best_step()


@contract
def a_step_of_another_directory(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root / "a", 3, 4).close()
    with ocp.CheckpointManager(root / "b") as mngr:
        yield mngr.restore(3, directory=root / "a", args=ocp.args.StandardRestore(state(0)))
        yield mngr.restore(None, directory=root / "a", args=ocp.args.StandardRestore(state(0)))


# --- Metadata and metrics -------------------------------------------------------------------------


@contract
def metadata_of_a_root(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, metadata={"version": 1, "names": ["a"]}) as mngr:
        yield mngr.metadata().custom_metadata
        mngr.save(1, args=ocp.args.StandardSave(state()))
    with ocp.CheckpointManager(root, metadata={"version": 2}) as mngr:
        yield mngr.metadata().custom_metadata


@contract
def metadata_of_a_root_without_any(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        yield mngr.metadata().custom_metadata


@contract
def metadata_of_a_step(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        args = ocp.args.StandardSave(state())
        mngr.save(1, args=args, custom_metadata={"lr": 0.5, "tags": ["x"]})
        mngr.save(2, args=args)
        mngr.wait_until_finished()
        found = mngr.metadata(1)
        yield found.custom_metadata, mngr.metadata(2).custom_metadata
        yield found.metrics
        yield found.commit_timestamp_nsecs >= found.init_timestamp_nsecs


@contract
def metadata_of_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        for found in (mngr.item_metadata(1), mngr.metadata(1).item_metadata):
            yield found["w"].shape, str(found["w"].dtype), sorted(found.tree), len(found)
            yield jax.tree.map(lambda leaf: leaf.shape, found.tree)


@contract
def metadata_of_several_items(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=composite(ocp))
        mngr.wait_until_finished()
        found = mngr.item_metadata(1)
        yield found.state["w"].shape, found["config"]


@contract
def metadata_of_a_step_that_is_not_there(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        yield tried(lambda: mngr.metadata(7))


@contract
def metadata_as_a_target(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), mngr.item_metadata(1).tree
        )
        yield mngr.restore(1, args=ocp.args.StandardRestore(target))["w"]


def by_loss(metrics: Any) -> float:
    return float(metrics["eval"]["loss"])


@contract
def metrics_in_groups(ocp: Any, root: Path) -> Iterator[Any]:
    options = ocp.CheckpointManagerOptions(best_fn=by_loss, best_mode="min", max_to_keep=2)
    with ocp.CheckpointManager(root, options=options) as mngr:
        for step, loss in enumerate((3.0, 1.0, 2.0)):
            args = ocp.args.StandardSave(state())
            mngr.save(step, args=args, metrics={"eval": {"loss": loss}})
        yield mngr.all_steps(), mngr.best_step(), mngr.metrics(1)
    with ocp.CheckpointManager(root, options=options) as mngr:
        yield mngr.all_steps(), mngr.best_step(), mngr.metrics(1)


@contract
def metrics_without_a_function(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state()), metrics={"loss": 0.5})
        yield mngr.metrics(1)


# --- Errors ---------------------------------------------------------------------------------------


@contract
def a_step_that_is_not_there(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        yield tried(lambda: mngr.restore(2))
        yield tried(lambda: mngr.delete(2))
        yield mngr.metrics(2)


@contract
def an_empty_root(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        yield mngr.all_steps(), mngr.latest_step(), mngr.best_step()
        yield tried(lambda: mngr.restore(None))
        yield tried(lambda: mngr.restore(0))


@contract
def a_step_that_exists(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 3) as mngr:
        args = ocp.args.StandardSave(state(7))
        yield mngr.save(3, args=args), mngr.save(2, args=args)
        yield tried(lambda: mngr.save(3, args=args, force=True))
        yield mngr.save(2, args=args, force=True)
        yield mngr.restore(3), mngr.restore(2)
        yield isinstance(ocp.checkpoint_manager.StepAlreadyExistsError(""), ValueError)


@contract
def options_that_contradict_each_other(ocp: Any, root: Path) -> Iterator[Any]:
    options = ocp.CheckpointManagerOptions
    yield tried(lambda: options(best_mode="most"))
    yield tried(lambda: options(max_to_keep=-1))
    yield tried(lambda: options(todelete_subdir="a", todelete_full_path="/b"))
    yield tried(lambda: options(no_such_option=1))
    handlers = {"a": ocp.StandardCheckpointHandler()}
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    pytree = ocp.PyTreeCheckpointer()
    manager = ocp.CheckpointManager
    yield tried(lambda: manager(root, pytree, item_names=("a",)))
    yield tried(lambda: manager(root, pytree, item_handlers=handlers))
    yield tried(lambda: manager(root, item_handlers=handlers, handler_registry=registry))
    yield tried(lambda: manager(root, item_names=("a",), handler_registry=registry))


# --- Names, folders, modes ------------------------------------------------------------------------


@contract
def names_of_steps(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 3, step_prefix="ckpt", step_format_fixed_length=5) as mngr:
        yield mngr.all_steps(), (root / "ckpt_00003").is_dir()
        yield mngr.restore(3)["w"]


@contract
def names_of_steps_as_an_object(ocp: Any, root: Path) -> Iterator[Any]:
    names = ocp.path.step.standard_name_format(step_prefix="at", step_format_fixed_length=3)
    with saved(ocp, root, 3, 4, step_name_format=names) as mngr:
        yield mngr.all_steps(), (root / "at_003").is_dir()
        yield sorted(each.step for each in names.find_all(root)), names.build_name(12)
        yield names.find_step(root, 4).step, tried(lambda: names.find_step(root, 9))


@contract
def deleted_steps_go_to_a_folder(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1, 2, 3, max_to_keep=1, todelete_subdir="gone") as mngr:
        yield mngr.all_steps(), sorted(each.name for each in (root / "gone").iterdir())


@contract
def a_manager_that_only_reads(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1, 2).close()
    options = ocp.CheckpointManagerOptions(read_only=True, max_to_keep=1)
    with ocp.CheckpointManager(root, options=options) as mngr:
        yield mngr.all_steps(), mngr.save(3, args=ocp.args.StandardSave(state()))
        yield mngr.should_save(3), mngr.delete(1), mngr.all_steps()
        yield mngr.restore(2)


@contract
def saves_that_block(ocp: Any, root: Path) -> Iterator[Any]:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(root, options=options) as mngr:
        yield mngr.save(1, args=ocp.args.StandardSave(state()))
        yield mngr.is_saving_in_progress(), (root / "1").is_dir()


@contract
def a_callback_after_the_commit(ocp: Any, root: Path) -> Iterator[Any]:
    called: list[bool] = []
    asked = ocp.AsyncOptions(post_finalization_callback=lambda: called.append(True))
    options = ocp.CheckpointManagerOptions(async_options=asked)
    with ocp.CheckpointManager(root, options=options) as mngr:
        mngr.save(1, args=ocp.args.StandardSave(state()))
        mngr.wait_until_finished()
    yield called


@contract
def permissions_of_files(ocp: Any, root: Path) -> Iterator[Any]:
    asked = ocp.options.FileOptions(path_permission_mode=0o750)
    with saved(ocp, root / "run", 1, file_options=asked):
        yield oct((root / "run" / "1").stat().st_mode & 0o777)


# --- Policies -------------------------------------------------------------------------------------


def policies(ocp: Any) -> Any:
    return ocp.checkpoint_managers


@contract
def policies_of_saves(ocp: Any, root: Path) -> Iterator[Any]:
    each = policies(ocp)
    cases = [
        each.FixedIntervalPolicy(3),
        each.SpecificStepsPolicy([1, 4]),
        each.InitialSavePolicy(),
        each.ContinuousCheckpointingPolicy(minimum_interval_secs=1000),
        each.AnySavePolicy([each.InitialSavePolicy(), each.FixedIntervalPolicy(4)]),
        each.PreemptionCheckpointingPolicy(),
    ]
    for number, policy in enumerate(cases):
        with saved(ocp, root / str(number), *range(1, 7), save_decision_policy=policy) as mngr:
            yield mngr.all_steps()


@contract
def policies_of_what_is_kept(ocp: Any, root: Path) -> Iterator[Any]:
    each = policies(ocp)
    cases = [
        each.LatestN(2),
        each.LatestN(),
        each.LatestN(0),
        each.EveryNSteps(3),
        each.EveryNSteps(3, exact_interval=False),
        each.EveryNSteps(2, max_to_keep=2),
        each.EveryNStepsClosest(4),
        each.EveryNStepsClosest(2, max_to_keep=2),
        each.CustomSteps([2, 5]),
        each.EveryNSeconds(1000),
        each.LatestDuration(datetime.timedelta(hours=1)),
        each.AnyPreservationPolicy([each.LatestN(1), each.EveryNSteps(4)]),
    ]
    for number, policy in enumerate(cases):
        with saved(ocp, root / str(number), *range(1, 9), preservation_policy=policy) as mngr:
            yield mngr.all_steps()
        yield sorted(
            int(path.name) for path in (root / str(number)).iterdir() if path.name.isdigit()
        )


@contract
def the_best_steps_by_a_policy(ocp: Any, root: Path) -> Iterator[Any]:
    for reverse in (False, True):
        policy = policies(ocp).BestN(get_metric_fn=lambda m: m["loss"], reverse=reverse, n=2)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, best_fn=lambda m: m["loss"]
        )
        with ocp.CheckpointManager(root / str(reverse), options=options) as mngr:
            for step, loss in enumerate((3.0, 1.0, 2.0, 5.0)):
                mngr.save(step, args=ocp.args.StandardSave(state()), metrics={"loss": loss})
            yield mngr.all_steps(), mngr.best_step()


@contract
def steps_apart_in_time(ocp: Any, root: Path) -> Iterator[Any]:
    apart = datetime.timedelta(hours=1)
    with saved(ocp, root, 1, 2, 3, max_to_keep=1, keep_time_interval=apart) as mngr:
        yield mngr.all_steps()


# --- Saves that fail ------------------------------------------------------------------------------


@differs(
    "an error is never lost, and a step that was not saved is not listed",
    {
        1: ["tuple", True, ["list", 1], 1],
        2: ["tuple", True, ["list", 1, 2]],
    },
)
def a_save_that_fails_is_heard_at_the_next(ocp: Any, root: Path) -> Iterator[Any]:
    mngr = saved(ocp, root, 1)
    args = ocp.args.StandardSave({"w": jnp.ones((512, 512))})
    with small_files():
        yield mngr.save(2, args=args), mngr.all_steps()
        failed = tried(mngr.wait_until_finished)
    yield failed is not None, mngr.all_steps(), mngr.latest_step()
    yield tried(lambda: mngr.save(2, args=args, force=True)), mngr.all_steps()
    mngr.wait_until_finished()
    yield tried(lambda: mngr.restore(2)["w"].shape)
    mngr.close()


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Refuse files of more than 64 KiB, as a full disk does."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
