"""`ckpt.Adapt` repeats, transposes and reshapes arrays, and reads no more of them for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt.surgery import concatenate, repeat, reshape, split, stack, transpose, unstack
from tests.behaviour.adapting.adapted_state import counted, load, model, resized, same, zeros
from tests.support.trees import P, bits, mesh, sharded

DTYPES = ["float32", "bfloat16", "int8", "int4", "bool", "complex64"]


def test_heads_are_repeated_kernels_transposed_and_fused_axes_taken_apart(saved: Path) -> None:
    layers = model()["params"]["layers"]
    transforms = [
        transpose("params.layers.*.w"),
        reshape("params.layers.*.b", [2, -1]),
        repeat("params.layers.*.b", 3),
        repeat("params.embed", 2, axis=-1),
    ]
    wanted: dict[str, Any] = {
        "layers": [{"w": x["w"].T, "b": np.repeat(x["b"].reshape(2, 4), 3, 0)} for x in layers],
        "embed": np.repeat(model()["params"]["embed"], 2, axis=1),
    }
    for like in (None, {"params": zeros(wanted)}):
        found = load(saved, like, select="params", transforms=transforms)["params"]
        assert sorted(found) == ["embed", "layers"]
        same(found["embed"], wanted["embed"])
        for number, layer in enumerate(wanted["layers"]):
            place: Any = number if like else str(number)
            same(found["layers"][place], layer)


def test_a_model_of_torch_becomes_one_of_jax_on_any_devices(tmp_path: Path) -> None:
    """Grouped-query attention: two heads for keys become eight, and fused axes heads."""
    width, heads, length, layers = 16, 2, 4, 3
    weights = {
        f"model.layers.{n}.attention.key.weight": counted(heads * length, width, start=1000 * n)
        for n in range(layers)
    }
    save_file(weights, tmp_path / "model.safetensors")
    transforms = [
        transpose("model.layers.*.attention.key.weight"),
        reshape("model.layers.*.attention.key.weight", [width, heads, length]),
        repeat("model.layers.*.attention.key.weight", 4, axis=1),
        stack("model.layers.*", to="layers"),
    ]
    wanted = np.stack(
        [np.repeat(x.T.reshape(width, heads, length), 4, axis=1) for x in weights.values()]
    )
    for spec in (P(None, "data", "model"), P(None, None, ("model", "data")), P()):
        placed = NamedSharding(mesh(2, 4), spec)
        leaf = jax.ShapeDtypeStruct(wanted.shape, jnp.bfloat16, sharding=placed)
        like = {"layers": {"attention": {"key": {"weight": leaf}}}}
        found = load(tmp_path / "model.safetensors", like, transforms=transforms)
        array = found["layers"]["attention"]["key"]["weight"]
        assert array.sharding == placed
        assert bits(array) == wanted.astype(jnp.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits_in_any_form(tmp_path: Path, dtype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(jnp.dtype(dtype))
    ckpt.sync.save(tmp_path / "x", {"a": sharded(array, "model"), "b": array})
    transforms = [transpose("*"), reshape("*", [3, 2, -1]), repeat("*", 2, axis=1)]
    wanted = np.repeat(array.T.reshape(3, 2, 4), 2, axis=1)
    found = load(tmp_path / "x", transforms=transforms)
    assert bits(found["a"]) == bits(found["b"]) == wanted.tobytes()
    assert found["a"].dtype == found["b"].dtype == array.dtype


def test_gaps_that_were_padded_go_along(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"a": counted(2, 3, start=1)})
    like = {"a": np.ones((5, 7), np.float32)}
    wanted = np.zeros((5, 7), np.float32)
    wanted[:3, :4] = np.repeat(counted(2, 3, start=1).T, 2, axis=1)
    found = load(tmp_path / "x", like, transforms=[transpose("a"), repeat("a", 2, 1)], resize="pad")
    same(found["a"], wanted)


# -- what is read ---------------------------------------------------------------------------------


def read_bytes(root: Path, like: Any, *transforms: Any) -> tuple[Any, int]:
    """Restore step 0 of a root; return what is found, and how many bytes were read."""
    events: list[ckpt.types.Event] = []
    with ckpt.sync.CheckpointManager(root, observers=[events.append]) as manager:
        found = manager.restore(0, like=like, adapt=ckpt.Adapt(transforms=transforms))
    return found, sum(event.nbytes for event in events if event.phase == "read")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with an array of 16 MiB, in eight chunks of rows, each of which is read by itself."""
    root = tmp_path_factory.mktemp("rows")
    with ckpt.sync.CheckpointManager(root) as manager:
        manager.save(0, {"a": sharded(counted(1024, 4096), ("data", "model"))})
        manager.wait_until_finished()
    return root


