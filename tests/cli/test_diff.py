"""`ckpt diff`: how two checkpoints differ."""

from __future__ import annotations

import collections
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._inspection.values import leaf_index, read_differences
from ckpt._inspection.values.read_differences import ArrayChange, RunningChanges
from tests.support.command import (
    check_golden,
    ckpt_command,
    environment,
    in_this_process,
    on_terminal,
    settled,
    without_styles,
)
from tests.support.damage import FlipBit, damaged

Array = np.ndarray[Any, Any]
Capsys = pytest.CaptureFixture[str]


def saved(path: Path, state: Any, **options: Any) -> Path:
    """Save a checkpoint, and return its path."""
    ckpt.sync.save(path, state, **options)
    return path


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("values", [False, True], ids=["digests", "values"])
def test_output(values: bool, as_json: bool, run_root: Path) -> None:
    options = [*(["--values"] if values else []), *(["--json"] if as_json else [])]
    ran = ckpt_command("diff", run_root / "10", run_root / "20", *options)
    assert (ran.status, ran.err) == (1, "")
    name = f"diff{'_values' if values else ''}{'_json' if as_json else ''}"
    check_golden(name, settled(ran.out, root=run_root))


def test_output_of_other_structures(tmp_path: Path) -> None:
    first = {
        "gone": jnp.zeros(8),
        "resized": np.zeros((2, 3)),
        "recast": np.zeros(3, np.float32),
        "name": "a\x1b[31m",
        "key": jax.random.key(0, impl="rbg"),
        "nan": np.array([1.0, math.nan, math.inf]),
        "count": 3,
    }
    second = {
        "here": 1,
        "resized": np.zeros((2, 4)),
        "recast": np.zeros(3, np.float16),
        "name": "b",
        "key": jax.random.key(0),
        "nan": np.array([math.nan, math.nan, -math.inf]),
        "count": 3.0,
    }
    one = saved(tmp_path / "one", first, custom_metadata={"lr": 0.1, "old": {"a": [1]}})
    other = saved(tmp_path / "other", second, custom_metadata={"lr": 0.1, "new": None})
    ran = ckpt_command("diff", one, other, "--values")
    assert (ran.status, ran.err) == (1, "")
    assert "\x1b" not in ran.out
    check_golden("diff_structures", settled(ran.out, path=tmp_path))


@pytest.mark.parametrize("options", [(), ("--values",)])
def test_equal_checkpoints_are_the_same(
    options: tuple[str, ...], tmp_path: Path, capsys: Capsys
) -> None:
    def state() -> Any:
        return {"w": jnp.arange(8.0), "nan": np.array([math.nan]), "n": None, "e": np.zeros(0)}

    one, other = saved(tmp_path / "one", state()), saved(tmp_path / "other", state())
    ran = in_this_process(capsys, "diff", one, other, *options)
    assert (ran.status, ran.out) == (0, f"{one} and {other} are the same: 3 leaves\n")
    assert ckpt_command("diff", one, other, "--json").json["is_same"] is True


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1], (1,)),
        ({"a": None, "b": 1}, {"b": 1}),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ({"a": "x" * 100}, {"a": "x" * 99 + "y"}),
        ({"a": np.float32(0)}, {"a": np.float32(-0.0)}),
        ({"a": jax.random.key(0)}, {"a": jax.random.key(1)}),
    ],
)
@pytest.mark.parametrize("options", [(), ("--values",)])
def test_small_differences_are_seen(
    first: Any, second: Any, options: tuple[str, ...], tmp_path: Path, capsys: Capsys
) -> None:
    one, other = saved(tmp_path / "one", first), saved(tmp_path / "other", second)
    assert in_this_process(capsys, "diff", one, other, *options).status == 1
    assert in_this_process(capsys, "diff", one, one, *options).status == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"metrics": {"loss": 0.1}}, {"metrics": {"loss": 0.10000001}}),
        ({"custom_metadata": {"a/b": 1}}, {"custom_metadata": {"a": {"b": 1}}}),
        ({"custom_metadata": {"a": 1}}, {"custom_metadata": {"a": 1.0}}),
        ({"custom_metadata": {}}, {}),
    ],
)
def test_metrics_and_metadata_are_compared(
    first: Any, second: Any, tmp_path: Path, capsys: Capsys
) -> None:
    for name, options in (("one", first), ("other", second)):
        with ckpt.sync.CheckpointManager(tmp_path / name) as mgr:
            mgr.save(1, {"w": 1}, **options)
    assert in_this_process(capsys, "diff", tmp_path / "one", tmp_path / "other").status == 1
    assert in_this_process(capsys, "diff", tmp_path / "one", tmp_path / "one").status == 0


