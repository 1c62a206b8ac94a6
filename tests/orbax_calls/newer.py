"""Contracts of the newer interface, `v1`."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.orbax_calls.contracts import contract, tried
from tests.orbax_calls.managers import state


def shapes(tree: Any) -> Any:
    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(shape, tree)


@contract
def v1_functions_save_and_load(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save(root / "a", state())
    yield v1.load(root / "a")
    yield v1.load(root / "a", shapes(state()))
    yield v1.load(root / "a", state(0))
    yield v1.load(root / "a", checkpointable_name="state")
    yield v1.is_orbax_checkpoint(root / "a")


@contract
def v1_functions_and_paths(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save(root / "a", state(1))
    yield tried(lambda: v1.save(root / "a", state(2)))
    yield v1.load(root / "a")["w"]
    v1.save(root / "a", state(3), overwrite=True)
    yield v1.load(root / "a")["w"]
    yield tried(lambda: v1.load(root / "b"))


@contract
def v1_saves_that_go_on(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    response = v1.save_async(root / "a", state(4))
    yield response.result()
    yield v1.load(root / "a")["w"]
    yield v1.save_checkpointables_async(root / "b", {"m": state(5)}).result()
    yield v1.load(root / "b", checkpointable_name="m")["w"]


@contract
def v1_names_of_trees(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save(root / "a", state(), checkpointable_name="model")
    yield v1.load(root / "a", checkpointable_name="model")["w"]
    yield v1.load(root / "a")["w"]
    yield tried(lambda: v1.load(root / "a", checkpointable_name="other"))


@contract
def v1_several_items(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save_checkpointables(root / "a", {"m": state(1), "o": state(2)})
    yield v1.load_checkpointables(root / "a")
    yield v1.load_checkpointables(root / "a", {"o": None})
    yield v1.load_checkpointables(root / "a", {"o": state(0), "m": None})
    yield tried(lambda: v1.load_checkpointables(root / "a", {"x": None}))
    yield sorted(v1.checkpointables_metadata(root / "a").metadata)


@contract
def v1_metadata(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save(root / "a", state(), custom_metadata={"lr": 0.5})
    found = v1.metadata(root / "a")
    yield found.custom_metadata, found.metadata["w"].shape, str(found.metadata["w"].dtype)
    yield found.commit_timestamp_nsecs >= found.init_timestamp_nsecs


@contract
def v1_a_part_of_a_tree(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    v1.save(root / "a", state())
    part = {"w": state(0)["w"]}
    yield tried(lambda: v1.load(root / "a", part))
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        yield v1.load(root / "a", part)
    found = v1.load(root / "a", {"n": v1.PLACEHOLDER, "w": state(0)["w"]})
    yield found["n"] is v1.PLACEHOLDER, found["w"]


@contract
def v1_settings(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    context = v1.Context()
    context.array.saving.storage_options.dtype = np.dtype("float16")
    with context:
        v1.save(root / "a", state())
    yield v1.load(root / "a")["w"]
    wrong = {"n": np.zeros(3, np.float32), "w": jax.ShapeDtypeStruct((3, 2), "float32")}
    yield tried(lambda: v1.load(root / "a", wrong))
    inner = v1.Context()
    inner.array.loading.enable_padding_and_truncation = True
    with inner:
        yield v1.load(root / "a", wrong)["w"]
    with v1.Context(pytree_options=v1.options.PyTreeOptions()) as other:
        yield other.pytree.loading.partial_load


@contract
def v1_old_names(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        v1.save_pytree(root / "a", state())
        yield v1.load_pytree(root / "a")["w"]
    yield sorted({str(w.message) for w in caught if "instead" in str(w.message)})


@contract
def v1_a_checkpointer(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.v1.training.Checkpointer(root) as ckptr:
        yield ckptr.latest, list(ckptr.checkpoints)
        yield ckptr.save(1, state(1), metrics={"loss": 0.5}, custom_metadata={"a": 1})
        yield ckptr.save(2, state(2))
        yield [each.step for each in ckptr.checkpoints], ckptr.latest.step
        yield ckptr.load(), ckptr.load(1), ckptr.load(ckptr.checkpoints[0])["w"]
        yield ckptr.load(1, shapes(state()))
        found = ckptr.metadata(1)
        yield found.custom_metadata, found.metrics, sorted(found.metadata)
        yield ckptr.checkpoints[0].metrics, str(ckptr.directory) == str(root)
    with ocp.v1.training.Checkpointer(root) as ckptr:
        yield [(each.step, each.metrics) for each in ckptr.checkpoints]


@contract
def v1_a_step_that_exists(ocp: Any, root: Path) -> Iterator[Any]:
    errors = ocp.v1.training.errors
    with ocp.v1.training.Checkpointer(root) as ckptr:
        ckptr.save(1, state(1))
        try:
            ckptr.save(1, state(2))
        except errors.StepAlreadyExistsError as error:
            yield isinstance(error, FileExistsError)
        yield ckptr.load(1)["w"]
        try:
            ckptr.load(7)
        except errors.StepNotFoundError as error:
            yield isinstance(error, FileNotFoundError)
        yield tried(lambda: ckptr.metadata(7))


@contract
def v1_an_empty_root(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.v1.training.Checkpointer(root) as ckptr:
        yield tried(ckptr.load), tried(lambda: ckptr.metadata())
        yield ckptr.latest, list(ckptr.checkpoints), ckptr.should_save(3)


@contract
def v1_saves_of_a_checkpointer_that_go_on(ocp: Any, root: Path) -> Iterator[Any]:
    policy = ocp.v1.training.save_decision_policies.FixedIntervalPolicy(2)
    with ocp.v1.training.Checkpointer(root, save_decision_policy=policy) as ckptr:
        response = ckptr.save_async(2, state(2))
        yield response.result(), ckptr.is_saving_in_progress()
        yield ckptr.save_async(3, state(3)), ckptr.save(3, state(3))
        yield ckptr.save(5, state(5), force=True), ckptr.should_save(6), ckptr.should_save(7)
        yield [each.step for each in ckptr.checkpoints]
        ckptr.save_async(8, state(8))
        ckptr.wait()
        yield ckptr.load(8)["w"]


@contract
def v1_policies(ocp: Any, root: Path) -> Iterator[Any]:
    keeps = ocp.v1.training.preservation_policies
    for number, policy in enumerate(
        (
            keeps.LatestN(2),
            keeps.EveryNSteps(3),
            keeps.AnyPreservationPolicy([keeps.LatestN(1), keeps.CustomSteps([0, 2])]),
            keeps.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=2),
            keeps.LatestDuration(datetime.timedelta(hours=1)),
        )
    ):
        place = root / str(number)
        with ocp.v1.training.Checkpointer(place, preservation_policy=policy) as ckptr:
            for step in range(6):
                ckptr.save(step, {"w": jnp.ones(2)}, metrics={"loss": float((step * 5) % 7)})
            yield [each.step for each in ckptr.checkpoints]
        yield sorted(each.name for each in place.iterdir() if each.name.isdigit())


@contract
def v1_items_of_a_step(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.v1.training.Checkpointer(root) as ckptr:
        yield ckptr.save_checkpointables(1, {"m": state(1), "o": state(2)})
        yield ckptr.load_checkpointables(1)
        yield ckptr.load_checkpointables(1, {"o": state(0)})
        yield ckptr.load(1, checkpointable_name="m")["w"]
        yield sorted(ckptr.checkpointables_metadata(1).metadata)


@contract
def v1_steps_of_others_and_deletions(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.v1.training.Checkpointer(root) as ckptr:
        for step in range(3):
            ckptr.save(step, state(step))
        yield ckptr.delete(0), [each.step for each in ckptr.checkpoints]
        yield tried(lambda: ckptr.delete(0)), ckptr.delete(0, missing_ok=True)
        with ocp.v1.training.Checkpointer(root) as other:
            other.save(9, state(9))
        yield [each.step for each in ckptr.checkpoints]
        ckptr.reload()
        yield sorted(each.step for each in ckptr.checkpoints)


@contract
def v1_metadata_of_a_root(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.v1.training.Checkpointer(root, custom_metadata={"a": 1}) as ckptr:
        yield ckptr.root_metadata().custom_metadata
        ckptr.save(1, state())
    with ocp.v1.training.Checkpointer(root, custom_metadata={"b": 2}) as ckptr:
        yield ckptr.root_metadata().custom_metadata


@contract
def v1_names_of_steps(ocp: Any, root: Path) -> Iterator[Any]:
    names = ocp.path.step.standard_name_format(step_prefix="foo")
    with ocp.v1.training.Checkpointer(root, step_name_format=names) as ckptr:
        ckptr.save(3, state())
        yield (root / "foo_3").is_dir(), (root / "3").exists(), ckptr.latest.step


@contract
def v1_a_handler_of_the_user(ocp: Any, root: Path) -> Iterator[Any]:
    v1 = ocp.v1

    class Note:
        def __init__(self, text: str) -> None:
            self.text = text

    class NoteHandler(v1.CheckpointableHandler):  # type: ignore[name-defined]
        async def save(self, directory: Any, checkpointable: Any) -> Any:
            async def write() -> None:
                path = await directory.await_creation()
                (path / "note.txt").write_text(checkpointable.text)

            return write()

        async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
            async def read() -> Any:
                return Note(str((directory / "note.txt").read_text()))

            return read()

        async def metadata(self, directory: Any) -> Any:
            return "a note"

        def is_handleable(self, checkpointable: Any) -> bool:
            return isinstance(checkpointable, Note)

        def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
            return abstract_checkpointable is Note

    context = v1.Context()
    registry = v1.handlers.local_registry()
    registry.add(NoteHandler)
    context.checkpointables.registry = registry
    with context:
        v1.save_checkpointables(root / "a", {"note": Note("hello"), "m": state()})
        yield v1.load_checkpointables(root / "a", {"note": Note})["note"].text
        yield v1.load_checkpointables(root / "a")["note"].text
        yield v1.checkpointables_metadata(root / "a").metadata["note"]


@contract
def v1_old_names_call_the_methods_of_a_subclass(ocp: Any, root: Path) -> Iterator[Any]:
    calls = []

    class Mine(ocp.v1.training.Checkpointer):
        def save(self, step: int, state: Any, **more: Any) -> bool:
            calls.append((step, more))
            return bool(super().save(step, state, **more))

    with Mine(root) as ckptr, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield ckptr.save_pytree(1, {"w": jnp.ones(2)}, force=True), calls
        yield ckptr.load_pytree(1)
