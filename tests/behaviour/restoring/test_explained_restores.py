"""What is said of a restore beforehand is what it does: the same bytes, as many requests."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding

import ckpt
from ckpt._inspection.locations import checkpoint_at
from ckpt._inspection.restores.explanation import explain_restore
from ckpt._inspection.restores.placements import Spec, TargetMesh
from ckpt._inspection.restores.read_volume import ProcessReads, RestoreExplanation
from ckpt.errors import InvalidArgumentError, TargetMismatchError
from tests.support.counted_reads import Reads
from tests.support.trees import P

KIB, MIB = 1 << 10, 1 << 20
LARGE = (512, 1024)
STEP = 3


def explained(path: Path, mesh: TargetMesh | None = None, **options: Any) -> RestoreExplanation:
    return explain_restore(anyio.run(checkpoint_at, str(path)), mesh, **options)


def alone(found: RestoreExplanation) -> ProcessReads:
    (process,) = found.processes
    return process


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def state() -> dict[str, Any]:
    """Arrays that lie in every way, large and small ones."""
    mesh = mesh_of(x=2, y=4)

    def on(array: Any, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    large = np.arange(np.prod(LARGE), dtype=np.float32).reshape(LARGE)
    shared = on(large + 1, "x")
    keys = np.ones((256, 256, 2), np.uint32)
    return {
        "rows": on(large, ("y", "x")),
        "columns": on(large, None, ("x", "y")),
        "tiles": on(large, "x", "y"),
        "everywhere": on(large),
        "half": on(large.astype(jnp.bfloat16), "y"),
        "packed": on(np.tile(large[:, :64], (1, 16)), None, "y"),
        "free": jnp.asarray(large - 1),
        "weak": on(jnp.full(LARGE, 2.0), "x"),
        "small": {str(n): on(np.full((8, 8 * n + 8), n), "x") for n in range(40)},
        "again": [shared, shared],
        "odd": on(np.ones((24, 24 * 7 * 31), np.float32), None, "y"),
        "keys": on(jax.random.wrap_key_data(jnp.asarray(keys)), "x"),
        "empty": on(np.ones((8, 0)), "x"),
        "host": np.ones((300, 70), np.int16),
        "scalar": jnp.float32(2),
        "plain": 7,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose chunks fit its own shardings more or less."""
    root = tmp_path_factory.mktemp("explained") / "runs"
    formats = {
        "packed": ckpt.ArrayFormat(compression="zstd", chunk_bytes=300_000),
        "odd": ckpt.ArrayFormat(chunk_bytes=50_000, split_axes=(1,)),
        "rows": ckpt.ArrayFormat(chunk_bytes=2 * MIB),
        "**": ckpt.ArrayFormat(chunk_bytes=256 * KIB),
    }
    with ckpt.sync.CheckpointManager(root, formats=formats) as mgr:
        mgr.save(STEP, state())
    return root


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def restored(root: Path, like: Any, reads: Reads, budget: int, **options: Any) -> list[int]:
    """Return what is read by a new manager, in how many requests, and what is held then."""
    staging = ckpt.Staging(budget_bytes=budget)
    with ckpt.sync.CheckpointManager(root, mode="r", staging=staging) as mgr:
        reads.take()
        found = mgr.restore(STEP, like, **options)
    requests = len(reads.parts)
    # One array may be at several places.
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(found)}
    return [reads.take(), requests, sum(map(held_bytes, leaves.values()))]


def held_bytes(leaf: Any) -> int:
    if not isinstance(leaf, jax.Array):
        return leaf.nbytes if isinstance(leaf, np.ndarray) else 0
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return sum(shard.data.nbytes for shard in data.addressable_shards)


def told(process: ProcessReads) -> list[int]:
    return [process.read, process.requests, process.held]


