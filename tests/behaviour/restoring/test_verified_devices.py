"""`verify="device"`: what is on the devices after a restore is what the devices had at the save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

import ckpt
from ckpt._engine.restore import item_reader, placement
from ckpt._format.array_format import DTYPES
from ckpt._vitals.extension import device_pass
from ckpt._vitals.extension.device_pass import Kernels
from ckpt._vitals.stored_signs import signs_in
from ckpt.errors import DeviceMismatchError, InvalidArgumentError
from tests.behaviour.saving.test_signs_on_devices import MESHES, flipped

# Those whose devices divide the arrays.
FITTING = [each for each in MESHES if 8 % math.prod(each[0].values()) == 0][::2]
RNG = np.random.default_rng(0)
STATE: dict[str, Any] = {
    "w": RNG.standard_normal((2048, 1024)).astype(np.float32),
    "half": RNG.standard_normal((2048, 1024)).astype(DTYPES["bfloat16"]),
    "bytes": RNG.integers(0, 255, (64, 40), np.uint8),
    "narrow": RNG.integers(0, 7, (64, 40)).astype(DTYPES["int4"]),
    "flags": RNG.integers(0, 2, (16, 8)).astype(bool),
}


def targets(axes: Mapping[str, int], spec: PartitionSpec) -> dict[str, Any]:
    shape = tuple(axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    sharding = NamedSharding(Mesh(devices, tuple(axes)), spec)
    return {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
        for name, each in STATE.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a"
    eight = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("x",)), PartitionSpec("x"))
    state = jax.device_put(STATE, eight) | {"key": jax.random.key(3), "n": 7, "host": np.ones(3)}
    ckpt.sync.save(path, state, extensions=[ckpt.extensions.VitalSigns("device")])
    return path


@pytest.fixture(params=["cpu", "accelerator"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let large arrays be checked by the host, and by their devices as if these were others."""
    if request.param == "accelerator":
        monkeypatch.setattr(device_pass, "_is_in_device_memory", lambda leaf, on_cpus: True)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(("axes", "spec"), FITTING, ids=str)
def test_a_restore_onto_any_mesh_is_proved(
    saved: Path, axes: dict[str, int], spec: PartitionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    like = targets(axes, spec) | {"key": jax.random.key(0), "n": 0, "host": np.zeros(3)}
    found = ckpt.sync.load(saved, like, check_devices=True)
    for name, array in STATE.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def arriving_wrong(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Let one device get another bit than was read, in every large array."""

    def placed(complete: Any) -> list[Any]:
        found = placement.place(complete)
        return [
            flipped(each, position, word=70_001) if getattr(each, "nbytes", 0) > 1 << 20 else each
            for each in found
        ]

    monkeypatch.setattr(item_reader, "place", placed)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()], ids=str)
def test_one_wrong_bit_on_one_device_is_found(
    saved: Path, monkeypatch: pytest.MonkeyPatch, position: int, spec: PartitionSpec
) -> None:
    arriving_wrong(monkeypatch, position)
    like = targets({"x": 8}, spec) | {"key": ..., "n": ..., "host": ...}
    ckpt.sync.load(saved, like)
    with pytest.raises(DeviceMismatchError, match="2 of 5 restored arrays") as caught:
        ckpt.sync.load(saved, like, check_devices=True)
    for name in ("'w'", "'half'"):
        assert name in str(caught.value)
    assert "'bytes'" not in str(caught.value)
    assert ("should hold the same values" in str(caught.value)) == (spec == PartitionSpec())


def spoil(step: Path) -> None:
    """Let the manifest say that the device had other values than those that were written."""
    manifest = ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where=str(step))
    item = manifest.items["default"]
    stored = signs_in(item.leaves)
    stored.records["fingerprint"] ^= np.uint32(1 << 7)
    items = {"default": replace(item, leaves=stored.on(item.leaves))}
    manifest = replace(manifest, items=items)
    (step / "ckpt.json").write_bytes(ckpt.manifest.encode(manifest))


def test_a_bit_that_was_wrong_before_its_digest_is_found(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": STATE["w"] + step}).result()
        spoil(tmp_path / "2")
        assert (mgr.restore()["w"] == STATE["w"] + 2).all()
        with pytest.raises(DeviceMismatchError, match=r"'w': its fingerprint is .*, and was"):
            mgr.restore(check_devices=True)
        # A device may be at fault, so no step is passed over for it.
        with pytest.raises(DeviceMismatchError):
            mgr.restore(fallback=True, check_devices=True)
        assert not mgr.verify(2).ok


def test_what_cannot_be_compared_is_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    like: dict[str, Any] = dict.fromkeys(["half", "narrow", "flags", "key", "n", "host"], ...)
    like["w"] = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    like["bytes"] = jax.ShapeDtypeStruct((64, 40), jnp.uint8)
    assert ckpt.sync.load(saved, like, check_devices=True)["w"].dtype == jnp.bfloat16
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "1 of 2 arrays were not compared" in warning
    assert "'w'" in warning


def test_scalars_and_values_of_the_manifest_raise_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = {"model": {"w": jnp.ones(4), "s": np.float32(2)}, "meta": {"lr": 0.1, "n": 3}}
    like = {
        "model": {"w": jnp.zeros(4), "s": np.float32(0)},
        "meta": {"lr": jnp.float32(0), "n": 0},
    }
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(1, items=items).result()
        assert mgr.restore(1, like, check_devices=True)["model"]["s"] == 2
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_kernel_that_fails_leaves_the_array_to_the_host(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(joined: jax.Array) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(device_pass, "_is_in_device_memory", lambda leaf, on_cpus: True)
    monkeypatch.setattr(Kernels, "find", lambda self, key: fail)
    found = ckpt.sync.load(saved, check_devices=True)
    np.testing.assert_array_equal(np.asarray(found["w"]), STATE["w"])
    assert "compared on the host" in caplog.text


def test_a_step_without_vital_signs_proves_nothing(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": jnp.ones(4)}).result()
        with pytest.raises(InvalidArgumentError, match="VitalSigns") as caught:
            mgr.restore(1, check_devices=True)
        assert caught.value.step == 1


@pytest.mark.parametrize("wrong", ["device", None, 1])
def test_another_value_is_refused(saved: Path, wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"check_devices=.*True or False"):
        ckpt.sync.load(saved, check_devices=wrong)
    with (
        ckpt.sync.CheckpointManager(saved.parent / "root") as mgr,
        pytest.raises(InvalidArgumentError, match=r"check_devices=.*True or False"),
    ):
        mgr.restore(check_devices=wrong)


def test_branches_of_several_checkpoints_are_proved(saved: Path, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "plain", {"b": {"c": jnp.ones(4)}})
    both = {"w": saved, "b": tmp_path / "plain"}
    assert set(ckpt.sync.load(both)) == {"w", "b"}
    with pytest.raises(InvalidArgumentError, match="no vital signs"):
        ckpt.sync.load(both, check_devices=True)
