"""Contracts of checkpointers, and of the helpers beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.orbax_calls.contracts import contract, tried
from tests.orbax_calls.managers import saved, state


@contract
def a_standard_checkpointer(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.StandardCheckpointer() as ckptr:
        ckptr.save(root / "a", state())
        ckptr.wait_until_finished()
        yield ckptr.restore(root / "a")
        yield ckptr.restore(root / "a", state(0))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())
        yield ckptr.restore(root / "a", target)["w"]
        wrong = {"n": np.zeros(3, np.float32), "w": jax.ShapeDtypeStruct((5, 5), "float32")}
        yield tried(lambda: ckptr.restore(root / "a", wrong))
        yield ckptr.restore(root / "a", wrong, strict=False)["w"]


@contract
def a_path_that_exists(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.StandardCheckpointer() as ckptr:
        ckptr.save(root / "a", state(1))
        ckptr.wait_until_finished()
        yield tried(lambda: ckptr.save(root / "a", state(2)))
        ckptr.save(root / "a", state(3), force=True)
        ckptr.wait_until_finished()
        yield ckptr.restore(root / "a")


@contract
def a_path_that_does_not_exist(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.StandardCheckpointer() as ckptr:
        yield tried(lambda: ckptr.restore(root / "a"))
    yield tried(lambda: ocp.PyTreeCheckpointer().restore(root / "a"))


@contract
def a_checkpointer_of_trees(ocp: Any, root: Path) -> Iterator[Any]:
    ckptr = ocp.PyTreeCheckpointer()
    ckptr.save(root / "a", state())
    yield (root / "a").is_dir()
    yield ckptr.restore(root / "a")
    yield ckptr.restore(root / "a", item=state(0))
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state())
    yield ckptr.restore(root / "a", restore_args=restore_args)
    yield ckptr.restore(root / "a", args=ocp.args.PyTreeRestore(state(0)))


@contract
def arguments_by_name(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as ckptr:
        ckptr.save(root / "a", args=ocp.args.StandardSave(state()))
        yield ckptr.restore(root / "a", args=ocp.args.StandardRestore(state(0)))
        yield tried(lambda: ckptr.save(root / "b", args=state()))


@contract
def an_asynchronous_checkpointer(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as ckptr:
        for number in range(3):
            ckptr.save(root / str(number), args=ocp.args.StandardSave(state(number)))
        ckptr.wait_until_finished()
        ckptr.check_for_errors()
        yield ckptr.restore(root / "2")


@contract
def a_restore_waits_for_the_save(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as ckptr:
        ckptr.save(root / "a", args=ocp.args.StandardSave(state(4)))
        yield ckptr.restore(root / "a")


@contract
def several_items_in_a_checkpoint(ocp: Any, root: Path) -> Iterator[Any]:
    handler = ocp.CompositeCheckpointHandler("state", "config")
    with ocp.Checkpointer(handler) as ckptr:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state()), config=ocp.args.JsonSave({"lr": 0.5})
        )
        ckptr.save(root / "a", args=args)
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(state(0)), config=ocp.args.JsonRestore()
        )
        yield ckptr.restore(root / "a", args=wanted)
        yield ckptr.restore(root / "a", args=ocp.args.Composite(config=ocp.args.JsonRestore()))


@contract
def json_in_a_checkpoint(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as ckptr:
        ckptr.save(root / "a", {"a": [1, 2.5, "x", None], "b": {"c": True}})
        yield ckptr.restore(root / "a")


@contract
def metadata_of_a_checkpoint(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.StandardCheckpointer() as ckptr:
        ckptr.save(root / "a", state(), custom_metadata={"lr": 0.5})
        ckptr.wait_until_finished()
        found = ckptr.metadata(root / "a")
        yield found.custom_metadata
        yield found.item_metadata["w"].shape, str(found.item_metadata["w"].dtype)


@contract
def an_item_of_a_step(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 100).close()
    with ocp.StandardCheckpointer() as ckptr:
        yield ckptr.restore(root / "100" / "default", state(0))


# --- Helpers --------------------------------------------------------------------------------------


@contract
def steps_one_after_the_other(ocp: Any, root: Path) -> Iterator[Any]:
    with saved(ocp, root, 1, 2) as mngr:
        seen = []
        for step in ocp.checkpoint_utils.checkpoints_iterator(
            root, seconds_to_sleep=0, timeout=1, timeout_fn=lambda: True
        ):
            seen.append(step)
            if step == 2:
                mngr.save(5, args=ocp.args.StandardSave(state()))
                mngr.wait_until_finished()
    yield seen


@contract
def a_step_that_is_waited_for(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1, 2).close()
    wait = ocp.checkpoint_utils.wait_for_new_checkpoint
    with wait(root, until_step=2, timeout=5) as step:
        yield step
    with wait(root, until_step=3, timeout=1, seconds_to_sleep=0) as step:
        yield step


@contract
def restore_args_of_leaves(ocp: Any, root: Path) -> Iterator[Any]:
    tree = {"a": jnp.ones(2), "n": np.zeros(3, np.int8), "i": 3, "f": 0.5}
    found = ocp.checkpoint_utils.construct_restore_args(tree)
    for key in tree:
        each = found[key]
        kind = each.restore_type
        yield type(each).__name__, getattr(kind, "__name__", kind), str(each.dtype)
    yield found["a"].global_shape


@contract
def shapes_of_leaves(ocp: Any, root: Path) -> Iterator[Any]:
    for convert in (ocp.tree.to_shape_dtype_struct, ocp.utils.to_shape_dtype_struct):
        found = convert(jnp.ones((2, 3), jnp.bfloat16))
        yield found.shape, str(found.dtype)
        yield convert(3), convert(0.5)
        yield convert(np.zeros(3, np.float32)).shape


@contract
def steps_of_a_directory(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 3, 1, 12).close()
    yield sorted(ocp.utils.checkpoint_steps(root))
    yield ocp.path.step.step_from_checkpoint_name("ckpt_0012")
    yield ocp.path.step.step_from_checkpoint_name("12")
    yield tried(lambda: ocp.path.step.step_from_checkpoint_name("twelve"))


@contract
def an_empty_directory(ocp: Any, root: Path) -> Iterator[Any]:
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_text("x")
    path = ocp.test_utils.erase_and_create_empty(root / "a")
    yield path.is_dir(), list(path.iterdir())


@contract
def handlers_and_their_arguments(ocp: Any, root: Path) -> Iterator[Any]:
    for handler in (
        *(ocp.StandardCheckpointHandler, ocp.PyTreeCheckpointHandler, ocp.JsonCheckpointHandler),
        *(ocp.ArrayCheckpointHandler, ocp.JaxRandomKeyCheckpointHandler),
    ):
        yield ocp.args.has_registered_args(handler)
    found = ocp.args.get_registered_args_cls(ocp.StandardCheckpointHandler())
    yield found == (ocp.args.StandardSave, ocp.args.StandardRestore)
    yield ocp.args.has_registered_args(ocp.CheckpointHandler)


@contract
def a_handler_of_the_user(ocp: Any, root: Path) -> Iterator[Any]:
    import dataclasses

    class Text(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "text.txt").write_text(args.item)

        def restore(self, directory: Any, args: Any) -> str:
            return str((directory / "text.txt").read_text()) + (args.more if args else "")

        def metadata(self, directory: Any) -> Any:
            return None

    @ocp.args.register_with_handler(Text, for_save=True)
    @dataclasses.dataclass
    class TextSave(ocp.args.CheckpointArgs):
        item: str

    @ocp.args.register_with_handler(Text, for_restore=True)
    @dataclasses.dataclass
    class TextRestore(ocp.args.CheckpointArgs):
        more: str = ""

    with ocp.CheckpointManager(root) as mngr:
        args = ocp.args.Composite(note=TextSave("hello"), state=ocp.args.StandardSave(state()))
        mngr.save(1, args=args)
        yield mngr.restore(1, args=ocp.args.Composite(note=TextRestore("!")))
    with ocp.CheckpointManager(root, item_handlers={"note": Text()}) as mngr:
        yield mngr.restore(1, args=ocp.args.Composite(note=TextRestore("?")))
