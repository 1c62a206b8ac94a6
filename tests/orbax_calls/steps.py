"""Contracts of the steps of a run: which are saved and kept, how they are named and found."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.orbax_calls.contracts import contract, differs, tried
from tests.orbax_calls.managers import blocking, saved, state


def by_loss(metrics: Any) -> float:
    return float(metrics["loss"])


# --- Which steps are saved ------------------------------------------------------------------------


@contract
def an_interval_and_single_steps(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, *range(1, 10), save_interval_steps=4, save_on_steps=[3, 6]) as mngr:
        yield mngr.all_steps()


@contract
def a_function_of_the_step_and_the_latest(ocp: Any, root: Path) -> Iterator[Any]:
    asked = []

    def decide(step: int, latest: int | None) -> bool:
        asked.append((step, latest))
        return step in (1, 4, 5)

    with saved(ocp, root, *range(7), should_save_fn=decide) as mngr:
        yield mngr.all_steps(), asked


@contract
def a_policy_of_the_user(ocp: Any, root: Path) -> Iterator[Any]:
    seen = []

    class Odd(ocp.checkpoint_managers.SaveDecisionPolicy):
        def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
            seen.append([step.step, [each.step for each in previous_steps], step.metrics])
            return step.step % 2 == 1

    with saved(ocp, root, *range(5), save_decision_policy=Odd()) as mngr:
        yield mngr.all_steps(), seen


@contract
def what_a_policy_is_told(ocp: Any, root: Path) -> Iterator[Any]:
    seen = []

    class Always(ocp.checkpoint_managers.SaveDecisionPolicy):
        def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
            is_known = isinstance(step.time, datetime.datetime)
            seen.append((context.is_saving_in_progress, context.reached_preemption, is_known))
            return True

    with saved(ocp, root, 1, 2, save_decision_policy=Always(), enable_async_checkpointing=False):
        yield seen


@contract
def saves_out_of_order(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 5) as mngr:
        yield mngr.save(3, args=ocp.args.StandardSave(state()))
        yield mngr.save(3, args=ocp.args.StandardSave(state()), force=True)
        mngr.wait_until_finished()
        yield sorted(mngr.all_steps())


@differs("An empty directory named like a step is not a step", {0: ["list"], 1: None, 2: True})
def an_empty_directory_with_the_name_of_a_step(ocp: Any, root: Path) -> Iterator[Any]:
    (root / "10").mkdir(parents=True)
    with ocp.CheckpointManager(root) as mngr:
        yield list(mngr.all_steps())
        yield mngr.latest_step()
        yield mngr.should_save(5)


# --- Which steps are kept -------------------------------------------------------------------------


@contract
def the_latest_and_a_period(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, *range(9), max_to_keep=2, keep_period=3) as mngr:
        yield mngr.all_steps()


@contract
def only_a_period(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, *range(7), keep_period=3) as mngr:
        yield mngr.all_steps()


@contract
def the_best_steps_by_options(ocp: Any, root: Path) -> Iterator[Any]:
    for mode in ("min", "max"):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=by_loss, best_mode=mode)
        with ocp.CheckpointManager(root / mode, options=options) as mngr:
            for step, loss in enumerate((3.0, 1.0, 2.0, 5.0)):
                mngr.save(step, args=ocp.args.StandardSave(state()), metrics={"loss": loss})
            mngr.wait_until_finished()
            yield mngr.all_steps(), mngr.best_step(), mngr.latest_step()


@contract
def metrics_that_are_not_written(ocp: Any, root: Path) -> Iterator[Any]:
    options = {"best_fn": by_loss, "prevent_write_metrics": True, "max_to_keep": 1}
    with saved(ocp, root, **options) as mngr:
        for step, loss in ((1, 5.0), (2, 3.0)):
            mngr.save(step, args=ocp.args.StandardSave(state()), metrics={"loss": loss})
        mngr.wait_until_finished()
        yield mngr.all_steps(), mngr.metrics(1)
    with saved(ocp, root, best_fn=by_loss) as mngr:
        yield mngr.metrics(1)


@contract
def a_policy_of_the_user_for_what_is_kept(ocp: Any, root: Path) -> Iterator[Any]:
    class Even(ocp.checkpoint_managers.PreservationPolicy):
        def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
            return [each.step % 2 == 0 for each in checkpoints]

    with saved(ocp, root, *range(1, 7), preservation_policy=Even()) as mngr:
        yield mngr.all_steps()
    with ocp.CheckpointManager(root) as mngr:
        yield mngr.all_steps()


# --- Names of steps -------------------------------------------------------------------------------


@contract
def names_by_a_prefix(ocp: Any, root: Path) -> Iterator[Any]:
    step = ocp.path.step
    names = step.standard_name_format(step_prefix="at")
    yield names.build_name(0), names.build_name(12345)
    yield step.build_step_path(root, names, 3) == root / "at_3"


@contract
def the_latest_step_of_a_directory(ocp: Any, root: Path) -> Iterator[Any]:
    step, names = ocp.path.step, ocp.path.step.standard_name_format()
    saved(ocp, root, 3, 20, 100).close()
    found = step.latest_step_metadata(root, names)
    yield found.step, found.path == root / "100"
    yield sorted(each.step for each in names.find_all(root))
    yield step.find_step_path(root, names, step=20) == root / "20"
    yield tried(lambda: step.find_step_path(root, names, step=21))


@contract
def a_directory_without_steps(ocp: Any, root: Path) -> Iterator[Any]:
    root.mkdir()
    names = ocp.path.step.standard_name_format()
    yield list(names.find_all(root)), ocp.path.step.latest_step_metadata(root, names)
    yield list(ocp.utils.checkpoint_steps(root))


@contract
def directories_of_steps_and_items(ocp: Any, root: Path) -> Iterator[Any]:
    where = ocp.utils.get_save_directory
    for found in (
        where(5, root),
        where(5, root, "params"),
        where(5, root, "params", step_prefix="at", step_format_fixed_length=3),
        where(5, root, "params", override_directory=root / "other"),
        where(5, root, step_name_format=ocp.path.step.standard_name_format(step_prefix="b")),
    ):
        yield str(found.relative_to(root))


@contract
def whole_checkpoints(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1).close()
    yield bool(ocp.utils.is_checkpoint_finalized(root / "1"))
    yield bool(ocp.path.step.is_path_finalized(root / "1"))
    yield bool(ocp.path.step.is_path_temporary(root / "1"))


@contract
def other_names_in_a_root_are_left_alone(ocp: Any, root: Path) -> Iterator[Any]:
    (root / "logs").mkdir(parents=True)
    (root / "notes.txt").write_text("x")
    with saved(ocp, root, 1, 2, 3, max_to_keep=1) as mngr:
        yield mngr.all_steps()
    yield (root / "logs").is_dir(), (root / "notes.txt").read_text()


@contract
def names_of_the_users_own(ocp: Any, root: Path) -> Iterator[Any]:
    names = ocp.path.step.composite_name_format(
        ocp.path.step.standard_name_format(step_prefix="new"),
        [
            ocp.path.step.standard_name_format(step_prefix="new"),
            ocp.path.step.standard_name_format(step_prefix="old"),
        ],
    )
    saved(ocp, root, 1, step_prefix="old").close()
    with saved(ocp, root, 2, step_name_format=names) as mngr:
        yield mngr.all_steps(), sorted(each.name for each in root.glob("*_*"))
        yield mngr.restore(1)


@contract
def metadata_of_a_root_as_older_versions_wrote_it(ocp: Any, root: Path) -> Iterator[Any]:
    (root / "metadata").mkdir(parents=True)
    (root / "metadata" / "metadata").write_text('{"of": "the root"}')
    with saved(ocp, root, 1) as mngr:
        yield mngr.metadata().custom_metadata, mngr.all_steps()
    with ocp.CheckpointManager(root, metadata={"of": "another"}) as mngr:
        yield mngr.metadata().custom_metadata


# --- Loops ----------------------------------------------------------------------------------------


@contract
def steps_for_an_evaluator(ocp: Any, root: Path) -> Iterator[Any]:
    iterate = ocp.checkpoint_utils.checkpoints_iterator
    saved(ocp, root, 1, 2, step_prefix="at").close()
    yield list(iterate(root, timeout=1, seconds_to_sleep=0, step_prefix="at"))
    yield list(iterate(root / "none", timeout=0, seconds_to_sleep=0))


@contract
def an_evaluator_asks_whether_it_is_over(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1).close()
    asked = []

    def is_over() -> bool:
        asked.append(True)
        return len(asked) >= 2

    steps = ocp.checkpoint_utils.checkpoints_iterator(
        root, timeout=0, seconds_to_sleep=0, timeout_fn=is_over
    )
    yield list(steps), len(asked) >= 2


@contract
def the_processes_of_a_job_of_one(ocp: Any, root: Path) -> Iterator[Any]:
    yield ocp.multihost.process_index(), ocp.multihost.process_count()
    yield ocp.multihost.is_primary_host(0), ocp.multihost.is_primary_host(None)
    yield ocp.multihost.is_primary_host(1)
    yield ocp.multihost.broadcast_one_to_all(7)
    yield ocp.multihost.broadcast_one_to_all({"a": 7}, is_source=True)
    ocp.multihost.sync_global_processes("here")


@contract
def trees_as_dicts(ocp: Any, root: Path) -> Iterator[Any]:
    tree: Any = {"a": [1, {"b": (2, 3)}], "none": None, "empty": {}}
    yield ocp.tree.serialize_tree(tree, keep_empty_nodes=True)


@contract
def errors_are_asked_for(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        yield mngr.check_for_errors(), mngr.wait_until_finished(), mngr.is_saving_in_progress()
        yield mngr.reload(), mngr.all_steps(), mngr.reached_preemption(1)


@contract
def a_logger_of_the_user(ocp: Any, root: Path) -> Iterator[Any]:
    entries = []

    class Logger:
        def log_entry(self, entry: dict[str, Any]) -> None:
            entries.append(entry)

    with ocp.CheckpointManager(root, logger=Logger()) as mngr:
        mngr.save(3, args=ocp.args.StandardSave(state()))
        mngr.restore(3)
    for kind in ("save", "restore"):
        found = [each for each in entries if each["event_type"] == kind]
        yield len(found), found[0]["step"], found[0]["directory"] == str(root)


# --- Handlers -------------------------------------------------------------------------------------


@contract
def a_placeholder_of_a_leaf_in_a_branch(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave({"a": state(1), "b": state(2)}))
        target = {"a": {"n": ocp.PLACEHOLDER, "w": jnp.zeros((2, 4))}, "b": state(0)}
        found = mngr.restore(1, args=ocp.args.PyTreeRestore(target))
        yield found["a"]["n"] is ocp.PLACEHOLDER, found["a"]["w"], found["b"]


@differs("A placeholder may stand for a branch", {0: True})
def a_placeholder_of_a_branch(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.PyTreeSave({"a": state(1), "w": jnp.ones(2)}))
        args = ocp.args.PyTreeRestore({"a": ocp.PLACEHOLDER, "w": jnp.zeros(2)})
        yield tried(lambda: mngr.restore(1, args=args)["a"] is ocp.PLACEHOLDER)


class OwnError(Exception):
    """An error of a handler."""


@differs("its error is the cause of a `HandlerError`", {0: True, 1: False})
def an_error_of_a_handler(ocp: Any, root: Path) -> Iterator[Any]:
    class Failing(ocp.CheckpointHandler):
        def save(self, directory: Any, item: Any) -> None:
            raise OwnError

        def restore(self, directory: Any, item: Any = None) -> Any:
            return None

    ckptr = ocp.Checkpointer(Failing())
    try:
        ckptr.save(root / "a", 3)
    except Exception as error:
        yield isinstance(error.__cause__, OwnError)
        yield isinstance(error, OwnError)
    yield (root / "a").exists()


@differs("A handler restores from a copy of its files", {0: False})
def the_directory_of_a_handler(ocp: Any, root: Path) -> Iterator[Any]:
    class Where(ocp.CheckpointHandler):
        def save(self, directory: Any, item: Any) -> None:
            (directory / "a.txt").write_text(item)

        def restore(self, directory: Any, item: Any = None) -> Any:
            return str(directory).startswith(str(root)), (directory / "a.txt").read_text()

    with ocp.Checkpointer(Where()) as ckptr:
        ckptr.save(root / "a", "hello")
        is_there, text = ckptr.restore(root / "a")
    yield is_there
    yield text


@contract
def an_asynchronous_handler_of_the_user(ocp: Any, root: Path) -> Iterator[Any]:
    class Text(ocp.AsyncCheckpointHandler):
        def save(self, directory: Any, item: Any) -> None:
            (directory / "text.txt").write_text(item)

        async def async_save(self, directory: Any, item: Any) -> None:
            self.save(directory, item)

        def restore(self, directory: Any, item: Any = None) -> Any:
            return (directory / "text.txt").read_text()

        def metadata(self, directory: Any) -> Any:
            return None

    # The directory is there when the handler is called.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    with ocp.AsyncCheckpointer(Text(), async_options=options) as ckptr:
        ckptr.save(root / "a", "hello")
        ckptr.wait_until_finished()
        yield ckptr.restore(root / "a")


@contract
def a_tree_that_changes_between_saves(ocp: Any, root: Path) -> Iterator[Any]:
    ckptr = ocp.StandardCheckpointer()
    values = np.zeros(4)
    for number in range(3):
        ckptr.save(root / str(number), {"n": values})
        values += 1
    ckptr.wait_until_finished()
    for number in range(3):
        yield ckptr.restore(root / str(number), {"n": np.zeros(4)})
    ckptr.close()


@contract
def two_managers_of_two_roots(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root / "a", 1, 2) as one, saved(ocp, root / "b", 7) as two:
        yield one.all_steps(), two.all_steps()
        yield jax.tree.map(np.asarray, one.restore(2)), two.restore(7)


@contract
def names_of_handlers_in_metadata(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root / "a") as mngr:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state()), config=ocp.args.JsonSave({"a": 1})
        )
        mngr.save(1, args=args)
        mngr.wait_until_finished()
        yield mngr.metadata(1).item_handlers
    with saved(ocp, root / "b", 1) as mngr:
        yield mngr.metadata(1).item_handlers


@contract
def times_of_a_step(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1) as mngr:
        found = mngr.metadata(1)
        yield 0 < found.init_timestamp_nsecs <= found.commit_timestamp_nsecs
        yield found.metrics, found.custom_metadata


@contract
def a_tree_of_train_state(ocp: Any, root: Path) -> Iterator[Any]:
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    tree = {"params": params, "opt": optax.adamw(0.1).init(params), "step": 3}
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(3, args=ocp.args.StandardSave(tree))
        target = jax.eval_shape(lambda: tree)
        found = mngr.restore(3, args=ocp.args.StandardRestore(target | {"step": 0}))
        yield type(found["opt"]) is type(tree["opt"]), type(found["opt"][0]).__name__
        yield jax.tree.map(np.asarray, found)
        yield mngr.restore(3)["opt"]


@contract
def a_restore_of_all_items_by_targets(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        args = {name: ocp.args.StandardSave(state(i)) for i, name in enumerate("abc")}
        mngr.save(1, args=ocp.args.Composite(**args))
        args = {name: ocp.args.StandardRestore(state(0)) for name in "ca"}
        found = mngr.restore(1, args=ocp.args.Composite(**args))
        yield sorted(found.keys()), found["a"], found.c


@contract
def a_restore_by_a_closed_manager(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1, 2) as mngr:
        pass
    yield mngr.restore(1)
    yield mngr.restore(2, args=ocp.args.StandardRestore(state(0)))
    yield tried(lambda: mngr.restore(3))


@differs("A closed manager saves nothing", {0: False})
def a_save_by_a_closed_manager(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root) as mngr:
        pass
    yield tried(lambda: mngr.save(2, args=ocp.args.StandardSave(state()))) is True


@differs("step numbers are not below 0", {0: "ValueError"})
def a_step_below_0(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        yield tried(lambda: mngr.save(-1, args=ocp.args.StandardSave(state()), force=True))


@contract
def numbers_of_steps_of_other_types(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, cast(int, np.int64(7))) as mngr:
        yield int(mngr.latest_step()), mngr.restore(np.int32(7)), mngr.restore(jnp.int32(7))
