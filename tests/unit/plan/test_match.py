"""A target against what is stored: it fits, or every difference is one line by leaf path."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from msgspec.structs import replace

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, ShardingEntry, decode_item, encode_item
from ckpt._format.places import describe_sharding, rebuild_sharding
from ckpt._plan.adapt import Adapt, adapted
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.match import Match, match_as_saved, match_target
from ckpt._plan.save_plan import plan_save
from ckpt._plan.targets import ArrayTarget
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_specs import classify
from ckpt._tree.structure import describe
from ckpt.errors import CheckpointError, CorruptCheckpointError, TargetMismatchError
from ckpt.testing.compare import differences
from ckpt.testing.strategies import Pair, trees
from tests.unit.tree.test_flatten import Boxed


def stored(tree: Any) -> ItemEntry:
    """The entry of an item as it is after `tree` was saved."""
    structure = describe(tree)
    specs = [classify(*pair) for pair in zip(structure.leaves, structure.names, strict=True)]
    plan = plan_save(structure.names, specs, 1 << 30)
    digests = [["0" * 32] * len(batch.chunks) for batch in plan.batches]
    files = [f"d/{number:032x}" for number in range(len(digests))]
    report = ItemReport.of(plan.batches, files, digests)
    tree = PlannedTree(structure.nodes, plan.leaves, structure.leaves)
    item = tree.filled(ItemEntry(handler="pytree"), ChunkTable.merged(plan.leaves, [report]))
    check_leaves(item)
    return decode_item(encode_item(item))


@dataclasses.dataclass
class Found:
    """A match, leaf by leaf.

    `targets` has what each array is read as and None for other leaves; `numbers` the stored leaf
    that each array is.
    """

    match: Match
    targets: list[ArrayTarget | None]
    numbers: list[int | None]


def leaf_by_leaf(found: Match) -> Found:
    places = [found.places.get(number) for number in range(len(found.values))]
    reads = [None if place is None else found.reads[place] for place in places]
    return Found(
        found,
        [None if read is None else read.target for read in reads],
        [None if read is None else read.leaf for read in reads],
    )


def match(tree: Any, like: Any) -> Found:
    item = stored(tree)
    return leaf_by_leaf(match_target(describe(like), adapted(item, Adapt()), Adapt()))


def as_saved(item: ItemEntry) -> Found:
    return leaf_by_leaf(match_as_saved(item, adapted(item, Adapt()), Adapt()))


def problems(tree: Any, like: Any) -> tuple[str, ...]:
    with pytest.raises(TargetMismatchError) as caught:
        match(tree, like)
    message = str(caught.value)
    count = len(caught.value.problems)
    assert f"in {count} {'leaf' if count == 1 else 'leaves'}" in message
    assert all(line in message for line in caught.value.problems)
    return caught.value.problems


def mesh(*sizes: int) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("x", "y")[: len(sizes)])


def on(placed: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(placed, PartitionSpec(*spec))


def sds(*shape: int, dtype: Any = "float32", sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def state() -> dict[str, Any]:
    return {
        "params": {
            "w": jax.device_put(np.zeros((8, 4), np.float32), on(mesh(2, 4), "x", "y")),
            "b": jnp.zeros(4, jnp.bfloat16),
        },
        "host": [np.zeros((2, 3), np.int64), np.float16(1)],
        "step": 7,
        "rate": 0.5,
        "name": "run",
        "none": None,
    }


# -- what fits ------------------------------------------------------------------------------------


@given(trees())
def test_a_tree_fits_itself(tree: Any) -> None:
    structure = describe(tree)
    found = match(tree, tree)
    assert sorted(found.match.used) == sorted(structure.names)
    assert not found.match.kept
    for number, (leaf, target) in enumerate(zip(structure.leaves, found.targets, strict=True)):
        if isinstance(leaf, np.ndarray | np.generic):
            kind = "numpy" if isinstance(leaf, np.ndarray) else "numpy_scalar"
            assert target == ArrayTarget(kind, leaf.dtype)
            assert found.numbers[number] == number
        else:
            assert target is None
            assert differences(leaf, found.match.values[number]) == []


@given(trees())
def test_without_a_target_all_comes_back_as_it_was(tree: Any) -> None:
    found, fitting = as_saved(stored(tree)), match(tree, tree)
    assert found.targets == fitting.targets
    assert found.numbers == fitting.numbers
    assert differences(fitting.match.values, found.match.values) == []
    assert not found.match.moved


def test_a_state_fits_itself_and_its_abstract_self() -> None:
    tree = state()
    abstract = jax.tree.map(
        lambda x: sds(*x.shape, dtype=x.dtype, sharding=x.sharding) if x_is_jax(x) else x, tree
    )
    expected = {
        "params.w": ArrayTarget("jax", np.dtype("float32"), tree["params"]["w"].sharding),
        # jnp.zeros is bound to no device, and stays so.
        "params.b": ArrayTarget("jax", DTYPES["bfloat16"], None),
        "host.0": ArrayTarget("numpy", np.dtype("int64")),
        "host.1": ArrayTarget("numpy_scalar", np.dtype("float16")),
        "step": None,
        "rate": None,
        "name": None,
    }
    names = describe(tree).names
    for found in (match(tree, tree), match(tree, abstract)):
        assert dict(zip(names, found.targets, strict=True)) == expected
    found = as_saved(stored(tree))
    assert dict(zip(names, found.targets, strict=True)) == expected
    assert not found.match.moved


def x_is_jax(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def test_containers_may_differ_where_the_leaf_paths_agree() -> None:
    class Params(NamedTuple):
        w: Any
        b: Any

    tree = {"params": {"b": 1, "w": 2.0}, "pair": Pair(True, "x"), "list": [1, 2]}
    like = {"params": Params(0.0, 0), "pair": {"second": "", "first": False}, "list": (1, 2)}
    found = match(tree, like).match
    names = describe(like).names
    assert list(found.used) == list(names)
    assert dict(zip(names, found.values, strict=True)) == {
        "list.0": 1,
        "list.1": 2,
        "pair.first": True,
        "pair.second": "x",
        "params.b": 1,
        "params.w": 2.0,
    }


def test_a_type_stands_for_a_python_scalar() -> None:
    assert match({"a": 1, "b": "x"}, {"a": int, "b": str}).match.values == [1, "x"]


@pytest.mark.parametrize("kind", ["jax", "numpy", "numpy_scalar"])
def test_what_an_array_comes_back_as_is_the_choice_of_the_target(kind: str) -> None:
    like = {
        "jax": (sds(), jnp.float32(0)),
        "numpy": (np.zeros((), np.float32), SimpleNamespace(shape=(), dtype="f4", kind="numpy")),
        "numpy_scalar": (np.float32(0),),
    }[kind]
    for tree in (np.zeros((), np.float32), np.float32(0), jnp.zeros(())):
        for leaf in like:
            (target,) = match(tree, leaf).targets
            assert target is not None
            assert (target.kind, target.dtype) == (kind, np.float32)


def test_the_sharding_of_the_target_is_the_one_that_comes_back() -> None:
    wanted = on(mesh(4), None, "x")
    tree = {"w": state()["params"]["w"]}
    for like in (sds(8, 4, sharding=wanted), jax.device_put(np.zeros((8, 4), "f4"), wanted)):
        assert match(tree, {"w": like}).targets == [ArrayTarget("jax", np.dtype("f4"), wanted)]
    there = ArrayTarget("jax", np.dtype("f4"), tree["w"].sharding)
    assert match(tree, {"w": sds(8, 4)}).targets == [there]


# -- skipped leaves -------------------------------------------------------------------------------


@given(trees(), st.data())
def test_three_dots_skip_a_leaf_and_only_that(tree: Any, data: st.DataObject) -> None:
    leaves, treedef = jax.tree.flatten(tree)
    skipped = [data.draw(st.booleans()) for _ in leaves]
    like = jax.tree.unflatten(
        treedef, [... if skip else leaf for leaf, skip in zip(leaves, skipped, strict=True)]
    )
    found, all_of_it = match(tree, like), match(tree, tree)
    for number, skip in enumerate(skipped):
        assert found.targets[number] == (None if skip else all_of_it.targets[number])
        value = ... if skip else all_of_it.match.values[number]
        assert differences(value, found.match.values[number]) == []
    assert len(found.match.reads) == sum(target is not None for target in found.targets)


def test_three_dots_skip_a_whole_branch_and_what_is_beside_it_counts() -> None:
    like = {"params": ..., "host": ..., "step": 0, "rate": 0.0, "name": "", "none": None}
    found = match(state(), like)
    assert not found.match.reads
    assert found.match.used == ["name", "rate", "step"]
    assert match(state(), ...).match.values == [...]
    del like["name"]
    (line,) = problems(state(), like)
    assert line.startswith("name: ")
    (line,) = problems({"ab": 1, "a": [2]}, {"a": ...})
    assert line.startswith("ab: ")


# -- one mutation, one line -----------------------------------------------------------------------


def other_shape(leaf: Any) -> Any:
    return np.zeros((*np.shape(leaf), 2), leaf.dtype)


def other_kind_of_dtype(leaf: Any) -> Any:
    numbers = (np.bool_, np.int8, np.float32, np.complex64)
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return [
        np.zeros(np.shape(leaf), dtype)
        for dtype, kind in zip(numbers, kinds, strict=True)
        if not jnp.issubdtype(leaf.dtype, kind)
    ]


@given(trees(), st.data())
def test_one_leaf_that_differs_is_one_line_that_names_it(tree: Any, data: st.DataObject) -> None:
    leaves, treedef = jax.tree.flatten(tree)
    names = describe(tree).names
    assume(leaves)
    number = data.draw(st.integers(0, len(leaves) - 1))
    leaf = leaves[number]
    if isinstance(leaf, np.ndarray | np.generic):
        mutations = [
            other_shape(leaf),
            *other_kind_of_dtype(leaf),
            # Both at once are still one leaf.
            other_shape(other_kind_of_dtype(leaf)[0]),
            sds(*leaf.shape, 1, dtype=np.float32),
            b"text",
            str,
            "text",
            object(),
        ]
    else:
        others = [True, 1, 1.5, 1j, "x", b"x"]
        mutations = [other for other in others if type(other) is not type(leaf)]
        mutations += [type(other) for other in mutations] + [np.zeros(2), sds(1)]
    leaves[number] = data.draw(st.sampled_from(mutations))
    (line,) = problems(tree, jax.tree.unflatten(treedef, leaves))
    assert line.startswith(f"{names[number]}: ")


MUTATIONS: dict[str, tuple[Any, list[str]]] = {
    "another length": (("params", "w", sds(8, 5)), ["params.w"]),
    "another rank": (("params", "b", sds(4, 1)), ["params.b"]),
    "another kind of dtype": (("params", "b", sds(4, dtype="int32")), ["params.b"]),
    "shape and dtype": (("params", "b", sds(5, dtype="int32")), ["params.b"]),
    "64 bits switched off": (
        ("params", "b", SimpleNamespace(shape=(4,), dtype="f8")),
        ["params.b"],
    ),
    "a sharding of too many parts": (
        ("params", "b", sds(4, dtype="bfloat16", sharding=on(mesh(8), "x"))),
        ["params.b"],
    ),
    "a sharding of too many axes": (
        ("params", "b", sds(4, 1, dtype="bfloat16", sharding=on(mesh(2, 4), "x", "y"))),
        ["params.b"],
    ),
    "a scalar for an array": (("params", "w", 3.0), ["params.w"]),
    "an array for a scalar": (("step", jnp.zeros(1, jnp.int32)), ["step"]),
    "another scalar": (("step", 7.0), ["step"]),
    "a bool for an int": (("step", True), ["step"]),
    "an int for a float": (("rate", 1), ["rate"]),
    "bytes for a str": (("name", b"run"), ["name"]),
    "a typed key": (("params", "b", sds(dtype=jax.random.key(0).dtype)), ["params.b"]),
    "an array of typed keys": (
        ("params", "b", jax.random.split(jax.random.key(0), 4)),
        ["params.b"],
    ),
    "text as dtype": (("params", "b", np.array(["a"] * 4)), ["params.b"]),
    "an unknown object": (("step", object()), ["step"]),
    "none for a leaf": (("step", None), ["step"]),
    "a leaf for none": (("none", 1), ["none"]),
    "a node for a leaf": (("step", {"x": 1}), ["step", "step.x"]),
    "a leaf for a node": (("host", 1), ["host", "host.0", "host.1"]),
    "an extra leaf": (("params", "extra", sds(1)), ["params.extra"]),
    "an extra leaf to skip": (("params", "extra", ...), ["params.extra"]),
}


@pytest.mark.parametrize("change", MUTATIONS)
def test_each_kind_of_difference_names_its_leaf_once(change: str) -> None:
    (*path, last, value), named = MUTATIONS[change]
    like = state()
    node = like
    for key in path:
        node = node[key]
    node[last] = value
    lines = problems(state(), like)
    assert sorted(line.split(":")[0] for line in lines) == sorted(named)


def test_a_leaf_missing_from_the_target_is_a_difference() -> None:
    like = state()
    del like["params"]["w"]
    (line,) = problems(state(), like)
    assert line.startswith("params.w: stored float32[8, 4]")


def test_a_renamed_leaf_is_told_of_with_the_name_it_may_have_had() -> None:
    like = state()
    like["params"]["ww"] = like["params"].pop("w")
    lines = problems(state(), like)
    assert [line.split(":")[0] for line in lines] == ["params.ww", "params.w"]
    assert "'params.w'" in lines[0]


def test_all_differences_are_listed_at_once() -> None:
    count = 300
    tree = [np.zeros(2, np.float32)] * count
    lines = problems_of_many(tree, [np.zeros(3, np.float32)] * count)
    assert [line.split(":")[0] for line in lines] == [str(n) for n in range(count)]


def problems_of_many(tree: Any, like: Any) -> tuple[str, ...]:
    """As `problems`; a long message shows the first lines only."""
    with pytest.raises(TargetMismatchError) as caught:
        match(tree, like)
    assert len(str(caught.value).splitlines()) < 300
    assert "100 more" in str(caught.value)
    return caught.value.problems


def test_a_line_says_what_is_stored_and_what_was_wanted() -> None:
    (line,) = problems({"w": np.zeros((2, 3), np.float32)}, {"w": sds(4, 3)})
    assert line == "w: stored float32[2, 3], wanted shape [4, 3]"


# -- dtypes ---------------------------------------------------------------------------------------


def category(name: str) -> str:
    if name == "bool":
        return "bool"
    if "complex" in name:
        return "complex"
    return "float" if "float" in name else "int"


@pytest.mark.parametrize("wanted", sorted(DTYPES))
def test_a_cast_stays_within_a_kind(wanted: str) -> None:
    for name, dtype in DTYPES.items():
        tree, like = np.zeros(2, dtype), np.zeros(2, DTYPES[wanted])
        # A diverged value would come out of these as a healthy one.
        rounded = wanted not in ("float4_e2m1fn", "float8_e8m0fnu") or wanted == name
        if category(name) == category(wanted) and rounded:
            assert match(tree, like).targets == [ArrayTarget("numpy", DTYPES[wanted])]
        else:
            (line,) = problems(tree, like)
            assert wanted in line
            assert name in line


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_are_never_cut_silently(name: str) -> None:
    tree = {"x": np.zeros(2, name)}
    like = {"x": SimpleNamespace(shape=(2,), dtype=name)}
    (line,) = problems(tree, like)
    assert "jax_enable_x64" in line
    item = stored(tree)
    jaxy = replace(item, leaves=LeafTable.of([replace(item.leaves[0], kind="jax")]))
    with pytest.raises(TargetMismatchError, match="jax_enable_x64"):
        as_saved(jaxy)
    with jax.enable_x64(True):
        assert match(tree, like).targets == [ArrayTarget("jax", np.dtype(name))]
        assert as_saved(jaxy).targets == [ArrayTarget("jax", np.dtype(name))]


# -- shardings ------------------------------------------------------------------------------------

SHARDINGS = [
    on(mesh(8), "x"),
    on(mesh(2, 4), "y", "x"),
    on(mesh(2, 4), None, ("x", "y")),
    on(mesh(2, 4)),
    NamedSharding(Mesh(np.array(jax.devices())[::-1], ("a",)), PartitionSpec("a")),
    SingleDeviceSharding(jax.devices()[5]),
]


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_a_sharding_comes_back_on_the_same_devices(sharding: Any) -> None:
    text = msgspec.json.encode(describe_sharding(sharding))
    assert rebuild_sharding(msgspec.json.decode(text, type=ShardingEntry)) == sharding


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_an_array_goes_back_to_where_it_was(sharding: Any) -> None:
    tree = [jax.device_put(np.zeros((16, 8), np.float32), sharding)]
    found = as_saved(stored(tree))
    assert found.targets == [ArrayTarget("jax", np.dtype("f4"), sharding)]
    assert not found.match.moved


def test_an_array_of_devices_that_are_gone_goes_to_a_mesh_of_those_that_are_here() -> None:
    item = stored({"w": state()["params"]["w"]})
    gone = replace(item.shardings[0], device_ids=list(range(100, 108)))
    sharding = state()["params"]["w"].sharding
    found = as_saved(replace(item, shardings=[gone]))
    assert found.targets == [ArrayTarget("jax", np.dtype("f4"), sharding)]
    assert not found.match.moved
    single = replace(gone, kind="single", device_ids=[100])
    found = as_saved(replace(item, shardings=[single]))
    assert found.targets == [ArrayTarget("jax", np.dtype("f4"), None)]
    assert list(found.match.moved) == ["w"]


EIGHT: dict[str, Any] = {
    "device_ids": list(range(8)),
    "axis_names": ["x"],
    "axis_sizes": [8],
    "axis_types": ["Auto"],
}
ENTRIES = st.builds(
    ShardingEntry,
    kind=st.sampled_from(["named", "single", "other", ""]),
    platform=st.sampled_from(["cpu", "cpu", "cpu", "gpu", "", "x" * 50]),
    device_ids=st.one_of(
        st.sampled_from([list(range(8)), [0], [0, 0], []]), st.lists(st.integers(-1, 9), max_size=8)
    ),
    memory_kind=st.sampled_from([None, None, "device", "unpinned_host", "nowhere"]),
    axis_names=st.sampled_from([["x"], ["x", "y"], ["x", "x"], [], ["y", "x", ""]]),
    axis_sizes=st.sampled_from([[8], [2, 4], [-1], [0], [], [-1, -1], [2**70], [1, 1, 8]]),
    axis_types=st.sampled_from([[], ["Auto"], ["Auto", "Auto"], ["Explicit"], ["mro"], ["Manual"]]),
    spec=st.lists(
        st.one_of(st.none(), st.sampled_from(["x", "y", "z", ["x", "y"], ["x", "x"], []])),
        max_size=3,
    ),
)


@given(ENTRIES)
@example(ShardingEntry(kind="named", platform="cpu", spec=["x", "x"], **EIGHT))
@example(ShardingEntry(kind="named", platform="cpu", spec=[["x", "x"]], **EIGHT))
@example(ShardingEntry(kind="named", platform="cpu", spec=["y"], **EIGHT))
def test_a_record_of_a_sharding_that_cannot_be_gives_no_sharding(entry: ShardingEntry) -> None:
    assert rebuild_sharding(entry) is None or entry.kind in ("named", "single")


@given(ENTRIES, st.sampled_from([[], [8], [8, 8], [3], [0, 2]]))
@example(describe_sharding(on(mesh(2, 4), "x", "y")), [8])
def test_a_hostile_sharding_is_a_mismatch_or_is_left_out(
    entry: ShardingEntry, shape: list[int]
) -> None:
    leaf = LeafEntry(name="w", kind="jax", dtype="float32", shape=shape, chunks=shape, sharding=0)
    item = ItemEntry(handler="pytree", leaves=LeafTable.of([leaf]), shardings=[entry])
    try:
        found = as_saved(item)
    except TargetMismatchError as error:
        (line,) = error.problems
        assert line.startswith("w: ")
        return
    (target,) = found.targets
    assert target is not None
    if target.sharding is None:
        assert list(found.match.moved) == ["w"]
    else:
        target.sharding.shard_shape(tuple(shape))


def test_array_kinds_are_those_a_target_can_ask_for() -> None:
    assert {"jax", "key", "numpy", "numpy_scalar"} == ARRAY_KINDS


# -- PRNG keys ------------------------------------------------------------------------------------


def key_entry(impl: str, dtype: str, *shape: int) -> ItemEntry:
    sides = list(shape)
    leaf = LeafEntry(name="rng", kind="key", dtype=dtype, shape=sides, chunks=sides, impl=impl)
    return ItemEntry(handler="pytree", leaves=LeafTable.of([leaf]))


@pytest.mark.parametrize(
    ("impl", "dtype", "shape"),
    [
        ("threefry2x32", "uint32", (3,)),
        ("threefry2x32", "uint32", (2, 4)),
        ("threefry2x32", "uint32", ()),
        ("threefry2x32", "float32", (2,)),
        ("threefry2x32", "int32", (2,)),
        ("rbg", "uint32", (2,)),
    ],
)
def test_key_data_that_are_none_of_their_implementation_are_corruption(
    impl: str, dtype: str, shape: tuple[int, ...]
) -> None:
    item = key_entry(impl, dtype, *shape)
    with pytest.raises(CorruptCheckpointError):
        as_saved(item)
    like = jax.random.split(jax.random.key(0, impl=impl), shape[:-1])
    with pytest.raises(CheckpointError):
        match_target(describe(like), adapted(item, Adapt()), Adapt())


def test_a_key_of_an_unknown_implementation_is_a_mismatch() -> None:
    with pytest.raises(TargetMismatchError, match="no implementation 'of_the_future'"):
        as_saved(key_entry("of_the_future", "uint32", 2))


# -- boxes ----------------------------------------------------------------------------------------


@st.composite
def boxed_trees(draw: st.DrawFn) -> tuple[Any, Any]:
    """A target with boxes, and a tree that others made of it: a box is one of three things."""
    number = draw(st.integers(0, 99))
    if draw(st.booleans()):
        keys = draw(st.lists(st.sampled_from(["a", "b", "value"]), unique=True, max_size=3))
        pairs = {key: draw(boxed_trees()) for key in keys}
        one, other = ({key: pair[n] for key, pair in pairs.items()} for n in (0, 1))
        return one, other
    leaf = np.float32(number)
    if draw(st.booleans()):
        return leaf, leaf
    return Boxed(leaf), draw(st.sampled_from([leaf, {"value": leaf}, Boxed(leaf)]))


@given(boxed_trees())
def test_boxes_match_values_of_others_with_and_without_their_key(pair: tuple[Any, Any]) -> None:
    target, tree = pair
    found = match(tree, target)
    expected = [float(leaf) for leaf in jax.tree.leaves(tree)]
    numbers = [number for number in found.numbers if number is not None]
    assert [expected[number] for number in numbers] == [
        float(leaf) for leaf in jax.tree.leaves(target)
    ]
