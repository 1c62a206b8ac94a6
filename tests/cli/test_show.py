"""`ckpt show` of one leaf: its values and figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt
from ckpt._inspection.values import leaf_index
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


def leaves() -> dict[str, Any]:
    """Return leaves of every kind."""
    odd = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "uint2")
    return {
        "wide": jnp.asarray(np.linspace(-3, 3, 1200, dtype=np.float32).reshape(40, 30)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7), 3),
        "flags": np.array([True, False, True]),
        "counts": np.arange(-5, 20),
        "complex": np.array([3 + 4j, 0j]),
        "nothing": np.zeros((0, 3)),
        "gaps": np.array([np.nan, np.inf, -np.inf, 1.0, 2.0]),
        "scalar": np.float32(2.5),
        "large": np.array([2**64 - 1, 0], np.uint64),
        "text": "line\nfeed\x1b[31m",
        "bytes": b"ab",
        "int": 10**30,
        "float": 1.5,
        "function": jnp.tanh,
        "odd[0]": np.ones(3),
        **{name: np.array([1, 2, 1]).astype(getattr(ml_dtypes, name)) for name in odd},
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("show") / "leaves"
    ckpt.sync.save(found, leaves())
    return found


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("leaf", ["params.dense.kernel", "params.dense.kernel[3:5, 0]", "epoch"])
def test_output(leaf: str, as_json: bool, run_root: Path) -> None:
    ran = ckpt_command("show", run_root, leaf, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (0, "")
    name = f"show_{re.sub(r'[^a-z0-9]+', '_', leaf).strip('_')}{'_json' if as_json else ''}"
    check_golden(name, settled(ran.out, root=run_root))


@pytest.mark.parametrize("leaf", leaves())
def test_output_of_a_leaf_of_every_kind(
    leaf: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = in_this_process(capsys, "show", path, leaf)
    assert (ran.status, ran.err) == (0, "")
    name = re.sub(r"\W", "", leaf)
    check_golden(f"show_kind_{name}", settled(ran.out, path=path))
    assert "\x1b" not in ran.out


@pytest.mark.parametrize(
    "index", ["3:5, 0", "-1", "...", "..., -1", "::-7, ::20", "5:5", "1:2,3:4", "39,"]
)
def test_a_part_is_that_of_numpy(
    index: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.asarray(leaves()["wide"])
    parts = [
        ...
        if each == "..."
        else slice(*[int(n) if n else None for n in each.split(":")])
        if ":" in each
        else int(each)
        for each in index.replace(" ", "").strip(",").split(",")
    ]
    expected = array[tuple(parts)]
    found = in_this_process(capsys, "show", path, f"wide[{index}]", "--json").json
    assert tuple(found["shape"]) == expected.shape
    if expected.size <= 1000:
        values = np.array(found["values"], np.float32).reshape(expected.shape)
        np.testing.assert_array_equal(values, expected)
    if expected.size:
        assert found["statistics"]["min"] == expected.min()
        assert found["statistics"]["mean"] == pytest.approx(expected.mean(dtype=float))
    else:
        assert found["statistics"] is None


def test_a_large_array_is_printed_as_numpy_prints_it(path: Path) -> None:
    array = np.asarray(leaves()["wide"])
    expected = np.array2string(array, max_line_width=80, separator=", ", threshold=1000)
    assert expected in ckpt_command("show", path, "wide").out
    assert ckpt_command("show", path, "wide", "--json").json["values"] is None


@pytest.mark.parametrize(
    ("leaf", "hint"),
    [
        ("parms.dense.kernel", "is it 'params.dense.kernel'?"),
        ("params.dense.kernel[9]", "axis 0 has the length 8"),
        ("params.dense.kernel[a]", "no slice"),
        ("params.dense.kernel[]", "no slice"),
        ("params.dense.kernel[::0]", "step of a slice cannot be 0"),
        ("params.dense.kernel[0, 0, 0]", "too many parts"),
        ("params.dense.kernel[..., ...]", "too many parts"),
        ("params.dense.kernel[1.5]", "no slice"),
        ("epoch[0]", "is no array"),
        ("", "has no leaf ''"),
    ],
)
def test_a_wrong_leaf_is_refused(
    leaf: str, hint: str, run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = in_this_process(capsys, "show", run_root, leaf)
    assert (ran.status, ran.out) == (2, "")
    assert hint in ran.err
    assert ran.err.count("\n") == 1


def test_a_wrong_path_is_refused(tmp_path: Path) -> None:
    assert ckpt_command("show", tmp_path / "no", "w").status == 2
    assert ckpt_command("show", tmp_path, "w").status == 2


def test_the_item_is_named_where_several_have_the_leaf(tmp_path: Path) -> None:
    items = {"a": {"w": np.zeros(2), "v": np.ones(1)}, "b": {"w": np.ones(2)}}
    ckpt.sync.save(tmp_path / "x", items=items)
    ran = ckpt_command("show", tmp_path / "x", "w")
    assert [line.split()[0] for line in ran.out.splitlines()[1:3]] == ["a:w", "b:w"]
    assert ckpt_command("show", tmp_path / "x", "b:w[0]", "--json").json["values"] == 1.0
    assert ckpt_command("show", tmp_path / "x", "v", "--json").json["leaf"]["item"] == "a"
    assert "is it 'w'?" in ckpt_command("show", tmp_path / "x", "b:ww").err


def test_a_damaged_chunk_is_found_and_its_leaf_named(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": np.arange(300_000.0), "v": np.ones(3)})
    largest = max((tmp_path / "x").rglob("d/*"), key=lambda each: each.stat().st_size)
    file = largest.relative_to(tmp_path / "x").as_posix()
    with damaged(tmp_path / "x", FlipBit(file, 77)):
        ran = ckpt_command("show", tmp_path / "x", "w")
        assert (ran.status, ran.out) == (1, "")
        assert "'w'" in ran.err
        assert ckpt_command("show", tmp_path / "x", "v").status == 0


def test_only_the_chunks_of_the_part_are_read(tmp_path: Path) -> None:
    ckpt.sync.save(
        tmp_path / "x",
        {"w": np.random.default_rng(0).random((4096, 256))},
        formats={"w": ckpt.ArrayFormat(chunk_bytes=1 << 20, compression="zstd")},
    )
    largest = max((tmp_path / "x").rglob("d/*"), key=lambda each: each.stat().st_size)
    with damaged(tmp_path / "x", FlipBit(largest.relative_to(tmp_path / "x").as_posix(), 99)):
        # The first chunk is damaged.
        assert ckpt_command("show", tmp_path / "x", "w[511:]").status == 1
        assert ckpt_command("show", tmp_path / "x", "w[512:]").status == 0


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_values_and_histogram_fit_the_terminal(columns: int, path: Path) -> None:
    status, shown = on_terminal("show", path, "wide", columns=columns)
    assert status == 0
    _, values, histogram = without_styles(shown).split("\n\n")
    lines = [*values.splitlines(), *histogram.splitlines()]
    assert max(map(len, lines)) <= columns
    assert "█" in histogram


def test_a_terminal_without_unicode_gets_bars_of_ascii(path: Path) -> None:
    ran = ckpt_command("show", path, "wide", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.status == 0
    assert ran.out.isascii()
    assert "  ####" in ran.out


_MEASURED = """
import resource, sys
from ckpt.cli.app import run
status = run(["show", sys.argv[1], sys.argv[2]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def test_memory_is_bounded_whatever_the_size_of_the_array(tmp_path: Path) -> None:
    nbytes = 512 << 20
    ckpt.sync.save(tmp_path / "x", {"w": np.zeros(nbytes // 4, np.float32), "v": np.zeros(4)})
    used = {}
    for leaf in ("w", "v"):
        ran = subprocess.run(
            [sys.executable, "-c", _MEASURED, str(tmp_path / "x"), leaf],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=120,
            check=True,
        )
        used[leaf] = int(ran.stderr) << 10
    assert used["w"] - used["v"] < 6 * leaf_index.PIECE_BYTES < nbytes
