"""One tree of which each branch comes from another checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt import Adapt, Source
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    TargetMismatchError,
)
from ckpt.surgery import stack, transpose
from ckpt.testing.compare import differences
from tests.support.trees import P, bits, mesh, sharded


class Moments(NamedTuple):
    mean: Any
    count: Any


def state(start: int) -> dict[str, Any]:
    """A state with leaves of every kind."""
    return {
        "params": {
            "layers": [{"w": jnp.full((8, 4), start + n, jnp.float32)} for n in range(3)],
            "embed": np.arange(6, dtype=np.float32) + start,
        },
        "opt_state": (
            Moments(sharded(np.full((8, 4), start, np.float32), "data"), jnp.int32(start)),
            (),
        ),
        "key": jax.random.split(jax.random.key(start), 2),
        "scale": np.float16(start),
        "weak": jnp.asarray(float(start)),
        "step": start,
        "name": f"run {start}",
    }


def same(found: Any, wanted: Any) -> None:
    """The same to the bit, but for the order of keys, of which targets have their own."""
    one, other = (jax.tree.map(lambda leaf: leaf, tree) for tree in (wanted, found))
    assert differences(one, other) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of states, one of items, and a model that another library saved."""
    root = tmp_path_factory.mktemp("runs")
    ckpt.sync.save(root / "a", state(1))
    ckpt.sync.save(root / "b", state(2))
    ckpt.sync.save(root / "items", items={"model": state(3), "config": {"width": 4}})
    weights = {f"model.layers.{n}.weight": np.full((4, 8), n, np.float32) for n in range(3)}
    save_file({**weights, "model.embed": np.arange(6, dtype=np.float32)}, root / "m.safetensors")
    return root


def test_every_branch_is_that_of_its_checkpoint_to_the_bit(runs: Path) -> None:
    one, other = state(1), state(2)
    names = {"params": one, "opt_state": other, "key": other, "scale": one, "step": one}
    sources = {name: runs / ("a" if tree is one else "b") for name, tree in names.items()}
    sources |= {"weak": runs / "b", "name": runs / "b"}
    found: Any = ckpt.sync.load(sources, like=state(9))
    wanted = {**other, "params": one["params"], "scale": one["scale"], "step": 1}
    same(found, wanted)
    # Without a target a branch is nested dicts, as with at=.
    plain: Any = ckpt.sync.load(sources)
    assert list(plain) == list(sources)
    for name, source in sources.items():
        assert differences(ckpt.sync.load(source, at=name), plain[name]) == []


@pytest.mark.anyio
async def test_the_asyncio_call_is_the_same(runs: Path) -> None:
    like = {"params": state(9)["params"], "step": 0}
    found: Any = await ckpt.load({"params": runs / "a", "step": runs / "b"}, like)
    same(found, {"params": state(1)["params"], "step": 2})


def test_branches_inside_branches_go_where_the_target_wants_them(runs: Path) -> None:
    placed = NamedSharding(mesh(2, 4), P("model", "data"))
    layer = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=placed)}
    like = {"params": {"layers": [layer] * 3, "embed": np.zeros(6, np.float32)}, "first": layer}
    sources: dict[str, Any] = {
        "params.layers.1": runs / "b",
        "params.layers.0": runs / "a",
        "params.layers.2": Source(runs / "b", "params.layers.0"),
        "params.embed": str(runs / "b"),
        "first.w": Source(runs / "items", "model:opt_state.0.mean"),
    }
    found: Any = ckpt.sync.load(sources, like)
    layers = [*found["params"]["layers"], found["first"]]
    assert [float(each["w"][0, 0]) for each in layers] == [1, 3, 2, 3]
    assert all(each["w"].sharding == placed and each["w"].dtype == jnp.bfloat16 for each in layers)
    assert found["params"]["embed"].tolist() == [2, 3, 4, 5, 6, 7]
    plain: Any = ckpt.sync.load(sources)
    assert float(plain["params"]["layers"]["2"]["w"][0, 0]) == 2


def test_a_whole_model_becomes_a_branch_with_other_names(runs: Path) -> None:
    """Its own rules apply to it alone, and their paths begin below the branch."""
    names = Adapt(
        rename={"model.layers.*.weight": "layers.*.w", "model.embed": "embed"},
        transforms=[transpose("layers.*.w")],
    )
    like = {name: state(9)[name] for name in ("params", "step")}
    sources: dict[str, Any] = {"params": Source(runs / "m.safetensors"), "step": runs / "a"}
    found: Any = ckpt.sync.load(sources, like, adapt={"params": names})
    assert [float(each["w"][7, 3]) for each in found["params"]["layers"]] == [0, 1, 2]
    assert found["params"]["embed"].tolist() == list(range(6))
    assert found["step"] == 1
    stacked = Adapt(transforms=[stack("model.layers.*", to="layers")], extra="ignore")
    target = {"params": {"layers": {"weight": jnp.zeros((3, 4, 8))}}}
    found = ckpt.sync.load({"params": Source(runs / "m.safetensors")}, target, adapt=stacked)
    assert found["params"]["layers"]["weight"][2, 0, 0] == 2


