"""Vital signs that devices take: the same as those of the host, and replicas are compared."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

import ckpt
from ckpt._format.array_format import DTYPES
from ckpt._vitals.extension import device_pass, signs_of_saves
from ckpt._vitals.extension.device_pass import Kernels
from ckpt.errors import InvalidArgumentError
from ckpt.extensions import VitalSigns

# Every shard of which a device takes the signs has a megabyte.
SHAPE = (2048, 1024)
# The same for those of which each device has all.
WHOLE = (512, 512)
# Arrays that are not packed, and can be cut into 2, 3, 4, 6 or 8 parts.
SMALLER = (384, 432)
MESHES: list[tuple[dict[str, int], PartitionSpec]] = [
    ({"x": 1}, P()),
    ({"x": 2}, P("x")),
    ({"x": 2}, P(None, "x")),
    ({"x": 3}, P("x")),
    ({"x": 3}, P(None, "x")),
    ({"x": 4}, P("x")),
    ({"x": 6}, P(None, "x")),
    ({"x": 8}, P("x")),
    ({"x": 8}, P(None, "x")),
    ({"x": 8}, P()),
    ({"x": 2, "y": 2}, P("x", "y")),
    ({"x": 2, "y": 2}, P(("y", "x"))),
    ({"x": 2, "y": 3}, P("y", "x")),
    ({"x": 3, "y": 2}, P("x")),
    ({"x": 2, "y": 4}, P("x", "y")),
    ({"x": 2, "y": 4}, P("x")),
    ({"x": 2, "y": 4}, P(None, ("x", "y"))),
    ({"x": 4, "y": 2}, P(None, "y")),
    ({"x": 4, "y": 2}, P("y", "x")),
    ({"x": 4, "y": 2}, P(("x", "y"))),
    ({"x": 2, "y": 2, "z": 2}, P("x", "z")),
    ({"x": 2, "y": 2, "z": 2}, P(("x", "y"), "z")),
    ({"x": 2, "y": 2, "z": 2}, P("z", ("y", "x"))),
]


def put(array: Any, axes: Mapping[str, int], spec: PartitionSpec) -> jax.Array:
    shape = tuple(axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return jax.device_put(array, NamedSharding(Mesh(devices.reshape(shape), tuple(axes)), spec))


def flipped(array: jax.Array, position: int, word: int = 70_000, bit: int = 9) -> jax.Array:
    """Return an array of which one device has another bit."""
    shards = [shard.data for shard in array.addressable_shards]
    host = np.array(shards[position])
    host.reshape(-1).view(np.uint32)[word] ^= np.uint32(1 << bit)
    shards[position] = jax.device_put(host, array.addressable_shards[position].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def numbers(seed: int = 0, shape: tuple[int, int] = SHAPE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Managers compile their kernels, each for itself, which takes longer than all else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_pass, "_compiled", functools.cache(device_pass._compiled))
        yield


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Arrays of numpy, and what is found in them."""
    path = tmp_path_factory.mktemp("host") / "a"
    host = numbers(shape=SMALLER)
    host[3, 5], host[-1, 0] = np.nan, np.inf
    state = {"w": host, "half": host.astype(DTYPES["bfloat16"]), "n": np.arange(9)}
    ckpt.sync.save(path, state, extensions=[ckpt.extensions.VitalSigns("host")])
    return state, ckpt.sync.metadata(path).tree


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize(("axes", "spec"), MESHES, ids=str)
def test_every_mesh_gives_the_same(
    tmp_path: Path,
    of_one_device: Any,
    axes: dict[str, int],
    spec: PartitionSpec,
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, wanted = of_one_device
    if mode == "device":
        monkeypatch.setattr(device_pass, "_LEAST_BYTES", 1)
        # The host must not look at what devices have looked at.
        monkeypatch.delattr(signs_of_saves, "box_signs")
    info = ckpt.sync.save(
        tmp_path / "a",
        {name: put(each, axes, spec) if name != "n" else each for name, each in state.items()},
        extensions=[ckpt.extensions.VitalSigns(mode)],
    )
    assert (info.nonfinite_leaves, info.unequal_leaves) == (2, 0)
    for name, leaf in ckpt.sync.metadata(tmp_path / "a").tree.items():
        found, expected = VitalSigns.of(leaf), VitalSigns.of(wanted[name])
        assert found is not None
        assert expected is not None
        assert found.fingerprint == expected.fingerprint
        assert (found.nonfinite, found.absmax) == (expected.nonfinite, expected.absmax)
        assert found.norm == pytest.approx(expected.norm, rel=1e-5)
    assert ckpt.sync.verify(tmp_path / "a").ok


def test_the_meshes_are_twenty_and_more() -> None:
    assert len({(tuple(axes.items()), spec) for axes, spec in MESHES}) == len(MESHES) >= 20


# Where devices take part in it, two of eight hold each part.
@pytest.mark.parametrize("position", range(8))
def test_a_replica_with_one_other_bit_is_named_and_the_signs_are_those_of_the_file(
    tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    good = put(numbers(), {"x": 4, "y": 2}, P("x"))
    state = {"good": good, "bad": flipped(good, position)}
    info = ckpt.sync.save(tmp_path / "a", state, extensions=[ckpt.extensions.VitalSigns("device")])
    assert info.unequal_leaves == 1
    described = ckpt.sync.metadata(tmp_path / "a").tree
    assert VitalSigns.unequal_on(described["good"]) == ()
    assert VitalSigns.unequal_on(described["bad"]) == (0,)
    assert "replicas differ on process 0" in str(ckpt.sync.metadata(tmp_path / "a"))
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    # Of two there is none that is wrong for certain.
    pair = position // 2 * 2
    one, other = (good.addressable_shards[each].device for each in (pair, pair + 1))
    assert f"'bad' ({one}, {other})" in warning
    assert "'good'" not in warning
    assert ckpt.sync.verify(tmp_path / "a").ok


def test_of_many_replicas_those_that_differ_from_most_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = put(numbers(shape=WHOLE), {"x": 8}, P())
    bad = flipped(flipped(good, 2), 6, bit=31)
    ckpt.sync.save(tmp_path / "a", {"bad": bad}, extensions=[ckpt.extensions.VitalSigns("device")])
    devices = [good.addressable_shards[each].device for each in (2, 6)]
    assert f"'bad' ({devices[0]}, {devices[1]})" in caplog.text


def test_without_the_devices_replicas_are_not_compared(tmp_path: Path) -> None:
    bad = flipped(put(numbers(shape=WHOLE), {"x": 8}, P()), 3)
    for place in ("auto", "host"):
        signs = ckpt.extensions.VitalSigns(place)
        info = ckpt.sync.save(tmp_path / place, {"bad": bad}, extensions=[signs])
        assert info.unequal_leaves == 0


def test_replicas_that_differ_are_known_of_arrays_that_are_taken_over(tmp_path: Path) -> None:
    # Large enough to be shared.
    good = put(numbers(shape=(1024, 512)), {"x": 8}, P())
    bad = flipped(good, 3)
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns("device")]
    ) as mgr:
        for step in (1, 2, 3):
            info = mgr.save(step, {"bad": bad, "step": jnp.full(300_000, step)}).result()
            assert info.unequal_leaves == 1
            assert (info.statistics.shared_bytes > 0) == (step > 1)
        info = mgr.save(4, {"bad": good, "step": jnp.full(300_000, 4)}).result()
        assert info.unequal_leaves == 0
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        assert [VitalSigns.unequal_on(mgr.metadata(step).tree["bad"]) for step in (3, 4)] == [
            (0,),
            (),
        ]


