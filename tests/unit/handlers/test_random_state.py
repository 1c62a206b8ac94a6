"""numpy's random generators: the same numbers afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt import errors
from ckpt.handlers._random_state import _encoded, _restored
from tests.support.trees import plain_id

NAMES = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def half_used(name: str, seed: int = 1) -> np.random.Generator:
    """A generator that has drawn, among others, half of a 64-bit word."""
    made = np.random.Generator(getattr(np.random, name)(seed))
    made.normal(size=100)
    made.integers(0, 10, size=3, dtype=np.uint32)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_generator_goes_on_exactly(name: str, tmp_path: Path) -> None:
    generator = half_used(name)
    ckpt.sync.save(tmp_path / "x", generator)
    expected = generator.normal(size=50), generator.integers(0, 10, 9, dtype=np.uint32)
    new = ckpt.sync.load(tmp_path / "x")
    like = half_used(name, seed=2)
    again = ckpt.sync.load(tmp_path / "x", like)
    assert again is like
    for found in (new, again):
        drawn = found.normal(size=50), found.integers(0, 10, 9, dtype=np.uint32)
        np.testing.assert_array_equal(drawn[0], expected[0])
        np.testing.assert_array_equal(drawn[1], expected[1])


def test_children_of_a_new_generator_are_the_next_ones(tmp_path: Path) -> None:
    generator = np.random.default_rng([1, 2**80]).spawn(2)[1]
    generator.spawn(3)
    ckpt.sync.save(tmp_path / "x", generator)
    found = ckpt.sync.load(tmp_path / "x")
    assert found.spawn(1)[0].random() == generator.spawn(1)[0].random()


def test_the_old_random_state_keeps_its_spare_number(tmp_path: Path) -> None:
    state = np.random.RandomState(3)
    state.standard_normal(3)
    ckpt.sync.save(tmp_path / "x", state)
    found = ckpt.sync.load(tmp_path / "x")
    assert isinstance(found, np.random.RandomState)
    np.testing.assert_array_equal(found.standard_normal(5), state.standard_normal(5))


def test_a_class_as_target_gives_a_new_one(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", np.random.default_rng(0))
    found: Any = ckpt.sync.load(tmp_path / "x", np.random.Generator)
    assert found.random() == np.random.default_rng(0).random()


@pytest.mark.parametrize(
    "like",
    [np.random.Generator(np.random.MT19937(0)), np.random.PCG64(0), np.random.RandomState, 3],
    ids=plain_id,
)
def test_another_kind_of_generator_is_a_mismatch_and_untouched(like: Any, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", np.random.default_rng(0))
    before = like.bit_generator.state if isinstance(like, np.random.Generator) else None
    with pytest.raises(errors.TargetMismatchError, match="PCG64"):
        ckpt.sync.load(tmp_path / "x", like)
    if before is not None:
        np.testing.assert_equal(like.bit_generator.state, before)


def test_a_bit_generator_of_another_class_is_refused(tmp_path: Path) -> None:
    class Mine(np.random.PCG64):
        pass

    with pytest.raises(errors.InvalidArgumentError, match="Mine"):
        ckpt.sync.save(tmp_path / "x", np.random.Generator(Mine(1)))


def document(name: str) -> dict[str, Any]:
    state = half_used(name).bit_generator.state
    return json.loads(json.dumps({"state": _encoded(state), "seed_sequence": None}))


WRONG = [
    ("MT19937", ("state", "state", "pos"), {"int": "625"}),
    ("MT19937", ("state", "state", "pos"), {"int": "-1"}),
    ("MT19937", ("state", "state", "key"), {"dtype": "uint32", "hex": "00000000"}),
    ("MT19937", ("state", "state", "key"), {"dtype": "object", "hex": "00"}),
    ("Philox", ("state", "buffer_pos"), {"int": "-4"}),
    ("Philox", ("state", "buffer"), {"dtype": "uint64", "hex": ""}),
    ("PCG64", ("state", "bit_generator"), "MT19937"),
    ("PCG64", ("state", "state"), [1]),
    ("PCG64", ("state", "state", "state"), {"int": "x"}),
    ("PCG64", ("state", "state", "state"), None),
    ("SFC64", ("state",), {}),
    ("SFC64", ("seed_sequence",), {"entropy": "x"}),
    ("SFC64", ("seed_sequence",), _encoded({"entropy": 0, "pool_size": 300})),
]


@pytest.mark.parametrize(("name", "path", "value"), WRONG)
def test_a_state_that_numpy_must_not_see_is_damage(
    name: str, path: tuple[str, ...], value: Any
) -> None:
    """numpy takes positions unchecked and would read beyond its buffers."""
    broken = place = document(name)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    target = half_used(name, seed=9)
    before = target.bit_generator.state
    with pytest.raises(errors.CorruptCheckpointError, match=f"not a state of {name}"):
        _restored("generator", name, broken, target)
    np.testing.assert_equal(target.bit_generator.state, before)
