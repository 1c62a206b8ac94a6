"""Writes small checkpoints in every layout that the installed Orbax knows, and what is in them.

It runs with any version from 0.1.8 on, and with the jax of its time. So it imports nothing of this
repository, and asks Orbax for what only some versions have. What a version cannot write is left
out, and the reason is noted.

    python write_samples.py <directory> [<archive of it>]
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import os
import shutil
import sys
import tarfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Moments = namedtuple("Moments", ["mu", "nu"])
STEPS = (3, 10)
LOSSES = {3: 0.25, 10: 0.75}
PREFIX = "ckpt"
CONFIG = {"lr": 0.5, "layers": [1, 2], "name": "small"}


# -- what is saved --------------------------------------------------------------------------------


def full() -> dict[str, Any]:
    """Arrays of many kinds, in containers of many kinds."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    rows = jnp.arange(32, dtype=jnp.float32).reshape(8, 4) / 4
    return {
        "params": {
            "kernel": jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data", "model"))),
            "copies": jax.device_put(rows[0], NamedSharding(mesh, PartitionSpec())),
            "bias": jnp.array([0.5, -2.0, 3.0], jnp.bfloat16),
            "half": jnp.array([1.5, 2.5], jnp.float16),
            "mask": jnp.array([True, False]),
            "zeros": jnp.zeros((5, 2)),
        },
        "layers": [jnp.full(2, 7, jnp.int32), (jnp.ones(3), jnp.uint8(9))],
        "moments": Moments(jnp.full(2, 0.125), jnp.zeros(3, jnp.int8)),
        "host": np.arange(5, dtype=np.int16) - 2,
        "dotted.key": jnp.full(4, 2.5),
        "count": 3,
        "rate": 2.5,
    }


def empties() -> dict[str, Any]:
    """Nodes without leaves."""
    return {"w": jnp.ones(2), "nothing": None, "empty": {}, "no_list": [], "deep": {"none": None}}


def texts() -> dict[str, Any]:
    """Leaves that only some checkpointers save."""
    deep = {"name": "gr\u00f6\u00dfer", "number": np.float32(1.25)}
    return {"w": jnp.ones(2), "name": "small", "deep": deep}


def sequence() -> list[Any]:
    """A tree that is no dict."""
    return [jnp.arange(3), {"w": jnp.ones(2)}]


def step_state(step: int = STEPS[-1]) -> dict[str, Any]:
    """What a manager saves."""
    return {"w": jnp.arange(4.0) + step, "opt": [jnp.full(2, step), jnp.ones(1)], "step": step}


STATES: dict[str, Callable[[], Any]] = {
    "full": full,
    "empties": empties,
    "texts": texts,
    "sequence": sequence,
    "step": step_state,
}


def described(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their places, as JSON has them."""
    return dict(_leaves(tree, ""))


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    if hasattr(node, "_asdict"):
        node = node._asdict()
    if isinstance(node, dict | list | tuple):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            yield from _leaves(child, f"{place}/{key}")
    elif isinstance(node, bool | int | float | str):
        yield place, {"value": node}
    elif node is not None:
        array = np.asarray(node)
        numbers = array.astype(np.float64) if array.dtype.name == "bfloat16" else array
        about = {"dtype": array.dtype.name, "shape": list(array.shape), "values": numbers.tolist()}
        yield place, about


# -- how it is saved ------------------------------------------------------------------------------


def save(path: Path, handler: Any, state: Any, **options: Any) -> None:
    """Save a state with a handler."""
    ocp.Checkpointer(handler).save(path, state, **options)


def close(manager: Any) -> None:
    """Wait for what a manager does in the background, and end it."""
    for name in ("wait_until_finished", "close"):
        if hasattr(manager, name):
            getattr(manager, name)()


def as_files(path: Path, state: Any) -> None:
    """A directory for each array."""
    save(path, _handler_of_files(), state)


def _handler_of_files(**options: Any) -> Any:
    try:
        return ocp.PyTreeCheckpointHandler(use_ocdbt=False, **options)
    except TypeError:
        # The oldest versions know nothing else.
        return ocp.PyTreeCheckpointHandler(**options)


def as_database(path: Path, state: Any) -> None:
    """One OCDBT database."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
    with contextlib.suppress(ValueError):
        save(path, handler, state)
    if (path / "manifest.ocdbt").exists():
        return
    # The first versions with a database want to be told twice.
    import tensorstore

    shutil.rmtree(path, ignore_errors=True)
    register = ocp.type_handlers.register_standard_handlers_with_options
    register(use_ocdbt=True, ts_context=tensorstore.Context({"cache_pool#ocdbt": {}}))
    try:
        save(path, handler, state)
    finally:
        register(use_ocdbt=False)


def with_metadata(path: Path, state: Any) -> None:
    """With `_METADATA`, which versions had an option for before all wrote it."""
    save(path, _handler_of_files(write_tree_metadata=True), state)


def as_v3_files(path: Path, state: Any) -> None:
    """A directory for each array, in zarr v3."""
    save(path, ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True), state)