def test_the_caller_may_donate_its_arrays_at_once(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x * jnp.nan, donate_argnums=0)
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns("device")]
    ) as mgr:
        for number in (1, 2):
            state = put(numbers(number), {"x": 8}, P("x"))
            commit = mgr.save(number, {"w": state})
            state = step(state)
            assert commit.result().nonfinite_leaves == 0
        found = [VitalSigns.of(mgr.metadata(number).tree["w"]) for number in (1, 2)]
        assert [mgr.verify(number).ok for number in (1, 2)] == [True, True]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].fingerprint != found[1].fingerprint


def test_the_first_save_does_not_wait_for_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the devices were accelerators.
    monkeypatch.setattr(device_pass, "_is_in_device_memory", lambda leaf, on_cpus: True)
    bad = flipped(put(numbers(shape=WHOLE), {"x": 8}, P()), 3)
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        # The host takes the signs of the first. After it the kernel is compiled, and used as soon
        # as it is there.
        assert mgr.save(0, {"bad": bad}).result().unequal_leaves == 0
        assert VitalSigns.of(mgr.metadata(0).tree["bad"]) is not None
        found = (mgr.save(step, {"bad": bad + step}).result() for step in range(1, 500))
        assert any(info.unequal_leaves == 1 for info in found)


def test_arrays_that_stay_the_same_are_compared_once_kernels_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pass, "_is_in_device_memory", lambda leaf, on_cpus: True)
    bad = flipped(put(numbers(shape=WHOLE), {"x": 8}, PartitionSpec()), 3)
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        found = (mgr.save(step, {"bad": bad}).result() for step in range(500))
        assert any(info.unequal_leaves == 1 for info in found)