def test_items_of_other_handlers_are_compared_by_their_files(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("other", 1), ("same", 0)):
        generator = np.random.default_rng(seed)
        ckpt.sync.save(tmp_path / name, items={"m": {"w": 1}, "rng": generator})
    ran = ckpt_command("diff", tmp_path / "one", tmp_path / "other")
    assert ran.status == 1
    assert "rng" in ran.out
    assert ckpt_command("diff", tmp_path / "one", tmp_path / "same").status == 0


def test_arrays_with_other_chunks_are_compared_when_they_are_read(
    tmp_path: Path, capsys: Capsys
) -> None:
    array = np.random.default_rng(0).random((4096, 64))
    one = saved(tmp_path / "one", {"w": array})
    cut = {"w": ckpt.ArrayFormat(chunk_bytes=1 << 20, split_axes=(1,))}
    other = saved(tmp_path / "other", {"w": array}, formats=cut)
    ran = in_this_process(capsys, "diff", one, other)
    assert ran.status == 1
    assert "not compared (--values reads them)" in ran.out
    assert in_this_process(capsys, "diff", one, other, "--values").status == 0
    array[4000, 60] = 5
    changed = saved(tmp_path / "changed", {"w": array}, formats=cut)
    ran = in_this_process(capsys, "diff", one, changed, "--values", "--json")
    [found] = ran.json["contents"]
    assert found["change"]["different"] == 1
    assert 4 <= found["change"]["max"] <= 5