def as_v3_database(path: Path, state: Any) -> None:
    """A database of zarr v3."""
    save(path, ocp.PyTreeCheckpointHandler(use_zarr3=True), state)


def as_default(path: Path, state: Any) -> None:
    """What the checkpointer of trees does when it is told nothing."""
    ocp.PyTreeCheckpointer().save(path, state)


def _aggregating(path: Path, state: Any, chosen: Callable[[Any], bool]) -> None:
    def choose(leaf: Any) -> Any:
        return ocp.SaveArgs(aggregate=chosen(leaf))

    arguments = jax.tree_util.tree_map(choose, state)
    save(path, _handler_of_files(), state, save_args=arguments)


def as_one_file(path: Path, state: Any) -> None:
    """Everything in the file of msgpack, but arrays in parts, which do not go there."""
    _aggregating(path, state, lambda leaf: getattr(leaf, "is_fully_replicated", True))


def as_mixture(path: Path, state: Any) -> None:
    """Small arrays in the file of msgpack, the others in directories."""
    _aggregating(path, state, lambda leaf: np.size(leaf) < 4)


def as_standard(path: Path, state: Any) -> None:
    """What the checkpointer of standard trees does."""
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, state)
    if hasattr(checkpointer, "wait_until_finished"):
        checkpointer.wait_until_finished()


def in_chunks(path: Path, state: Any) -> None:
    """Arrays in several chunks each."""
    arguments = jax.tree_util.tree_map(lambda _: ocp.SaveArgs(chunk_byte_size=8), state)
    save(path, ocp.PyTreeCheckpointHandler(use_zarr3=True), state, save_args=arguments)


def with_classes(path: Path, state: Any) -> None:
    """With the classes of containers in the metadata."""
    from orbax.checkpoint._src.metadata import pytree_metadata_options

    options = pytree_metadata_options.PyTreeMetadataOptions(support_rich_types=True)
    save(path, ocp.PyTreeCheckpointHandler(pytree_metadata_options=options), state)


def with_v1(path: Path, state: Any) -> None:
    """By the newer of the interfaces."""
    interface = v1()
    saver = getattr(interface, "save_pytree", None) or interface.save
    saver(path, state)


def v1() -> Any:
    """Return the newer of the interfaces."""
    try:
        from orbax.checkpoint import v1 as found
    except ImportError:
        from orbax.checkpoint.experimental import v1 as found
    return found


LAYOUTS: dict[str, Callable[[Path, Any], None]] = {
    "default": as_default,
    "files": as_files,
    "database": as_database,
    "v3-files": as_v3_files,
    "v3-database": as_v3_database,
    "one-file": as_one_file,
    "mixture": as_mixture,
    "standard": as_standard,
    "chunks": in_chunks,
    "metadata": with_metadata,
    "classes": with_classes,
    "v1": with_v1,
}
# The others write nothing else for the other states.
WITH_EVERY_STATE = ("default", "one-file", "standard", "classes", "v1")


# -- roots of managers ----------------------------------------------------------------------------


def _options(**more: Any) -> Any:
    return ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], best_mode="min", **more
    )


def by_checkpointer(root: Path) -> dict[str, Any]:
    """One unnamed item, as managers had it before there were arguments."""
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    manager = ocp.CheckpointManager(root, handler, options=_options())
    for step in STEPS:
        manager.save(step, step_state(step), metrics={"loss": LOSSES[step]})
    close(manager)
    return {"default": STATES["step"]()}