def test_no_deadline_and_no_single_save_waits_for_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pass, "_is_in_device_memory", lambda leaf, on_cpus: True)
    going, compiled = threading.Event(), []

    def compile(self: Kernels, key: Any) -> None:
        compiled.append(key)
        assert going.wait(60)

    monkeypatch.setattr(Kernels, "compile", compile)
    state = {"w": put(numbers(), {"x": 8}, PartitionSpec("x"))}
    ckpt.sync.save(tmp_path / "one", state, extensions=[ckpt.extensions.VitalSigns()])
    assert not compiled
    with ckpt.sync.CheckpointManager(
        tmp_path / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        mgr.save(1, state, timeout=30).result()
        mgr.save(2, state | {"same shape": state["w"] + 1}, timeout=30).result()
        mgr.wait_until_finished()
        going.set()
    assert len(set(compiled)) == len(compiled) == 1


def test_a_kernel_that_fails_leaves_the_array_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(joined: jax.Array) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(Kernels, "find", lambda self, key: fail)
    state = {"w": put(numbers(), {"x": 8}, P("x"))}
    assert (
        ckpt.sync.save(
            tmp_path / "a", state, extensions=[ckpt.extensions.VitalSigns("device")]
        ).nonfinite_leaves
        == 0
    )
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "'w'" in warning
    assert "RESOURCE_EXHAUSTED" in warning


@pytest.mark.parametrize("wrong", ["yes", "gpu", 1, None, ["host"]])
def test_another_place_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="'auto', 'host', 'device'"):
        ckpt.extensions.VitalSigns(wrong)


@pytest.mark.parametrize(
    "wrong", [True, None, "host", ckpt.extensions.VitalSigns(), [ckpt.extensions.VitalSigns], [1]]
)
def test_what_is_no_list_of_extensions_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^extensions=.*ckpt\.extensions"):
        ckpt.sync.CheckpointManager(tmp_path / "run", extensions=wrong)
    with pytest.raises(InvalidArgumentError, match=r"^extensions=.*ckpt\.extensions"):
        ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(3)}, extensions=wrong)
    with pytest.raises(InvalidArgumentError, match=r"^extensions=.*ckpt\.extensions"):
        ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(3)}, extensions=wrong, durable=False)
    assert list(tmp_path.iterdir()) == []


def test_frozen_leaves_of_a_save_without_a_step_before_are_saved(tmp_path: Path) -> None:
    signs = [ckpt.extensions.VitalSigns("device", frozen="base")]
    state = {"base": jnp.ones(3)}
    ckpt.sync.save(tmp_path / "a", state, extensions=signs)
    ckpt.sync.save(tmp_path / "b", state, extensions=signs, durable=False).result()
    for name in ("a", "b"):
        assert ckpt.sync.load(tmp_path / name)["base"].tolist() == [1, 1, 1]
    with pytest.raises(InvalidArgumentError, match="'base' covers no leaf"):
        ckpt.sync.save(tmp_path / "c", {"w": jnp.ones(3)}, extensions=signs)


def test_the_same_extension_twice_is_refused(tmp_path: Path) -> None:
    twice = [ckpt.extensions.VitalSigns(), ckpt.extensions.VitalSigns("host")]
    with pytest.raises(InvalidArgumentError, match="VitalSigns at most once"):
        ckpt.sync.CheckpointManager(tmp_path, extensions=twice)


def test_arrays_in_memory_of_the_host_are_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = put(numbers(), {"x": 8}, PartitionSpec("x"))
    pinned = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    ckpt.sync.save(tmp_path / "a", {"w": pinned}, extensions=[ckpt.extensions.VitalSigns("device")])
    assert VitalSigns.of(ckpt.sync.metadata(tmp_path / "a").tree["w"]) is not None
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_of_the_parts_of_a_save_the_leaf_that_drifted_is_named(tmp_path: Path) -> None:
    good = put(numbers(shape=WHOLE), {"x": 8}, P())
    # The names of the whole tree are in another order than the parts.
    parts = {"z": flipped(good, 3)}, {"a": good}, {"m": good}
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns("device")]
    ) as mgr:
        for step, order in enumerate(itertools.permutations(parts)):
            with mgr.partial(step) as part:
                for each in order:
                    part.save(each)
            found = {
                name: VitalSigns.unequal_on(leaf) for name, leaf in mgr.metadata(step).tree.items()
            }
            assert found == {"a": (), "m": (), "z": (0,)}
