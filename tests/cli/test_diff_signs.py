"""`ckpt diff` where vital signs tell what digests do not."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
from ckpt._format.manifest_head import FILE_NAME
from tests.support.command import check_golden, ckpt_command, in_this_process, settled
from tests.support.manifests import contradict, document_of, rewrite

Capsys = pytest.CaptureFixture[str]
SIDE = 512


def sharded(values: Any, devices: int) -> jax.Array:
    """Return an array over so many devices; each number of them leads to other chunks."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))


def saved(path: Path, state: Any, **options: Any) -> Path:
    """Save a checkpoint with vital signs, and return its path."""
    ckpt.sync.save(path, state, **{"extensions": [ckpt.extensions.VitalSigns()]} | options)
    return path


def values() -> Any:
    return np.random.default_rng(0).random((SIDE, SIDE), np.float32)


def state_on(devices: int, values: Any) -> dict[str, Any]:
    return {"w": sharded(values, devices), "count": 3}


def test_arrays_of_other_meshes_are_the_same_by_fingerprint(tmp_path: Path, capsys: Capsys) -> None:
    one = saved(tmp_path / "one", state_on(2, values()))
    other = saved(tmp_path / "other", state_on(8, values()))
    ran = in_this_process(capsys, "diff", one, other)
    told = f"{one} and {other} are the same: 2 leaves, 1 of them by fingerprint\n"
    assert (ran.status, ran.out) == (0, told)
    found = in_this_process(capsys, "diff", one, other, "--json").json
    assert (found["is_same"], found["same"], found["not_compared"]) == (True, 2, [])
    assert [each["path"] for each in found["same_by_fingerprint"]] == ["w"]
    # Values that are read leave no doubt.
    found = in_this_process(capsys, "diff", one, other, "--values", "--json").json
    assert (found["is_same"], found["same"], found["same_by_fingerprint"]) == (True, 2, [])


@pytest.mark.parametrize("place", [(0, 0), (SIDE - 1, SIDE - 1), (300, 17)])
def test_one_bit_on_another_mesh_is_a_change(
    place: tuple[int, int], tmp_path: Path, capsys: Capsys
) -> None:
    changed = values()
    changed.view(np.uint32)[place] ^= 1
    one = saved(tmp_path / "one", state_on(2, values()))
    other = saved(tmp_path / "other", state_on(8, changed))
    ran = in_this_process(capsys, "diff", one, other, "--json")
    assert ran.status == 1
    [found] = ran.json["contents"]
    assert (found["leaf"]["path"], found["chunks_changed"]) == ("w", None)
    assert "another fingerprint" in in_this_process(capsys, "diff", one, other).out
    read = in_this_process(capsys, "diff", one, other, "--values", "--json").json
    assert read["contents"][0]["change"]["different"] == 1


def test_output(tmp_path: Path) -> None:
    array = np.arange(8.0, dtype=np.float32)
    cut = {"big": ckpt.ArrayFormat(chunk_bytes=1 << 20, split_axes=(1,))}
    big = np.ones((4096, 64))
    before = {"big": big, "nan": array, "up": array, "negative": array, "zero": 0 * array}
    after = {
        "big": 2 * big,
        "nan": np.where(array == 2, math.nan, array),
        "up": array * np.float32(1.001),
        "negative": -array,
        "zero": array,
    }
    one, other = saved(tmp_path / "one", before), saved(tmp_path / "other", after, formats=cut)
    ran = ckpt_command("diff", one, other)
    assert (ran.status, ran.err) == (1, "")
    check_golden("diff_signs", settled(ran.out, path=tmp_path))


def test_the_largest_change_is_first_and_values_that_are_not_finite_before(
    tmp_path: Path, capsys: Capsys
) -> None:
    before = {name: np.full(4, 10.0) for name in "abcd"} | {"e": np.zeros(4)}
    after = {
        "a": np.full(4, 11.0),
        "b": np.full(4, 5.0),
        "c": np.array([10.0, 10.0, math.inf, 10.0]),
        "d": np.full(4, -10.0),
        "e": np.ones(4),
    }
    one, other = saved(tmp_path / "one", before), saved(tmp_path / "other", after)
    found = in_this_process(capsys, "diff", one, other, "--json").json["contents"]
    assert [each["leaf"]["path"] for each in found] == ["c", "e", "b", "a", "d"]
    norms = [[signs["norm"] for signs in each["signs"]] for each in found]
    assert norms[2:] == [[20.0, 10.0], [20.0, 22.0], [20.0, 20.0]]


def test_where_one_has_no_signs_other_chunks_are_not_compared(
    tmp_path: Path, capsys: Capsys
) -> None:
    one = saved(tmp_path / "one", state_on(2, values()))
    other = saved(tmp_path / "other", state_on(8, values()), extensions=[])
    ran = in_this_process(capsys, "diff", one, other, "--json")
    assert (ran.status, ran.json["contents"], ran.json["same_by_fingerprint"]) == (1, [], [])
    [found] = ran.json["not_compared"]
    assert (found["leaf"]["path"], found["signs"]) == ("w", None)


