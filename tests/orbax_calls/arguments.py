"""Contracts of arguments, handlers and registries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from google.protobuf.struct_pb2 import Struct

from tests.orbax_calls.contracts import contract, differs, tried
from tests.orbax_calls.managers import blocking, composite, saved, state

# --- Composite ------------------------------------------------------------------------------------


@contract
def a_composite_by_name_and_by_attribute(ocp: Any, root: Path) -> Iterator[Any]:
    args = composite(ocp)
    yield args.config is args["config"], args.get("config") is args.config, "config" in args
    yield sorted(args), len(args), sorted(name for name, _ in args.items())
    yield [isinstance(args[name], ocp.args.CheckpointArgs) for name in sorted(args)]


@contract
def a_composite_is_not_changed(ocp: Any, root: Path) -> Iterator[Any]:
    args = composite(ocp)

    def change() -> None:
        args.config = 3

    yield isinstance(tried(change), str), isinstance(args.config, ocp.args.JsonSave)


@contract
def a_composite_of_other_names(ocp: Any, root: Path) -> Iterator[Any]:
    args = ocp.args.Composite(**{"a-b": ocp.args.JsonSave({"x": 1}), "c.d": ocp.args.JsonSave({})})
    with ocp.CheckpointManager(root) as mngr:
        yield mngr.save(1, args=args)
        yield mngr.restore(1)["a-b"]


@contract
def an_item_that_is_nothing_is_restored_as_it_was_saved(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=composite(ocp))
        yield mngr.restore(1, args=ocp.args.Composite(config=None))
        yield mngr.restore(1, args=ocp.args.Composite(state=None))


@contract
def items_of_steps_that_differ(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        for step, names in enumerate((("a", "b"), ("a",), ("c", "a"))):
            args = {name: ocp.args.JsonSave({"step": step}) for name in names}
            mngr.save(step, args=ocp.args.Composite(**args))
        for step in range(3):
            yield mngr.restore(step)


@contract
def a_declared_item_that_is_not_saved(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, item_names=("state", "config")) as mngr:
        yield mngr.save(1, args=ocp.args.Composite(config=ocp.args.JsonSave({"a": 1})))
        yield mngr.restore(1, args=ocp.args.Composite(config=ocp.args.JsonRestore()))


@contract
def an_item_that_is_not_declared(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root, item_names=("state",)) as mngr:
        yield tried(lambda: mngr.save(1, args=ocp.args.Composite(b=ocp.args.JsonSave({}))))
        yield mngr.all_steps()


@contract
def an_item_called_metadata(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root, metadata={"of": "the root"}) as mngr:
        args = ocp.args.Composite(metadata=ocp.args.JsonSave({"of": "the item"}))
        yield mngr.save(1, args=args, custom_metadata={"of": "the step"})
        yield mngr.restore(1).metadata
        yield mngr.metadata().custom_metadata, mngr.metadata(1).custom_metadata


# --- Handlers of items ----------------------------------------------------------------------------


@contract
def one_handler(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1).close()
    with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        yield mngr.restore(1)
        yield mngr.restore(1, args=ocp.args.StandardRestore(state(0)))
        yield mngr.save(2, args=ocp.args.StandardSave(state(2)))


@contract
def handlers_by_name(ocp: Any, root: Path) -> Iterator[Any]:
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as mngr:
        yield mngr.save(1, args=composite(ocp))
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as mngr:
        yield mngr.restore(1)


@contract
def arguments_that_a_handler_does_not_take(ocp: Any, root: Path) -> Iterator[Any]:
    with blocking(ocp, root, item_handlers=ocp.PyTreeCheckpointHandler()) as mngr:
        yield tried(lambda: mngr.save(1, args=ocp.args.StandardSave(state())))
        yield mngr.all_steps(), mngr.save(1, args=ocp.args.PyTreeSave(state()))


@contract
def arguments_that_the_handler_of_an_item_does_not_take(ocp: Any, root: Path) -> Iterator[Any]:
    handlers = {"config": ocp.JsonCheckpointHandler()}
    with blocking(ocp, root, item_handlers=handlers) as mngr:
        args = ocp.args.Composite(config=ocp.args.StandardSave(state()))
        yield tried(lambda: mngr.save(1, args=args))


@contract
def names_and_handlers_of_other_items(ocp: Any, root: Path) -> Iterator[Any]:
    handlers = {"config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(root, item_names=("state",), item_handlers=handlers) as mngr:
        yield mngr.save(1, args=composite(ocp))
        yield mngr.restore(1).config


@contract
def names_and_one_handler(ocp: Any, root: Path) -> Iterator[Any]:
    handler = ocp.StandardCheckpointHandler()
    yield tried(lambda: ocp.CheckpointManager(root, item_names=("a",), item_handlers=handler))


@contract
def arguments_without_a_handler(ocp: Any, root: Path) -> Iterator[Any]:
    @dataclasses.dataclass
    class Unknown(ocp.args.CheckpointArgs):
        item: Any = None

    with blocking(ocp, root) as mngr:
        yield tried(lambda: mngr.save(1, args=Unknown(3)))
    yield tried(lambda: ocp.args.get_registered_handler_cls(Unknown))


@contract
def arguments_are_registered_for_something(ocp: Any, root: Path) -> Iterator[Any]:
    class Handler(ocp.CheckpointHandler):
        pass

    register = ocp.args.register_with_handler
    yield tried(lambda: register(Handler)(ocp.args.CheckpointArgs))
    yield tried(lambda: register(Handler, for_save=True)(int))


@contract
def the_handlers_of_arguments(ocp: Any, root: Path) -> Iterator[Any]:
    for name in ("Standard", "PyTree", "Json", "Array", "Proto", "JaxRandomKey", "NumpyRandomKey"):
        for what in ("Save", "Restore"):
            found = ocp.args.get_registered_handler_cls(getattr(ocp.args, name + what))
            yield found.__name__


@contract
def a_handler_without_registered_arguments(ocp: Any, root: Path) -> Iterator[Any]:
    class Lines(ocp.CheckpointHandler):
        def save(self, directory: Any, item: Any, end: str = "\n") -> None:
            (directory / "lines.txt").write_text(end.join(item))

        def restore(self, directory: Any, item: Any = None, end: str = "\n") -> Any:
            return (directory / "lines.txt").read_text().split(end)

        def metadata(self, directory: Any) -> Any:
            return None

    with ocp.Checkpointer(Lines()) as ckptr:
        ckptr.save(root / "a", ["x", "y"])
        yield ckptr.restore(root / "a")
        ckptr.save(root / "b", ["x", "y"], end=";")
        yield ckptr.restore(root / "b", end=";")


@contract
def a_handler_is_told_that_a_save_ends(ocp: Any, root: Path) -> Iterator[Any]:
    class Noted(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "a.txt").write_text(args.item)

        def restore(self, directory: Any, args: Any) -> Any:
            return (directory / "a.txt").read_text(), (directory / "b.txt").read_text()

        def finalize(self, directory: Any) -> None:
            (directory / "b.txt").write_text("finalized")

        def metadata(self, directory: Any) -> Any:
            return None

    @ocp.args.register_with_handler(Noted, for_save=True)
    @dataclasses.dataclass
    class NotedSave(ocp.args.CheckpointArgs):
        item: Any

    @ocp.args.register_with_handler(Noted, for_restore=True)
    @dataclasses.dataclass
    class NotedRestore(ocp.args.CheckpointArgs):
        item: Any = None

    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(note=NotedSave("x")))
        yield mngr.restore(1, args=ocp.args.Composite(note=NotedRestore()))


# --- Registries -----------------------------------------------------------------------------------


@contract
def a_registry_of_handlers(ocp: Any, root: Path) -> Iterator[Any]:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    save, json = ocp.args.StandardSave, ocp.args.JsonSave
    registry.add("state", save, ocp.StandardCheckpointHandler())
    registry.add(None, json, ocp.JsonCheckpointHandler)
    yield registry.has("state", save), registry.has("other", save), registry.has(None, json)
    yield type(registry.get("state", save)).__name__, type(registry.get(None, json)).__name__
    yield isinstance(tried(lambda: registry.get("state", ocp.args.ArraySave)), str)
    yield isinstance(tried(lambda: registry.add("state", save)), str)
    yield len(registry.get_all_entries())


@contract
def a_registry_begins_with_another(ocp: Any, root: Path) -> Iterator[Any]:
    first = ocp.handlers.DefaultCheckpointHandlerRegistry()
    first.add("state", ocp.args.StandardSave, ocp.StandardCheckpointHandler())
    second = ocp.handlers.DefaultCheckpointHandlerRegistry(first)
    second.add("config", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    yield len(first.get_all_entries()), len(second.get_all_entries())


@contract
def a_manager_with_a_registry(ocp: Any, root: Path) -> Iterator[Any]:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = ocp.PyTreeCheckpointHandler()
    registry.add("tree", ocp.args.PyTreeSave, handler)
    registry.add("tree", ocp.args.PyTreeRestore, handler)
    with ocp.CheckpointManager(root, handler_registry=registry) as mngr:
        args = ocp.args.Composite(
            tree=ocp.args.PyTreeSave(state()), other=ocp.args.JsonSave({"a": 1})
        )
        yield mngr.save(1, args=args)
        args = ocp.args.Composite(
            tree=ocp.args.PyTreeRestore(state(0)), other=ocp.args.JsonRestore()
        )
        yield mngr.restore(1, args=args)


@contract
def arguments_of_the_users_own(ocp: Any, root: Path) -> Iterator[Any]:
    class MySave(ocp.args.StandardSave):
        pass

    class MyRestore(ocp.args.StandardRestore):
        pass

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = ocp.StandardCheckpointHandler()
    registry.add(None, MySave, handler)
    registry.add(None, MyRestore, handler)
    with ocp.CheckpointManager(root, handler_registry=registry) as mngr:
        yield mngr.save(1, args=MySave(state()))
        yield mngr.restore(1, args=MyRestore(state(0)))


# --- Values that are no trees ---------------------------------------------------------------------


@contract
def json_of_all_kinds(ocp: Any, root: Path) -> Iterator[Any]:
    item = {"l": [1, -2.5, "ü\n", None, True, []], "d": {"e": {}}, "big": 2**53, "exp": 1e-300}
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.JsonSave(item))
        yield mngr.restore(1, args=ocp.args.JsonRestore())


@contract
def json_with_numbers_as_keys(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.JsonSave({1: "a", "b": (1, 2)}))
        yield mngr.restore(1, args=ocp.args.JsonRestore())


@contract
def what_is_no_json(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as ckptr:
        yield isinstance(tried(lambda: ckptr.save(root / "a", {"x": object()})), str)
        yield (root / "a").exists()


@contract
def an_array_of_numpy_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(a=ocp.args.ArraySave(np.arange(4, dtype=np.int16))))
        yield mngr.restore(1).a


@contract
def an_array_as_the_one_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.ArraySave(jnp.arange(4)))
        yield mngr.restore(1, args=ocp.args.ArrayRestore())


@contract
def an_array_as_an_item_with_restore_args(ocp: Any, root: Path) -> Iterator[Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(a=ocp.args.ArraySave(jnp.arange(4.0))))
        each = ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=spec, dtype=jnp.bfloat16)
        args = ocp.args.Composite(a=ocp.args.ArrayRestore(restore_args=each))
        yield mngr.restore(1, args=args).a


@contract
def a_key_without_a_type_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        key = jax.random.PRNGKey(5)
        mngr.save(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeySave(key)))
        yield mngr.restore(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeyRestore())).key


@contract
def several_keys_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        keys = jax.random.split(jax.random.key(5), 3)
        mngr.save(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeySave(keys)))
        found = mngr.restore(1, args=ocp.args.Composite(key=ocp.args.JaxRandomKeyRestore())).key
        yield str(jax.random.key_impl(found)), jax.random.key_data(found)


@contract
def a_message_as_an_item(ocp: Any, root: Path) -> Iterator[Any]:
    message = Struct()
    message.update({"lr": 0.5, "name": "x"})
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(m=ocp.args.ProtoSave(message)))
        found = mngr.restore(1, args=ocp.args.Composite(m=ocp.args.ProtoRestore(Struct))).m
        yield type(found) is Struct, found["lr"], found["name"]


@differs("an item is known without its handler", {0: "TreeMetadata"})
def metadata_of_a_manager_that_is_opened_later(ocp: Any, root: Path) -> Iterator[Any]:
    saved(ocp, root, 1).close()
    with ocp.CheckpointManager(root) as mngr:
        yield type(mngr.metadata(1).item_metadata).__name__
    with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as mngr:
        yield mngr.metadata(1).item_metadata["w"].shape


@differs("an item is known without its handler", {0: {"a": 1}})
def an_item_that_is_nothing_in_a_manager_that_is_opened_later(
    ocp: Any, root: Path
) -> Iterator[Any]:
    with ocp.CheckpointManager(root) as mngr:
        mngr.save(1, args=ocp.args.Composite(config=ocp.args.JsonSave({"a": 1})))
    with ocp.CheckpointManager(root) as mngr:
        yield tried(lambda: mngr.restore(1, args=ocp.args.Composite(config=None)).config)
        yield mngr.restore(1).config
