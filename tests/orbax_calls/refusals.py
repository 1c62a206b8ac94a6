"""What `ckpt_orbax` refuses: the error says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tests.orbax_calls.contracts import refuses, tried
from tests.orbax_calls.leaves import stored
from tests.orbax_calls.managers import state


def transformed(ocp: Any, root: Path, transforms: Any) -> Any:
    """Return what comes back of a tree with these transforms."""
    with stored(ocp, root, state(), "PyTree") as mngr:
        target = {"v": jnp.zeros((2, 4))}
        args = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            transforms=transforms,
        )
        return tried(lambda: mngr.restore(1, args=args))


@refuses("functions of values and patterns in `transforms`")
def a_transform_with_a_function_of_one_value(ocp: Any, root: Path) -> Iterator[Any]:
    each = ocp.Transform(original_key="w", value_fn=lambda x: x + 1)
    yield transformed(ocp, root, {"v": each})


@refuses("functions of values and patterns in `transforms`")
def a_transform_with_a_function_of_values(ocp: Any, root: Path) -> Iterator[Any]:
    each = ocp.RestoreTransform(
        multi_value_fn=lambda *given: given[1]["w"] * 2,
        multi_value_fn_input_args={"w": ocp.ArrayRestoreArgs()},
    )
    yield transformed(ocp, root, {"v": each})


@refuses("functions of values and patterns in `transforms`")
def a_transform_with_a_pattern(ocp: Any, root: Path) -> Iterator[Any]:
    yield transformed(ocp, root, {r"(v+)": ocp.Transform(original_key="w")})


@refuses("`support_layout=True`")
def a_target_with_layouts(ocp: Any, root: Path) -> Iterator[Any]:
    with stored(ocp, root, state()) as mngr:
        args = ocp.args.StandardRestore(state(0), support_layout=True)
        yield tried(lambda: mngr.restore(1, args=args)["w"])


@refuses("`support_layout=True`")
def restore_args_with_layouts(ocp: Any, root: Path) -> Iterator[Any]:
    construct = ocp.checkpoint_utils.construct_restore_args
    yield tried(lambda: construct({"n": 3}, support_layout=True)["n"].restore_type)


@refuses("`register_type_handler`")
def a_handler_of_a_type(ocp: Any, root: Path) -> Iterator[Any]:
    class Handler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "text"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            return []

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            return []

        async def metadata(self, infos: Any) -> Any:
            return []

    class Kind:
        pass

    yield tried(lambda: ocp.type_handlers.register_type_handler(Kind, Handler()))


@refuses("`active_processes`")
def a_manager_of_some_processes(ocp: Any, root: Path) -> Iterator[Any]:
    some = ocp.checkpoint_manager.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="some"
    )
    options = ocp.CheckpointManagerOptions(multiprocessing_options=some, create=False)
    root.mkdir()
    yield tried(lambda: ocp.CheckpointManager(root, options=options).all_steps())


@refuses("deletions of single items")
def a_deletion_of_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    ocp.v1.save_checkpointables(root, {"a": state(), "b": state()})
    yield tried(lambda: ocp.v1.delete(root, checkpointable_name="a"))