def test_values_are_read_in_bounded_pieces(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = {"**": ckpt.ArrayFormat(chunk_bytes=1 << 20)}
    state = {"w": np.zeros((4096, 256)), **{f"s{n}": np.zeros(1000) for n in range(500)}}
    one = saved(tmp_path / "one", state, formats=cut)
    other = saved(tmp_path / "other", {name: each + 1 for name, each in state.items()}, formats=cut)
    limit = 2 << 20
    for module in (leaf_index, read_differences):
        monkeypatch.setattr(module, "PIECE_BYTES", limit)
    sizes = []
    read = leaf_index.PieceReader.read

    async def seen(self: Any, wanted: Any) -> Any:
        found = await read(self, wanted)
        sizes.append(sum(each.nbytes for each in found))
        return found

    monkeypatch.setattr(leaf_index.PieceReader, "read", seen)
    ran = in_this_process(capsys, "diff", one, other, "--values", "--json")
    assert len(ran.json["contents"]) == 501
    assert sum(sizes) == 2 * sum(each.nbytes for each in state.values())
    assert max(sizes) <= limit
    # Small arrays are read together.
    assert len(sizes) <= 16


def test_compression_makes_no_difference(tmp_path: Path, capsys: Capsys) -> None:
    state = {"w": np.zeros((4096, 64))}
    cut = ckpt.ArrayFormat(chunk_bytes=1 << 20)
    packed = ckpt.ArrayFormat(chunk_bytes=1 << 20, compression="zstd")
    one = saved(tmp_path / "one", state, formats={"w": cut})
    other = saved(tmp_path / "other", state, formats={"w": packed})
    assert in_this_process(capsys, "diff", one, other).status == 0


def test_files_of_other_libraries_have_no_digests(tmp_path: Path, capsys: Capsys) -> None:
    np.savez(tmp_path / "one.npz", w=np.arange(4.0))
    other = saved(tmp_path / "other", {"w": np.arange(4.0)})
    ran = in_this_process(capsys, "diff", tmp_path / "one.npz", other, "--json")
    assert ran.status == 1
    assert [each["leaf"]["path"] for each in ran.json["not_compared"]] == ["w"]
    ran = in_this_process(capsys, "diff", tmp_path / "one.npz", other, "--values", "--json")
    assert (ran.json["contents"], ran.json["not_compared"]) == ([], [])


def test_the_largest_change_is_first(tmp_path: Path, capsys: Capsys) -> None:
    state = {name: np.zeros(3) for name in "abcd"}
    one = saved(tmp_path / "one", state)
    state |= {"b": np.full(3, 2.0), "c": np.ones(3), "d": np.array([0, 0, math.nan])}
    other = saved(tmp_path / "other", state)
    ran = in_this_process(capsys, "diff", one, other, "--values", "--json")
    assert [each["leaf"]["path"] for each in ran.json["contents"]] == ["d", "b", "c"]


def test_damage_is_found_and_the_leaf_and_checkpoint_named(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", {"w": np.arange(300_000.0)})
    other = saved(tmp_path / "other", {"w": np.ones(300_000)})
    largest = max(other.rglob("d/*"), key=lambda each: each.stat().st_size)
    with damaged(other, FlipBit(largest.relative_to(other).as_posix(), 77)):
        assert ckpt_command("diff", one, other).status == 1
        ran = ckpt_command("diff", one, other, "--values")
    assert (ran.status, ran.out) == (1, "")
    assert "'w'" in ran.err
    assert str(other) in ran.err


def test_wrong_paths_are_refused(run_root: Path, tmp_path: Path) -> None:
    assert ckpt_command("diff", run_root / "10").status == 2
    assert ckpt_command("diff", run_root / "10", tmp_path / "no").status == 2
    assert ckpt_command("diff", tmp_path, run_root / "10").status == 2


def test_manifests_are_compared_without_jax(run_root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt", "diff", run_root / "10", run_root],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert ran.returncode == 1
    assert not imported & {"jax", "tensorstore", "pydantic"}


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, run_root: Path) -> None:
    paths = run_root / "10", run_root / "20"
    status, shown = on_terminal("diff", *paths, "--values", columns=columns)
    assert status == 1
    tables = without_styles(shown).splitlines()[:-1]
    # Seven columns of six characters, and the gaps between them.
    assert max(map(len, tables)) <= max(columns, 7 * 6 + 6 * 2)


def changes(one: Array, other: Array, cuts: list[int], **options: Any) -> ArrayChange:
    found = RunningChanges(one.dtype, **options)
    for pair in zip(
        np.split(one.reshape(-1), sorted(cuts)),
        np.split(other.reshape(-1), sorted(cuts)),
        strict=True,
    ):
        found.add(*pair)
    return found.result()


@given(st.data())
def test_changes_of_pieces_are_those_of_numpy(data: st.DataObject) -> None:
    names = ("bool", "int8", "uint8", "int64", "uint64", "float16", "float32", "float64")
    dtype = np.dtype(data.draw(st.sampled_from(names)))
    length = data.draw(st.integers(0, 60))
    one = data.draw(arrays.arrays(dtype, length))
    other = one.copy()
    if length:
        for place in data.draw(st.lists(st.integers(0, length - 1), max_size=5)):
            other[place] = data.draw(arrays.from_dtype(dtype))
    cuts = data.draw(st.lists(st.integers(0, length), max_size=3))
    found = changes(one, other, cuts)
    if dtype.kind in "biu":
        sizes = abs(one.astype(object) - other.astype(object))
        assert found.different == int((one != other).sum())
        finite = np.ones(length, bool)
    else:
        nans = np.isnan(one), np.isnan(other)
        finite = np.isfinite(one) & np.isfinite(other)
        assert found.different == int(((one != other) & ~(nans[0] & nans[1])).sum())
        assert found.nan == int((nans[0] != nans[1]).sum())
        wide = one[finite].astype(np.longdouble), other[finite].astype(np.longdouble)
        sizes = np.minimum(abs(wide[0] - wide[1]), np.finfo(np.float64).max)
    assert found.size == length
    if not finite.any():
        assert (found.max, found.mean, found.ulps) == (None, None, None)
        return
    largest = max(sizes)
    assert found.max is not None
    assert math.isclose(found.max, float(largest), rel_tol=1e-12) or found.max == largest
    mean = float(sum(sizes) / len(sizes))
    assert found.mean == pytest.approx(mean, rel=1e-9, abs=5e-324)


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_ulps_count_the_numbers_between(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0]
    for value in values:
        start = place = np.array([value], dtype)
        for steps in range(1, 4):
            place = np.nextafter(place, np.array([np.inf], dtype))
            assert changes(start, place, []).ulps == steps
            assert changes(place, start, []).ulps == steps
    extremes = np.array([np.finfo(np.float64).max]), np.array([-np.finfo(np.float64).max])
    assert changes(*extremes, []).ulps == 2 * (0x7FEFFFFFFFFFFFFF)


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float8_e8m0fnu", "float8_e4m3fn"])
def test_ulps_of_all_numbers_of_small_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = np.arange(16 if "4_e2" in name else 256, dtype=np.uint8).view(dtype)
    numbers = bits.astype(np.float64)
    ordered = bits[np.isfinite(numbers)][np.argsort(numbers[np.isfinite(numbers)], kind="stable")]
    for low, high in itertools.pairwise(ordered):
        is_zero = float(low) == float(high) == 0
        assert changes(np.array([low]), np.array([high]), []).ulps == (0 if is_zero else 1)


def test_keys_differ_without_a_size() -> None:
    found = changes(np.array([0, 1], np.uint32), np.array([0, 2], np.uint32), [], is_key=True)
    assert (found.different, found.max, found.mean) == (1, None, None)


def test_complex_numbers_differ_by_their_distance() -> None:
    found = changes(np.array([0j, 1 + 1j]), np.array([3 + 4j, 1 + 1j]), [1])
    assert (found.different, found.max, found.mean) == (1, 5.0, 2.5)