def test_items_are_the_first_keys_of_a_checkpoint_that_has_them(runs: Path) -> None:
    found: Any = ckpt.sync.load({"model": runs / "items", "before": Source(runs / "a", "params")})
    assert differences(state(3), found["model"]) == []
    assert found["before"]["layers"]["2"]["w"][0, 0] == 3
    like = {"params": state(9)["params"]}
    # What has no arrays keeps nothing waiting.
    found = ckpt.sync.load({"config": runs / "items", "params": runs / "a"})
    assert (found["config"], len(found["params"])) == ({"width": 4}, 2)
    found = ckpt.sync.load({"params": Source(runs / "items", "model:params")}, like)
    same(found, {"params": state(3)["params"]})
    with pytest.raises(InvalidArgumentError, match=r"'params' from .*items: .*\(model, config\)"):
        ckpt.sync.load({"params": runs / "items"})


def test_modules_and_boxes_are_filled(tmp_path: Path) -> None:
    class Model(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.up = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
            self.down = nnx.Linear(4, 3, rngs=nnx.Rngs(seed))

    one, other, target = (nnx.state(Model(seed)) for seed in range(3))
    ckpt.sync.save(tmp_path / "a", one)
    ckpt.sync.save(tmp_path / "b", nnx.to_pure_dict(other))
    sources = {"up": tmp_path / "a", "down.kernel": tmp_path / "b", "down.bias": tmp_path / "a"}
    found: Any = ckpt.sync.load(sources, target)
    assert type(found) is type(target)
    assert bits(found["up"]["kernel"][...]) == bits(one["up"]["kernel"][...])
    assert bits(found["down"]["kernel"][...]) == bits(other["down"]["kernel"][...])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: Any


def test_branches_are_found_behind_boxes_which_have_no_key(runs: Path) -> None:
    like = {"box": Box({"w": state(9)["params"]["layers"][0]["w"], "step": 0})}
    source = Source(runs / "a", "params.layers.2.w")
    found: Any = ckpt.sync.load({"box.w": source, "box.step": Source(runs / "b", "step")}, like)
    assert isinstance(found["box"], Box)
    assert (found["box"].value["w"][0, 0], found["box"].value["step"]) == (3, 2)


# -- what is below no branch ----------------------------------------------------------------------


def test_leaves_below_no_branch_are_an_error_that_lists_them_all(runs: Path) -> None:
    sources = {"params": runs / "a", "opt_state.0.mean": runs / "b"}
    like = {**state(9), "params.more": 1, "name": ..., "activation": jnp.tanh}
    names = ["key", "opt_state.0.count", "params%2Emore", "scale", "step", "weak"]
    for adapt in (None, {"params": Adapt(missing="keep")}):
        with pytest.raises(TargetMismatchError, match=r"6 leaves .* params, opt_state") as caught:
            ckpt.sync.load(sources, like, adapt=adapt)
        assert [line.split(":")[0] for line in caught.value.problems] == names


def test_they_keep_their_values_if_they_may(runs: Path) -> None:
    like = {**state(9), "activation": jnp.tanh, "left out": ...}
    found: Any = ckpt.sync.load({"params": runs / "a"}, like, adapt=Adapt(missing="keep"))
    wanted = {**state(9), "params": state(1)["params"]}
    assert (found.pop("activation"), found.pop("left out")) == (jnp.tanh, ...)
    same(found, wanted)
    for leaf in (int, jax.ShapeDtypeStruct((2,), jnp.float32)):
        kept: Any = {**like, "step": leaf}
        found = ckpt.sync.load({"params": runs / "a"}, kept, adapt=Adapt(missing="keep"))
        assert found["step"] is leaf
    gone = jnp.zeros(3)
    gone.delete()
    with pytest.raises(TargetMismatchError, match=r"step: .*donated"):
        ckpt.sync.load({"params": runs / "a"}, {**like, "step": gone}, adapt=Adapt(missing="keep"))


# -- what is refused ------------------------------------------------------------------------------

LIKE = {"params": {"w": 1}, "step": 0}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no branch": (lambda: ckpt.sync.load({}), "empty"),
    "no path": (lambda: ckpt.sync.load({5: "a"}), "leaf path of a branch"),  # type: ignore[dict-item]
    "an empty path": (lambda: ckpt.sync.load({"": "a"}), "leaf path of a branch"),
    "a pattern": (lambda: ckpt.sync.load({"a.*": "a"}), "leaf path of a branch"),
    "no checkpoint": (lambda: ckpt.sync.load({"a": None}), "branch 'a': path=None"),  # type: ignore[dict-item]
    "a pair": (lambda: ckpt.sync.load({"a": ("b", "c")}), "branch 'a': path="),  # type: ignore[dict-item]
    "a pattern there": (lambda: ckpt.sync.load({"a": Source("x", "b.*")}), "Source.at='b.*'"),
    "nothing there": (lambda: ckpt.sync.load({"a": Source("x", "")}), "Source.at=''"),
    "items": (lambda: ckpt.sync.load({"a": "x"}, items=["b"]), "items= goes with one checkpoint"),
    "at": (lambda: ckpt.sync.load({"a": "x"}, at="b"), "at= goes with one checkpoint"),
    "inside": (
        lambda: ckpt.sync.load({"a.b": "x", "a": "y"}),
        "branch 'a.b' is inside the branch 'a'",
    ),
    "twice": (lambda: ckpt.sync.load({"a/b": "x", "a%2Fb": "y"}), "'a%2Fb' is there twice"),
    "adapt": (lambda: ckpt.sync.load({"a": "x"}, adapt=5), "one for each branch"),  # type: ignore[arg-type]
    "adapt elsewhere": (
        lambda: ckpt.sync.load({"a": "x", "c": "y"}, adapt={"b": Adapt()}),
        "adapt={'b': ...}: expected branches to load: a, c",
    ),
    "no such branch": (lambda: ckpt.sync.load({"parms": "x"}, LIKE), "is it 'params'"),
    "below a leaf": (lambda: ckpt.sync.load({"step.a": "x"}, LIKE), "no such branch"),
    "nothing": (lambda: ckpt.sync.load({"a": "x"}, {"a": None}), "has None there"),
    "a function": (lambda: ckpt.sync.load({"a": "x"}, lambda: LIKE), "like= is the function"),
    "memory": (lambda: ckpt.sync.load({"a": "x"}, memory="none"), "memory"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_checked_before_any_checkpoint_is_opened(name: str) -> None:
    """None of the paths exists, which would be another error."""
    call, text = REFUSED[name]
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert text.replace("Source.", "") in str(caught.value)


def test_rules_that_name_the_branch_themselves_are_refused(runs: Path) -> None:
    for adapt in (Adapt(select="layers"), Adapt(rename={"embed": "table"})):
        with pytest.raises(InvalidArgumentError, match=r"'params' from .*/a: .* leave out select"):
            ckpt.sync.load({"params": runs / "a"}, adapt=adapt)


def test_errors_name_the_branch_and_the_checkpoint(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match=r"branch 'step' from .*/nothing: "):
        ckpt.sync.load({"params": runs / "a", "step": runs / "nothing"})
    with pytest.raises(TargetMismatchError, match=r"branch 'b' from .*/a: .*covers none"):
        ckpt.sync.load({"params": runs / "a", "b": runs / "a"})
    like = {"params": state(9)["params"], "step": np.zeros(2)}
    with pytest.raises(TargetMismatchError, match=r"branch 'step' from .*/b: "):
        ckpt.sync.load({"params": runs / "a", "step": runs / "b"}, like)
    shutil.copytree(runs / "a", tmp_path / "a")
    for file in (tmp_path / "a" / "default").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match=r"branch 'params' from .*/a: ") as caught:
        ckpt.sync.load({"params": tmp_path / "a", "step": runs / "b"})
    assert (caught.value.leaf or "").startswith("params.")


def test_nothing_is_read_if_one_of_them_does_not_match(runs: Path, tmp_path: Path) -> None:
    """What would be read is damaged, and matched long before the other one."""
    many = {str(number): number for number in range(20_000)}
    ckpt.sync.save(tmp_path / "many", {"step": many})
    shutil.copytree(runs / "a", tmp_path / "a")
    for file in (tmp_path / "a" / "default" / "d").iterdir():
        file.unlink()
    sources = {"params": tmp_path / "a", "step": tmp_path / "many"}
    like = {"params": state(9)["params"], "step": {**many, "0": "text"}}
    with pytest.raises(TargetMismatchError, match="branch 'step'") as caught:
        ckpt.sync.load(sources, like)
    assert caught.value.others == ()


# -- any tree -------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.int16)),
    st.integers(1, 5).map(lambda n: jnp.full((n, 2), n, jnp.bfloat16)),
    st.integers(0, 5).map(jax.random.key),
)
KEYS = st.text("ab/.%*é", min_size=1, max_size=3).filter(lambda key: "*" not in key)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=4), st.data())
def test_what_is_put_together_of_branches_is_the_tree(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any], data: st.DataObject
) -> None:
    """Each branch is taken from one of two checkpoints, of which the other has other values."""
    path = tmp_path_factory.mktemp("x")
    other = jax.tree.map(lambda leaf: 0, tree)
    sources: dict[str, Any] = {}
    places = dict.fromkeys(tree, "one")
    for key in tree:
        places[key] = data.draw(st.sampled_from(["one", "two"]))
    for name in ("one", "two"):
        saved = {key: (tree if places[key] == name else other)[key] for key in tree}
        ckpt.sync.save(path / name, saved)
    for key in tree:
        escaped = key.replace("%", "%25").replace("/", "%2F").replace(".", "%2E")
        sources[escaped] = path / places[key]
    same(ckpt.sync.load(sources, like=tree), tree)