def signs_in_document(manifest: dict[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = manifest["items"]["default"]["leaves"]["extensions"]["vital_signs"]
    return columns


def test_arrays_of_one_fingerprint_are_read_with_values(tmp_path: Path, capsys: Capsys) -> None:
    one = saved(tmp_path / "one", {"w": sharded(values(), 2)})
    # Two rows that change places are what a fingerprint sees; so the manifest is made to lie.
    other = saved(tmp_path / "other", {"w": sharded(values()[::-1], 8)})
    claimed = signs_in_document(document_of(one))
    lying = document_of(other)
    signs_in_document(lying)["fingerprints"] = claimed["fingerprints"]
    rewrite(other, lying)
    assert in_this_process(capsys, "diff", one, other).status == 0
    ran = in_this_process(capsys, "diff", one, other, "--values", "--json")
    assert ran.status == 1
    assert [each["leaf"]["path"] for each in ran.json["contents"]] == ["w"]


def test_digests_count_more_than_fingerprints(tmp_path: Path, capsys: Capsys) -> None:
    one, other = (
        saved(tmp_path / "one", {"w": jnp.ones(8)}),
        saved(tmp_path / "o", {"w": -jnp.ones(8)}),
    )
    lying = document_of(other)
    claimed = signs_in_document(document_of(one))
    signs_in_document(lying)["fingerprints"] = claimed["fingerprints"]
    rewrite(other, lying)
    assert in_this_process(capsys, "diff", one, other).status == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("norm", [math.nan, math.inf, -7.0, 1e308])
def test_signs_that_cannot_be_true_end_no_command(
    norm: float, tmp_path: Path, capsys: Capsys
) -> None:
    one = saved(tmp_path / "one", {"w": jnp.ones(8), "v": jnp.ones(8)})
    other = saved(tmp_path / "other", {"w": -jnp.ones(8), "v": jnp.ones(8)})
    lying = document_of(other)
    norms = base64.b64encode(np.array([norm, norm]).tobytes()).decode()
    signs_in_document(lying)["norms"] = norms
    rewrite(other, lying)
    for options in ((), ("--json",)):
        ran = in_this_process(capsys, "diff", one, other, *options)
        assert (ran.status, ran.err) == (1, "")
        assert "nan%" not in ran.out
        assert norm == 1e308 or "inf%" not in ran.out
    assert [each["leaf"]["path"] for each in ran.json["contents"]] == ["w"]
    if norm != 1e308:
        assert ran.json["contents"][0]["signs"] is None
    assert in_this_process(capsys, "verify", other).status == 1


def test_keys_have_no_norms(tmp_path: Path, capsys: Capsys) -> None:
    one, two = (saved(tmp_path / str(seed), {"key": jax.random.key(seed)}) for seed in (0, 1))
    ran = in_this_process(capsys, "diff", one, two)
    assert ran.status == 1
    assert ran.out.splitlines()[:2] == [
        "array  type            contents",
        "key    uint32[] (key)  1 of 1 chunk differs",
    ]
    assert "norms are" not in ran.out
    [found] = in_this_process(capsys, "diff", one, two, "--json").json["contents"]
    assert found["signs"] is None


def test_fingerprints_tell_of_keys_that_are_cut_otherwise(tmp_path: Path, capsys: Capsys) -> None:
    one, other = (
        saved(tmp_path / str(seed), {"keys": sharded(jax.random.split(key, 1 << 16), devices)})
        for seed, devices in ((0, 2), (1, 8))
        for key in (jax.random.key(seed),)
    )
    ran = in_this_process(capsys, "diff", one, other)
    assert ran.status == 1
    assert "another fingerprint" in ran.out
    assert "norms are" not in ran.out


@pytest.mark.parametrize("contradicting", ["one", "other"])
def test_a_tree_that_contradicts_itself_is_said_with_its_path(
    contradicting: str, tmp_path: Path, capsys: Capsys
) -> None:
    for name in ("one", "other"):
        with ckpt.sync.CheckpointManager(tmp_path / name) as mgr:
            mgr.save(7, {"w": jnp.ones(8)})
    contradict(tmp_path / contradicting / "7")
    for options in ((), ("--values",)):
        places = tmp_path / "one" / "7", tmp_path / "other" / "7"
        ran = in_this_process(capsys, "diff", *places, *options)
        assert (ran.status, ran.out) == (1, "")
        assert f"step 7: {tmp_path / contradicting / '7'}: node 1 does not belong" in ran.err


def test_a_damaged_manifest_is_said(tmp_path: Path, capsys: Capsys) -> None:
    one, other = (saved(tmp_path / name, {"w": jnp.ones(8)}) for name in ("one", "other"))
    file = other / FILE_NAME
    whole = file.read_bytes()
    for wrong in (
        b"",
        whole[:-9],
        whole[: len(whole) // 2],
        b"{" * 300,
        whole.replace(b'"w"', b'"v"'),
    ):
        file.write_bytes(wrong)
        ran = in_this_process(capsys, "diff", one, other)
        assert (ran.status, ran.out) == (1, ""), wrong[:20]
        assert str(other) in ran.err
