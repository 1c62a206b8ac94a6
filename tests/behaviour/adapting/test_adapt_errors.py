"""Options of `ckpt.Adapt` that do not fit are refused with a message that helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import Adapt
from ckpt.errors import InvalidArgumentError, TargetMismatchError
from ckpt.surgery import concatenate, repeat, reshape, split, stack, transpose, unstack
from tests.behaviour.adapting.adapted_state import counted, load, model, zeros
from tests.support.trees import plain_id

GOLDEN = Path(__file__).parents[1] / "golden_messages"


SURGERY_ERRORS: dict[str, Any] = {
    "stack_covers_nothing": stack("params.layer.*", to="layers"),
    "stack_of_other_shapes": stack("params.layers.0.*", to="all"),
    "stack_axis": stack("params.layers.*.w", to="w", axis=3),
    "stack_onto_another_leaf": stack("params.layers.*.w", to="step"),
    "unstack_scalar": unstack("step", to="steps.*"),
    "unstack_axis": unstack("params.layers.*.b", to="b.*.*", axis=1),
    "concatenate_parts": concatenate(["params.layers.*.w", "params.embed*"], to="all*"),
    "concatenate_other_dtype": concatenate(["params.layers.0.b", "opt.count"], to="all"),
    "split_unequal": split("params.layers.*.b", to=["x.*", "y.*", "z.*"]),
    "split_sizes": split("params.embed", to=["x", "y"], sizes=[1, 2]),
    "split_onto_one_path": split("params.layers.*.b", to=["x.*", "x.*"]),
    "repeat_covers_nothing": repeat("params.layer.*.b", 2),
    "repeat_scalar": repeat("step", 2),
    "repeat_axis": repeat("params.layers.*.b", 2, axis=1),
    "transpose_axis": transpose("params.embed", axes=[0, 2]),
    "transpose_axes": transpose("params.embed", axes=[1, -1]),
    "transpose_some_axes": transpose("params.embed", axes=[0]),
    "reshape_size": reshape("params.embed", [5, -1]),
    "reshape_without_end": reshape("params.embed", [0, -1]),
}


@pytest.mark.parametrize("name", SURGERY_ERRORS)
def test_what_cannot_be_put_together_is_an_error_that_says_why(saved: Path, name: str) -> None:
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, transforms=[SURGERY_ERRORS[name]])
    golden(name, caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack("layers", to="layers"),
        lambda: stack("layers.**", to="layers"),
        lambda: stack("layers.*", to="layers.*"),
        lambda: stack("", to="layers"),
        lambda: stack("layers.*", to=""),
        lambda: stack("layers.*", to="layers", axis=0.5),  # type: ignore[arg-type]
        lambda: stack(5, to="layers"),  # type: ignore[arg-type]
        lambda: unstack("layers", to="layers"),
        lambda: unstack("layers", to=None),  # type: ignore[arg-type]
        lambda: concatenate("qkv", to="all"),
        lambda: concatenate([], to="all"),
        lambda: concatenate(["*.q", "k"], to="*.all"),
        lambda: split("all", to="qkv"),
        lambda: split("all", to=[]),
        lambda: split("*.all", to=["q", "k"]),
        lambda: split("all", to=["q", "k"], sizes=[1]),
        lambda: split("all", to=["q", "k"], sizes=[1.5, 0.5]),  # type: ignore[list-item]
        lambda: split("all", to=["q", "k"], sizes=[3, -1]),
        lambda: split("all", to=["q", "k"], sizes=4),  # type: ignore[arg-type]
        lambda: split("all", to=["q", "k"], axis=None),  # type: ignore[arg-type]
        lambda: repeat("", 2),
        lambda: repeat("all", 0),
        lambda: repeat("all", True),
        lambda: repeat("all", 1.5),  # type: ignore[arg-type]
        lambda: repeat("all", 2, axis=None),  # type: ignore[arg-type]
        lambda: transpose(5),  # type: ignore[arg-type]
        lambda: transpose("all", axes=1),  # type: ignore[arg-type]
        lambda: transpose("all", axes="01"),  # type: ignore[arg-type]
        lambda: transpose("all", axes=[0, None]),  # type: ignore[list-item]
        lambda: reshape("all", None),  # type: ignore[arg-type]
        lambda: reshape("all", 4),  # type: ignore[arg-type]
        lambda: reshape("all", [2.0, 2]),  # type: ignore[list-item]
        lambda: reshape("all", [-1, -1]),
        lambda: reshape("all", [-2, 2]),
    ],
)
def test_a_transform_that_cannot_be_meant_is_refused_when_it_is_made(
    make: Callable[[], Any],
) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


def test_an_array_that_falls_into_too_many_pieces_is_refused_and_named(tmp_path: Path) -> None:
    """Rows of 210 end within rows of 211, and no two elements are left that stay neighbours."""
    ckpt.sync.save(tmp_path / "x", {"table": counted(210, 211), "b": counted(3)})
    turned = [reshape("table", [211, 210]), transpose("table")]
    load(tmp_path / "x", transforms=turned)
    with pytest.raises(TargetMismatchError) as caught:
        load(tmp_path / "x", transforms=[*turned, reshape("table", [211, 210])])
    assert caught.value.leaf == "table"
    golden("reshape_pieces", caught.value)


def test_an_error_of_a_function_of_the_caller_is_not_swallowed(saved: Path) -> None:
    def fails(path: str) -> Any:
        raise ZeroDivisionError(path)

    for options in ({"select": fails}, {"rename": fails}, {"report": fails}):
        with pytest.raises((ZeroDivisionError, ckpt.errors.CheckpointError)) as caught:
            load(saved, **options)
        chain = (caught.value, caught.value.__cause__)
        assert any(isinstance(each, ZeroDivisionError) for each in chain)


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"select": 5},
        {"select": []},
        {"select": [5]},
        {"select": ""},
        {"select": {"params": "x"}},
        {"select": b"params"},
        {"rename": "params"},
        {"rename": 5},
        {"rename": {"params": 5}},
        {"rename": {"params": None}},
        {"rename": {5: "params"}},
        {"rename": {"layers.*": "layers"}},
        {"rename": {"layers": "layers.*"}},
        {"rename": {"**.layers": "*.layers"}},
        {"rename": {"": "params"}},
        {"transforms": 5},
        {"transforms": [5]},
        {"transforms": stack("a.*", to="a")},
        {"transforms": "stack"},
        {"cast": "nonsense"},
        {"cast": object},
        {"cast": {"params": None}},
        {"cast": {"params": "datetime64[s]"}},
        {"cast": {5: "float32"}},
        {"cast": ["float32"]},
        {"resize": "grow"},
        {"resize": True},
        {"resize": {"params": None}},
        {"resize": {5: "pad"}},
        {"resize": ["pad"]},
        {"missing": "ignore"},
        {"missing": None},
        {"extra": "keep"},
        {"extra": True},
        {"report": 5},
    ],
    ids=plain_id,
)
def test_an_option_that_cannot_be_meant_is_refused_before_anything_is_read(
    options: dict[str, Any],
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Adapt(**options)
    assert next(iter(options)) in str(caught.value)


def test_adapt_has_to_be_an_adapt(saved: Path) -> None:
    for wrong in ("params", {"select": "params"}, [Adapt()]):
        with pytest.raises(InvalidArgumentError):
            ckpt.sync.load(saved, adapt=wrong)  # type: ignore[arg-type]


# -- what a newcomer reads ------------------------------------------------------------------------


def golden(name: str, error: Exception) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    assert f"{error}\n" == text


def test_the_message_of_a_target_that_differs_in_every_way(tmp_path: Path) -> None:
    tree = {**model(), "activation": jnp.tanh, "key": jax.random.key(0)}
    ckpt.sync.save(tmp_path / "x", tree)
    like = zeros(model())
    like["params"]["embed"] = np.zeros((6, 5), np.float32)
    like["params"]["layers"][0]["kernel"] = like["params"]["layers"][0].pop("w")
    like["params"]["layers"][1]["b"] = np.zeros(8, np.int32)
    like["opt"]["count"] = "nine"
    del like["opt"]["mu"]["embed"]
    like["opt"]["nu"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    like["step"] = "seven"
    like["activation"] = 1.0
    like["key"] = jnp.zeros(2, jnp.uint32)
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like=like)
    golden("target", caught.value)


MESSAGES: dict[str, dict[str, Any]] = {
    "select": {"select": "param.layers"},
    "select_no_hint": {"select": "weights"},
    "rename_collision": {"rename": {"params": "opt.mu"}},
    "rename_covered": {"rename": {"params": "net", "params.embed": "head"}},
    "cast_dtype": {"cast": {"opt.count": "float64"}},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages_of_options_that_do_not_fit(saved: Path, name: str) -> None:
    with pytest.raises(ckpt.errors.CheckpointError) as caught:
        load(saved, **MESSAGES[name])
    golden(name, caught.value)


def test_the_message_of_a_shape_that_may_not_be_reached(saved: Path) -> None:
    like = {"params": {"embed": np.zeros((8, 2), np.float32)}}
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, like, select="params.embed", resize="pad")
    golden("resize", caught.value)


def test_the_message_of_a_function_without_a_target(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"activation": jax.nn.relu, "w": counted(2)})
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x")
    golden("function", caught.value)
    assert ckpt.sync.load(tmp_path / "x", adapt=Adapt(select="w"))["activation"] is ...