FORMS: dict[str, tuple[Any, Any]] = {
    "repeat": ([repeat("a", 4)], lambda a: np.repeat(a, 4, 0)),
    "repeat across": ([repeat("a", 3, axis=1)], lambda a: np.repeat(a, 3, 1)),
    "transpose": ([transpose("a")], lambda a: a.T),
    "reshape": ([reshape("a", [8, 128, 32, -1])], lambda a: a.reshape(8, 128, 32, -1)),
    "flat": ([reshape("a", [-1])], lambda a: a.reshape(-1)),
    "all": (
        [reshape("a", [1024, 32, -1]), transpose("a", [2, 0, 1]), repeat("a", 2, axis=2)],
        lambda a: np.repeat(a.reshape(1024, 32, -1).transpose(2, 0, 1), 2, 2),
    ),
    "there and back": (
        [unstack("a", to="row.*", axis=1), stack("row.*", to="a"), transpose("a")],
        lambda a: a,
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("place", ["numpy", "replicated", "sharded"])
def test_every_byte_is_read_once(rows: Path, name: str, place: str) -> None:
    transforms, expected = FORMS[name]
    wanted = expected(counted(1024, 4096))
    like: Any = zeros(wanted)
    if place != "numpy":
        spec = P() if place == "replicated" else P(("data", "model"))
        like = jax.ShapeDtypeStruct(
            wanted.shape, np.float32, sharding=NamedSharding(mesh(2, 4), spec)
        )
    found, nbytes = read_bytes(rows, {"a": like}, *transforms)
    assert bits(found["a"]) == wanted.tobytes()
    assert nbytes == 16 << 20


@pytest.mark.parametrize("shape", [(8, 128, 32, 128), (8, 128, 32, 130), (8, 128, 40, 128)])
def test_large_chunks_go_straight_to_their_place_only_where_they_are_one_run(
    rows: Path, shape: tuple[int, ...]
) -> None:
    found = load(
        rows / "0",
        {"a": np.empty(shape, np.float32)},
        transforms=[reshape("a", [8, 128, 32, 128])],
        resize="pad",
    )
    same(found["a"], resized(counted(1024, 4096).reshape(8, 128, 32, 128), shape))


PARTS: dict[str, tuple[Any, Any, Any, int]] = {
    "half a chunk, repeated": ([repeat("a", 4)], FORMS["repeat"][1], np.s_[1024:1280], 1),
    "columns of columns": ([transpose("a")], np.transpose, np.s_[:, 128:256], 1),
    "rows of columns": ([transpose("a")], np.transpose, np.s_[:64], 8),
    "blocks": ([reshape("a", [8, 128, -1])], lambda a: a.reshape(8, 128, -1), np.s_[3:5], 2),
    "quarters of rows": (
        [reshape("a", [4096, -1])],
        lambda a: a.reshape(4096, -1),
        np.s_[:512],
        1,
    ),
    "turned blocks": (
        [reshape("a", [8, 128, -1]), transpose("a", [1, 0, 2])],
        lambda a: a.reshape(8, 128, -1).swapaxes(0, 1),
        np.s_[:, 2:4],
        2,
    ),
}


def only(transform: Any) -> Any:
    """A transform that leaves out all but the array `a`."""
    return lambda sources: {"a": transform(sources)["a"]}


@pytest.mark.parametrize("name", PARTS)
def test_of_what_is_not_wanted_nothing_is_read(rows: Path, name: str) -> None:
    """A part that is cut out of the array in its new form needs the chunks that hold it."""
    transforms, expected, region, chunks = PARTS[name]
    array = expected(counted(1024, 4096))
    cuts = []
    for axis, part in enumerate(region if isinstance(region, tuple) else (region,)):
        start, stop, _ = part.indices(array.shape[axis])
        sizes = [start, stop - start, array.shape[axis] - stop]
        cuts.append(only(split("a", to=["before", "a", "after"], axis=axis, sizes=sizes)))
    found, nbytes = read_bytes(rows, {"a": zeros(array[region])}, *transforms, *cuts)
    same(found["a"], np.ascontiguousarray(array[region]))
    assert nbytes == chunks << 21


# -- any of them, one after the other -------------------------------------------------------------

NAMES = ["repeat", "transpose", "reshape", "split", "concatenate", "stack", "unstack"]


def step(name: str, array: Any, data: st.DataObject) -> tuple[list[Any], Any]:
    """Transforms of the leaf `a`, and what numpy makes of it."""
    if name == "transpose":
        axes = data.draw(st.permutations(range(array.ndim)))
        return [transpose("a", axes)], np.transpose(array, axes)
    if name == "reshape":
        first = data.draw(
            st.sampled_from([n for n in range(1, array.size + 1) if array.size % n == 0])
        )
        rest = array.size // first
        second = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        shape = data.draw(st.permutations([first, second, -1]))
        return [reshape("a", shape)], array.reshape(shape)
    if name == "stack" or not array.ndim:
        axis = data.draw(st.integers(0, array.ndim))
        copies = [lambda sources: {"b.0": sources["a"], "b.1": sources["a"]}]
        return [*copies, stack("b.*", to="a", axis=axis)], np.stack([array, array], axis)
    axis = data.draw(st.integers(0, array.ndim - 1))
    if name == "repeat":
        times = data.draw(st.integers(1, 3))
        return [repeat("a", times, axis)], np.repeat(array, times, axis)
    cut = data.draw(st.integers(0, array.shape[axis] - 1))
    if name == "unstack":
        apart = unstack("a", to="b.*", axis=axis)
        return [apart, lambda sources: {"a": sources[f"b.{cut}"]}], np.take(array, cut, axis)
    sizes = [cut, array.shape[axis] - cut]
    parts = split("a", to=["b", "c"], axis=axis, sizes=sizes)
    before, behind = np.split(array, [cut], axis)
    if name == "split":
        return [parts, lambda sources: {"a": sources["c"]}], behind
    # The other way round.
    return [parts, concatenate(["c", "b"], to="a", axis=axis)], np.concatenate(
        [behind, before], axis
    )


@settings(max_examples=40)
@given(st.data())
def test_any_of_them_one_after_the_other_are_numpys(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("x") / "x"
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    array = counted(*shape, start=1, dtype=np.int32)
    side = data.draw(st.sampled_from([None, *(n for n, m in enumerate(shape) if m % 2 == 0)]))
    tree = {"a": array if side is None else sharded(array, *[None] * side, "data")}
    stored = ckpt.ArrayFormat(chunk_bytes=data.draw(st.sampled_from([None, 4096])))
    ckpt.sync.save(path, tree, formats={"a": stored})
    transforms: list[Any] = []
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=5)):
        if array.size < 2000:
            more, array = step(name, array, data)
            transforms += more
    free = ["data", "model"]
    spec: list[str | None] = []
    for length in array.shape:
        fitting = [None, *(each for each in free if length % {"data": 2, "model": 4}[each] == 0)]
        spec.append(data.draw(st.sampled_from(fitting)))
        free = [each for each in free if each != spec[-1]]
    placed = NamedSharding(mesh(2, 4), P(*spec))
    like = {"a": jax.ShapeDtypeStruct(array.shape, jnp.float32, sharding=placed)}
    found = load(path, like, transforms=transforms, cast={"a": "float32"})
    assert found["a"].sharding == placed
    assert bits(found["a"]) == array.astype(np.float32).tobytes()