def abstract(sharding: NamedSharding, leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def target_on(mesh: Mesh, specs: dict[str, Any]) -> dict[str, Any]:
    """The state as a target on a mesh; arrays without a spec are on every device."""

    def like(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = specs.get(path[0].key, ())
        return abstract(NamedSharding(mesh, P(*spec)), leaf)

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(like, state())
    return found


@pytest.mark.parametrize("budget", [MIB, 20 * MIB, 1 << 30])
def test_a_restore_as_saved(root: Path, reads: Reads, budget: int) -> None:
    found = explained(root, budget=budget)
    process = alone(found)
    assert told(process) == restored(root, None, reads, budget)
    assert process.devices == 8
    assert found.read == process.read
    assert found.leaves == []


# The axes of a mesh, and the specs that differ from what is kept of the stored ones.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "the same": ({"x": 2, "y": 4}, {}, {}),
    "transposed": ({"y": 4, "x": 2}, {}, {}),
    "one axis is gone": ({"y": 4}, {}, {}),
    "one device": ({"x": 1}, {}, {}),
    "other axes": ({"z": 8}, {}, {}),
    "rows become columns": (
        {"x": 2, "y": 4},
        {"rows": (None, ("x", "y")), "columns": (("x", "y"),)},
        {"rows": ((), ("x", "y")), "columns": (("x", "y"),)},
    ),
    "odd parts": (
        {"a": 3, "b": 2},
        {"odd": (None, "a"), "packed": ("b",)},
        {"odd": ((), ("a",)), "packed": (("b",),)},
    ),
}
STORED: dict[str, Any] = {
    "rows": (("y", "x"),),
    "columns": (None, ("x", "y")),
    "tiles": ("x", "y"),
    "half": ("y",),
    "packed": (None, "y"),
    "weak": ("x",),
    "small": ("x",),
    "again": ("x",),
    "odd": (None, "y"),
    "keys": ("x",),
    "empty": ("x",),
}


def kept(axes: dict[str, int]) -> dict[str, Any]:
    """The stored specs, without the axes that a mesh has not."""

    def part(over: Any) -> Any:
        names = [name for name in ([over] if isinstance(over, str) else over or ()) if name in axes]
        return tuple(names) or None

    return {name: tuple(part(over) for over in spec) for name, spec in STORED.items()}


@pytest.mark.parametrize("budget", [MIB, 1 << 30])
@pytest.mark.parametrize("case", MESHES)
def test_a_restore_onto_a_mesh(root: Path, reads: Reads, case: str, budget: int) -> None:
    axes, specs, given = MESHES[case]
    found = explained(root, TargetMesh(axes, list(given.items())), budget=budget)
    like = target_on(mesh_of(**axes), kept(axes) | specs)
    process = alone(found)
    assert told(process) == restored(root, like, reads, budget)
    assert process.devices == len(mesh_of(**axes).devices.flat)


@pytest.mark.parametrize("select", ["rows", "small.*", "again"])
def test_a_part_of_a_checkpoint(root: Path, reads: Reads, select: str) -> None:
    process = alone(explained(root, select=[select], budget=MIB))
    adapt = ckpt.Adapt(select=select)
    assert told(process) == restored(root, None, reads, MIB, adapt=adapt)


def test_some_items(tmp_path: Path, reads: Reads) -> None:
    items = {name: {"w": jnp.ones((512, 512)) * n} for n, name in enumerate("abc")}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(STEP, items=items | {"notes": "two words"})
    for names in (["a", "b", "c"], ["b"]):
        process = alone(explained(tmp_path, items=names, budget=MIB))
        like = dict.fromkeys(names)
        assert told(process) == restored(tmp_path, None, reads, MIB, items=like)
    (other,) = explained(tmp_path).others
    assert (other.name, other.handler) == ("notes", "bytes")
    assert alone(explained(tmp_path, items=["notes"])).read == 0


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_a_checkpoint_of_orbax(tmp_path: Path, reads: Reads, use_ocdbt: bool) -> None:
    mesh = mesh_of(x=2, y=4)
    large = jnp.arange(float(np.prod(LARGE)), dtype=jnp.float32).reshape(LARGE)
    tree = {
        "tiles": jax.device_put(large, NamedSharding(mesh, P("x", "y"))),
        "everywhere": jax.device_put(large, NamedSharding(mesh, P())),
        "small": [jnp.full(5, float(n)) for n in range(5)],
        "host": np.arange(5, dtype=np.int32),
    }
    path = tmp_path / "orbax"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    reads.take()
    ckpt.sync.metadata(path)
    opening = len(reads.parts), reads.take()
    for axes, spec in (({"x": 2, "y": 4}, ("x", "y")), ({"x": 8}, (None, "x"))):
        on = mesh_of(**axes)
        specs: list[tuple[str, Spec]] = [
            ("tiles", tuple(() if part is None else (part,) for part in spec)),
            ("**", ()),
        ]
        process = alone(explained(path, TargetMesh(axes, specs)))
        reads.take()
        like = {
            name: jax.tree.map(
                partial(abstract, NamedSharding(on, P(*(spec if name == "tiles" else ())))), branch
            )
            for name, branch in tree.items()
        }
        ckpt.sync.load(path, like=like)
        requests = len(reads.parts)
        assert (requests - opening[0], reads.take() - opening[1]) == (
            process.requests,
            process.read,
        )


def test_a_virtual_step(tmp_path: Path, reads: Reads) -> None:
    source = tmp_path / "old"
    tree = {"a": jnp.ones(LARGE), "b": [jnp.ones(5), jnp.zeros((300, 300))]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(source, args=ocp.args.PyTreeSave(tree))
    ckpt.sync.adopt(source, tmp_path / "runs", step=STEP)
    process = alone(explained(tmp_path / "runs", budget=MIB))
    assert told(process) == restored(tmp_path / "runs", None, reads, MIB)
    assert process.most_of is not None
    assert process.most_of.share is not None
    assert 0 < process.most_of.share <= 1


def test_nothing_of_the_arrays_is_read(root: Path, tmp_path: Path, reads: Reads) -> None:
    shutil.copytree(root, tmp_path / "runs")
    expected = explained(tmp_path / "runs", TargetMesh({"x": 8}))
    for file in (tmp_path / "runs").glob("*/default/d/*"):
        # A hole of the same size, in which there is nothing of it.
        size = file.stat().st_size
        file.write_bytes(b"")
        os.truncate(file, size)
    assert explained(tmp_path / "runs", TargetMesh({"x": 8})) == expected
    assert reads.parts == []


def test_advice_that_is_taken_leaves_nothing_to_say(tmp_path: Path) -> None:
    mesh = mesh_of(x=8)
    rows, columns = NamedSharding(mesh, P("x")), TargetMesh({"x": 8}, [("**", ((), ("x",)))])
    tree = {f"layer{n}": {"w": jax.device_put(jnp.ones((1024, 1024)), rows)} for n in range(3)}
    ckpt.sync.save(tmp_path / "a", tree)
    found = explained(tmp_path / "a", columns, processes=8)
    assert [leaf.path for leaf in found.leaves] == [f"layer{n}.w" for n in range(3)]
    assert all(leaf.amplification == pytest.approx(8) for leaf in found.leaves)
    (advice,) = found.advice
    assert (advice.pattern, advice.arrays) == ("layer*.w", 3)
    assert advice.wasted == 7 * 3 * 4 * MIB
    chosen = ckpt.ArrayFormat(chunk_bytes=advice.chunk_bytes, split_axes=advice.split_axes)
    ckpt.sync.save(tmp_path / "b", tree, formats={advice.pattern: chosen})
    better = explained(tmp_path / "b", columns, processes=8)
    assert (better.leaves, better.advice) == ([], [])
    assert found.read - better.read == advice.wasted
    # In one process, every chunk is needed and read once.
    assert explained(tmp_path / "a", columns).leaves == []


def test_what_cannot_be_cut_is_refused_as_by_a_restore(root: Path) -> None:
    with pytest.raises(TargetMismatchError) as caught:
        explained(root, TargetMesh({"x": 5}))
    assert "rows: array axis 0 is partitioned 5 times, but the dimension size is 512" in str(
        caught.value
    )
    with pytest.raises(TargetMismatchError, match="does not divide it"):
        ckpt.sync.load(root / str(STEP), like=target_on(mesh_of(x=5), kept({"x": 5})))
    assert caught.value.step == STEP


def test_wrong_wishes_say_what_there_is(root: Path) -> None:
    for mesh, options, text in (
        (None, {"items": ["model"]}, "no item 'model'; the checkpoint has default"),
        (None, {"select": ["row"]}, "is it 'rows'"),
        (TargetMesh({"x": 2}, [("row", ())]), {}, "is it 'rows'"),
        (TargetMesh({"x": 2}, [("rows", (("y",),))]), {}, "no axis 'y', only x"),
        (TargetMesh({"x": 2}, [("**", ()), ("rows", ())]), {}, "has no effect"),
        (TargetMesh({"x": 2}), {"processes": 3}, "2 devices cannot be divided among 3"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            explained(root, mesh, **options)


def test_what_was_assumed_is_said_once(root: Path) -> None:
    (note,) = explained(root, TargetMesh({"y": 4})).notes
    assert note.startswith("the mesh has no axis 'x', over which ")
    assert explained(root, TargetMesh({"x": 2, "y": 4})).notes == []
