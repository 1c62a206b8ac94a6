"""Contracts of the manager: lists, metadata, errors, names, policies, saves that fail."""

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

from tests.orbax_calls.contracts import contract, differs, tried
from tests.orbax_calls.managers import composite, saved, state
from tests.support.conditions import until

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
    until(lambda: called)
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


# --- Runs that go back, names and metrics with marks in them --------------------------------------


@contract
def a_run_that_goes_back(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 10, 20, max_to_keep=2) as mngr:
        yield mngr.save(5, args=ocp.args.StandardSave(state(5)), force=True)
        mngr.wait_until_finished()
        yield mngr.all_steps(), mngr.latest_step()
        yield mngr.save(6, args=ocp.args.StandardSave(state(6)))
        mngr.wait_until_finished()
        yield mngr.all_steps()
    yield sorted(int(each.name) for each in root.iterdir() if each.name.isdigit())


@contract
def metrics_with_slashes(ocp: Any, root: Path) -> Iterator[Any]:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["val/loss"])
    for number in range(2):
        with ocp.CheckpointManager(root, options=options) as mngr:
            for step in (2 * number, 2 * number + 1):
                args = ocp.args.StandardSave(state(step))
                mngr.save(step, args=args, metrics={"val/loss": float(step % 3)})
            yield mngr.all_steps(), mngr.best_step()


@contract
def names_that_are_read_in_two_ways(ocp: Any, root: Path) -> Iterator[Any]:
    step_lib = ocp.path.step
    old, new = step_lib.standard_name_format(), step_lib.standard_name_format(step_prefix="ckpt")
    saved(ocp, root, 1, step_name_format=old).close()
    both = step_lib.composite_name_format(new, [new, old])
    with saved(ocp, root, 2, step_name_format=both) as mngr:
        yield mngr.all_steps(), mngr.restore(1)["w"], mngr.restore(2)["w"]
    yield sorted(each.name for each in root.iterdir() if each.name[-1].isdigit())
