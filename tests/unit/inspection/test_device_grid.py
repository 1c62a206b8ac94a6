"""Devices on paper hold what jax gives to real ones, and refuse what jax refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ckpt._inspection.restores.placements import MOST_DEVICES, Spec, grid_of, spec_problem
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt._format.regions import Region
from ckpt.errors import InvalidArgumentError
from docs.explanation.scaling.fake_devices import devices_of

Shape = tuple[int, ...]
NAMES = ("a", "b", "c")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, Spec, dict[str, int]]:
    """A shape, a spec for it and a mesh, which need not fit each other."""
    names = NAMES[: draw(st.integers(1, 3))]
    axes = {name: draw(st.integers(1, 4)) for name in names}
    rank = draw(st.integers(0, 3))
    # Mostly lengths that several numbers of parts divide.
    shape = tuple(draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24, 24, 48])) for _ in range(rank))
    order = draw(st.permutations(names))
    # Each axis cuts at most one dimension; at most one dimension too many has a place.
    places = [draw(st.integers(-1, rank if rank < 3 else rank - 1)) for _ in order]
    spec = tuple(
        tuple(name for name, place in zip(order, places, strict=True) if place == number)
        for number in range(max([*places, -1]) + 1)
    )
    return shape, spec, axes


def sharding_of(spec: Spec, axes: dict[str, int], processes: int = 1) -> NamedSharding:
    count = math.prod(axes.values())
    devices = devices_of(processes, count // processes).reshape(tuple(axes.values()))
    return NamedSharding(Mesh(devices, tuple(axes)), PartitionSpec(*spec))


def indices(sharding: NamedSharding, shape: Shape) -> dict[Any, Region]:
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        assert index is not None
        bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        found[device] = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
    return found


@given(layouts())
def test_what_jax_refuses_is_a_problem(layout: tuple[Shape, Spec, dict[str, int]]) -> None:
    shape, spec, axes = layout
    sharding = sharding_of(spec, axes)
    try:
        # jax looks at the rank of arrays only when it makes them.
        sharding.check_compatible_aval(shape)
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        assert spec_problem(shape, spec, grid_of(axes, 1).mesh)
    else:
        assert spec_problem(shape, spec, grid_of(axes, 1).mesh) is None


@given(layouts(), st.data())
def test_processes_hold_what_their_devices_hold(
    layout: tuple[Shape, Spec, dict[str, int]], data: st.DataObject
) -> None:
    shape, spec, axes = layout
    if spec_problem(shape, spec, grid_of(axes, 1).mesh) is not None:
        return
    count = math.prod(axes.values())
    processes = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    sharding = sharding_of(spec, axes, processes)
    held = grid_of(axes, processes).held(shape, spec)
    assert sorted(held) == list(range(processes))
    for process, part in held.items():
        own = [
            region
            for device, region in indices(sharding, shape).items()
            if device.process_index == process
        ]
        assert set(part.regions) == set(own)
        assert len(set(part.regions)) == len(part.regions)
        assert part.elements == sum(region.size for region in own)


def test_an_axis_that_cuts_two_dimensions_is_refused() -> None:
    spec = (("a",), ("a",))
    assert "duplicate entries" in str(spec_problem((4, 4), spec, grid_of({"a": 2}, 1).mesh))
    with pytest.raises(Exception, match="duplicate entries"):
        sharding_of(spec, {"a": 2})


def test_what_does_not_divide_says_what_and_by_what() -> None:
    problem = spec_problem((8, 10), ((), ("a", "b")), grid_of({"a": 2, "b": 2}, 1).mesh)
    assert problem == "array axis 1 is partitioned 4 times, but the dimension size is 10"


def test_devices_that_cannot_be_divided() -> None:
    with pytest.raises(InvalidArgumentError, match="8 devices cannot be divided among 3"):
        grid_of({"a": 8}, 3)
    with pytest.raises(InvalidArgumentError, match=f"at most {MOST_DEVICES:,}"):
        grid_of({"a": 10**9, "b": 10**9}, 1)


def test_a_thousand_devices_are_divided_in_their_order() -> None:
    grid = grid_of({"a": 32, "b": 32}, 128)
    owners = [device.process_index for device in grid.mesh.devices.flat]
    assert owners == [number // 8 for number in range(1024)]
    rows = grid.held((4096, 8), (("a",),))
    assert [rows[process].elements for process in range(128)] == [8 * 128 * 8] * 128