def by_checkpointers(root: Path) -> dict[str, Any]:
    """Several items, as managers had them before there were arguments."""
    savers = {
        "state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        "array": ocp.Checkpointer(ocp.ArrayCheckpointHandler()),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    manager = ocp.CheckpointManager(root, savers, options=_options(step_prefix=PREFIX))
    items: dict[str, Any] = {}
    for step in STEPS:
        items = {"state": step_state(step), "array": np.arange(3), "config": CONFIG}
        save_kwargs = {"state": {"save_args": None}}
        manager.save(step, items, save_kwargs=save_kwargs, metrics={"loss": LOSSES[step]})
    close(manager)
    return items


def by_arguments(root: Path) -> dict[str, Any]:
    """One unnamed item."""
    manager = ocp.CheckpointManager(root, options=_options(step_prefix=PREFIX))
    for step in STEPS:
        arguments = ocp.args.StandardSave(step_state(step))
        manager.save(step, args=arguments, metrics={"loss": LOSSES[step]})
    close(manager)
    return {"default": STATES["step"]()}


def by_composite(root: Path) -> dict[str, Any]:
    """Several items, of every kind that there is."""
    items = {"state": step_state(), "array": np.arange(3), "config": CONFIG}
    savers = {
        "state": ocp.args.PyTreeSave,
        "array": ocp.args.ArraySave,
        "config": ocp.args.JsonSave,
    }
    manager = ocp.CheckpointManager(root, options=_options(step_format_fixed_length=6))
    for step in STEPS:
        items["state"] = step_state(step)
        composite = ocp.args.Composite(**{name: savers[name](items[name]) for name in savers})
        manager.save(step, args=composite, metrics={"loss": LOSSES[step]})
    close(manager)
    return items


def by_composite_of_keys(root: Path) -> dict[str, Any]:
    """Keys of jax, as items of their own."""
    manager = ocp.CheckpointManager(root)
    raw, typed = jax.random.PRNGKey(5), jax.random.key(5)
    for step in STEPS:
        composite = ocp.args.Composite(
            raw=ocp.args.JaxRandomKeySave(raw), typed=ocp.args.JaxRandomKeySave(typed)
        )
        manager.save(step, args=composite)
    close(manager)
    return {"raw": raw, "typed": raw}


def by_v1(root: Path) -> dict[str, Any]:
    """By the newer of the interfaces."""
    with v1().training.Checkpointer(root) as checkpointer:
        for step in STEPS:
            saver = getattr(checkpointer, "save_pytree", None) or checkpointer.save
            saver(step, step_state(step), metrics={"loss": LOSSES[step]})
    return {"default": STATES["step"]()}


ROOTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "manager-checkpointer": by_checkpointer,
    "manager-checkpointers": by_checkpointers,
    "manager-arguments": by_arguments,
    "manager-composite": by_composite,
    "manager-keys": by_composite_of_keys,
    "manager-v1": by_v1,
}


# -- all of it ------------------------------------------------------------------------------------


def write_all(to: Path) -> None:
    """Write every sample into a directory, and `expected.json`, which tells what is in them."""
    samples: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for layout, write in LAYOUTS.items():
        names = ("empties", "texts", "sequence") if layout in WITH_EVERY_STATE else ()
        for state in ("full", *names):
            name = f"{layout}-{state}"
            try:
                write(to / name, STATES[state]())
            except Exception as error:
                skipped[name] = _reason(to / name, error)
            else:
                samples[name] = {"state": state, "leaves": described(STATES[state]())}
    for name, write_root in ROOTS.items():
        (to / name).mkdir()
        try:
            items = write_root(to / name)
        except Exception as error:
            skipped[name] = _reason(to / name, error)
        else:
            folders = [each.name for each in (to / name).iterdir() if each.name[-1].isdigit()]
            steps = sorted(folders, key=lambda folder: int(folder.rpartition("_")[2]))
            metrics = None if name == "manager-keys" else LOSSES
            samples[name] = {
                "items": {item: described(value) for item, value in items.items()},
                "steps": steps,
                "metrics": metrics,
            }
    expected = {"samples": samples, "skipped": skipped}
    (to / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True))


def _reason(path: Path, error: Exception) -> str:
    for each in path.parent.glob(f"{path.name}*"):
        shutil.rmtree(each, ignore_errors=True)
    return f"{type(error).__name__}: {error!s:.120}"


def pack(folder: Path, archive: Path) -> None:
    """Put a directory into an archive, the same bytes for the same files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            about = tarfile.TarInfo(path.relative_to(folder).as_posix())
            if path.is_dir():
                about.type, about.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(about)
            else:
                data = path.read_bytes()
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
    archive.write_bytes(lzma.compress(content.getvalue(), preset=9))


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True)
    write_all(target)
    if len(sys.argv) > 2:
        pack(target, Path(sys.argv[2]))
