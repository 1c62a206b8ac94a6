"""A target of a narrower dtype: what becomes of values is an error, or is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt.errors import TargetMismatchError

ROWS = NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), P("x"))


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 1e5), ("float8_e4m3fn", -1e3), ("bfloat16", 3.4e38)]
)
@pytest.mark.parametrize("place", [None, ROWS, "numpy"], ids=["free", "rows", "numpy"])
def test_a_finite_value_that_would_not_be_one_is_an_error(
    dtype: str, value: float, place: Any, tmp_path: Path
) -> None:
    values = np.full(4096, 0.5, np.float32)
    values[[1, 77]] = np.nan, value
    ckpt.sync.save(tmp_path / "x", {"a": {"b": values}, "fine": np.full(8, np.inf, np.float32)})

    def like(dtype: Any) -> Any:
        if place == "numpy":
            return {"a": {"b": np.zeros(4096, dtype)}, "fine": np.zeros(8, "float16")}
        struct: Any = jax.ShapeDtypeStruct((4096,), dtype, sharding=place)
        return {"a": {"b": struct}, "fine": jax.ShapeDtypeStruct((8,), "float16")}

    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like(np.dtype(jnp.dtype(dtype))))
    assert caught.value.leaf == "a.b"
    for text in (str(np.float32(value)), dtype, "Adapt(cast={'a.b'"):
        assert text in str(caught.value)
    allowed = ckpt.Adapt(cast={"a.b": dtype})
    found = ckpt.sync.load(tmp_path / "x", like(np.dtype(jnp.dtype(dtype))), adapt=allowed)
    assert not np.isfinite(np.asarray(found["a"]["b"])[77])


def test_a_cast_that_loses_precision_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = np.array([1e-10, 1.0, 0.0, np.nan], np.float32)
    tree = {"a": jnp.asarray(small), "b": jnp.asarray(small), "c": jnp.ones(3, "bfloat16"), "n": 1}
    ckpt.sync.save(tmp_path / "x", tree)
    like = {"a": jnp.zeros(4, "float16"), "b": np.zeros(4, "float16"), "c": jnp.zeros(3), "n": 1}
    with caplog.at_level(logging.INFO, logger="ckpt"):
        ckpt.sync.load(tmp_path / "x", like)
        said = [each.getMessage() for each in caplog.records if "->" in each.getMessage()]
        caplog.clear()
        # What is asked for needs no word.
        ckpt.sync.load(tmp_path / "x", adapt=ckpt.Adapt(cast={"a": "float16"}))
        ckpt.sync.load(tmp_path / "x", tree)
    (line,) = said
    assert line.endswith("float32 -> float16: 2 leaves, 2 values became 0")
    assert not [each for each in caplog.records if "->" in each.getMessage()]


def test_a_layout_in_a_target_is_refused_by_leaf(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones((8, 4)), "v": jnp.ones((8, 4))})
    plain = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=ROWS)
    struct: Any = jax.ShapeDtypeStruct
    turned = struct((8, 4), jnp.float32, sharding=Format(Layout((1, 0)), ROWS))
    with pytest.raises(TargetMismatchError, match=r"device_put\(array, format\)") as caught:
        ckpt.sync.load(tmp_path / "x", {"w": turned, "v": plain})
    assert [line.partition(":")[0] for line in caught.value.problems] == ["w"]
    default = struct((8, 4), jnp.float32, sharding=Format(None, ROWS))
    found = ckpt.sync.load(tmp_path / "x", {"w": default, "v": plain})
    assert found["w"].sharding == ROWS
