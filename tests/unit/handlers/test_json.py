"""JSON items: exactly what was given, models, and what JSON cannot say."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import errors
from ckpt.handlers._json import json_bytes, json_value
from ckpt.testing.compare import differences
from tests.support.stateful_objects import Config

HANDLERS = {"config": ckpt.handlers.JsonHandler()}

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


@given(values)
def test_every_value_comes_back_exactly(value: Any) -> None:
    assert differences(value, json_value(json_bytes(value))) == []


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append({"again": made})
    return made


REFUSED = [
    ({"a": {"b": math.nan}}, "at a.b: nan"),
    ({"a": [0.0, -math.inf]}, r"at a\[1\]: -inf"),
    ([2**64], "65 bits"),
    ([-(2**63) - 1], "64 bits"),
    ([10**10000], "bits"),
    ({"a": {1: "x"}}, "at a: the key 1"),
    ({"a": (1, 2)}, "at a: a builtins.tuple"),
    ({"a": np.float64(1)}, "numpy.float64"),
    ({"a": b"x"}, "builtins.bytes"),
    (OrderedDict(a=1), "OrderedDict"),
    ({"a": "\ud800"}, "surrogates"),
    ({"\ud800": 1}, "key"),
    (cyclic(), "contains itself"),
    ({"a": print}, "builtin_function_or_method"),
    ({1, 2}, "builtins.set"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_json_cannot_say_is_refused_by_place(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words) as caught:
        ckpt.sync.save(tmp_path / "x", items={"config": value}, handlers=HANDLERS)
    assert caught.value.item == "config"
    assert list(tmp_path.iterdir()) == []


def test_a_dict_is_a_tree_unless_the_handler_is_chosen(tmp_path: Path) -> None:
    config = {"rate": 0.1, "layers": [1, 2]}
    items = {"config": config, "tree": config}
    ckpt.sync.save(tmp_path / "x", items=items, handlers=HANDLERS)
    manifest = json.loads((tmp_path / "x" / "ckpt.json").read_bytes())
    assert {name: item["handler"] for name, item in manifest["items"].items()} == {
        "config": "json",
        "tree": "pytree",
    }
    # The name on disk says how to load it.
    assert ckpt.sync.load(tmp_path / "x") == items


def test_a_model_is_taken_without_further_ado(tmp_path: Path) -> None:
    config = Config(rate=1e-3, layers=[3], seed=7)
    ckpt.sync.save(tmp_path / "x", config)
    assert ckpt.sync.load(tmp_path / "x", Config) == config
    assert ckpt.sync.load(tmp_path / "x", Config()) == config
    plain = {"name": "run", "rate": 1e-3, "layers": [3], "where": "data", "seed": 7}
    assert ckpt.sync.load(tmp_path / "x") == plain
    assert ckpt.sync.load(tmp_path / "x", dict) == plain


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Run:
    optimizer: Settings
    layers: list[int]
    where: Path | None = None
    started: datetime.date = datetime.date(2026, 1, 1)


def test_a_dataclass_is_taken_as_a_model_is(tmp_path: Path) -> None:
    run = Run(Settings("adam", schedule={"warmup": 10}), [1, 2], Path("data"))
    ckpt.sync.save(tmp_path / "x", items={"run": run, "model": {"w": np.ones(3)}})
    for like in (Run, Run(Settings("sgd"), [])):
        assert ckpt.sync.load(tmp_path / "x", items={"run": like})["run"] == run
    plain = ckpt.sync.load(tmp_path / "x", items=["run"])["run"]
    assert plain["optimizer"]["betas"] == [0.9, 0.999]
    assert plain["where"] == "data"


def test_a_dataclass_that_jax_knows_stays_a_tree(tmp_path: Path) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: Any

    ckpt.sync.save(tmp_path / "x", State(jnp.ones(3)))
    assert isinstance(ckpt.sync.load(tmp_path / "x", State(jnp.zeros(3))), State)
    manifest = json.loads((tmp_path / "x" / "ckpt.json").read_bytes())
    assert manifest["items"]["default"]["handler"] == "pytree"


def test_a_dataclass_with_methods_for_its_state_is_saved_by_them(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Position:
        at: int = 0

        def get_state(self) -> dict[str, int]:
            return {"at": self.at}

        def set_state(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    ckpt.sync.save(tmp_path / "x", Position(7))
    assert ckpt.sync.load(tmp_path / "x", Position()).at == 7


@dataclasses.dataclass
class Holder:
    w: Any
    lost: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Rate:
    value: float


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Holder(np.ones(3)), r"dataclass Holder(.|\n)*register_dataclass"),
        (Holder(Unknown()), r"dataclass Holder(.|\n)*register_dataclass"),
        (Rate(math.nan), r"dataclass Rate at value: nan"),
        (Holder((1, 2)), r"Holder(.|\n)*'w'"),
    ],
)
def test_a_dataclass_that_json_cannot_hold(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ckpt.sync.save(tmp_path / "x", value)
    assert list(tmp_path.iterdir()) == []


def test_a_dataclass_that_does_not_fit_is_a_mismatch(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", Settings("adam"))
    with pytest.raises(errors.TargetMismatchError, match=r"dataclass Run(.|\n)*layers"):
        ckpt.sync.load(tmp_path / "x", Run)


def test_a_model_that_does_not_fit_is_a_mismatch(tmp_path: Path) -> None:
    class Other(pydantic.BaseModel):
        name: int
        missing: str

    ckpt.sync.save(tmp_path / "x", Config())
    with pytest.raises(errors.TargetMismatchError, match=r"Other(.|\n)*missing"):
        ckpt.sync.load(tmp_path / "x", Other)
    for like in (list, [1], 3, "text"):
        with pytest.raises(errors.TargetMismatchError, match="JSON dict"):
            ckpt.sync.load(tmp_path / "x", like)


def test_nan_in_a_model_is_refused_and_not_made_null(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="Config at rate: nan"):
        ckpt.sync.save(tmp_path / "x", Config(rate=math.nan))


def test_a_model_that_cannot_be_made_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class OneWay(pydantic.BaseModel):
        secret: int = pydantic.Field(exclude=True)

    with pytest.raises(errors.InvalidArgumentError, match=r"OneWay(.|\n)*secret"):
        ckpt.sync.save(tmp_path / "x", OneWay(secret=1))


def test_aliases_and_computed_fields_come_back(tmp_path: Path) -> None:
    class Aliased(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        rate: float = pydantic.Field(alias="learning-rate")

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def double(self) -> float:
            return self.rate * 2

    config = Aliased(**{"learning-rate": 0.5})
    ckpt.sync.save(tmp_path / "x", config)
    assert ckpt.sync.load(tmp_path / "x", Aliased) == config


@pytest.mark.parametrize("text", ["{", "[NaN]", "[" * 200_000 + "]" * 200_000, "", "\xff"])
def test_a_file_that_is_no_json_is_damage(text: str) -> None:
    with pytest.raises(errors.CorruptCheckpointError, match="no JSON"):
        json_value(text.encode("latin-1"))


class Optimizer(pydantic.BaseModel):
    rate: float = 1.0


class Adam(Optimizer):
    beta: float = 0.9


class Lossy(pydantic.BaseModel):
    optimizer: Optimizer = Optimizer()
    hidden: int = pydantic.Field(default=1, exclude=True)
    token: pydantic.SecretStr | None = None
    pair: tuple[int, ...] | list[int] = []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"optimizer": Adam(rate=3, beta=0.5)}, "optimizer"),
        ({"hidden": 7}, "hidden"),
        ({"token": "hunter2"}, "token"),
    ],
    ids=["subclass", "excluded", "secret"],
)
def test_a_model_that_its_json_does_not_hold_is_refused_by_field(
    tmp_path: Path, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"'{field}'"):
        ckpt.sync.save(tmp_path / "x", items={"config": Lossy(**values)})
    assert list(tmp_path.iterdir()) == []
    ckpt.sync.save(tmp_path / "x", items={"config": Lossy()})
    assert ckpt.sync.load(tmp_path / "x", items={"config": Lossy}) == {"config": Lossy()}
