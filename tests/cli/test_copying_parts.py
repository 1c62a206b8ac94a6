"""`ckpt cp --select`: a part of a checkpoint, as a whole one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt._conversion.copies import selection
from ckpt.manifest import decode
from tests.cli.test_copying import files_of
from tests.cli.test_verifying import flip
from tests.support.command import Ran, in_this_process


class Moments(NamedTuple):
    mu: Any
    nu: Any


def state_of(step: int) -> dict[str, Any]:
    embed = np.arange(1000.0) + step
    layers = [{"kernel": jnp.full((8, 8), step + each), "bias": jnp.ones(8)} for each in range(3)]
    return {
        "params": {"embed": embed, "layers": layers, "tied": embed},
        "opt": (Moments(jnp.zeros(4), np.ones(4)), None, {}),
        "epoch": step,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of two steps of one unnamed tree; change nothing."""
    root = tmp_path_factory.mktemp("parts") / "a"
    with ckpt.sync.CheckpointManager(root, custom_metadata={"model": "tiny"}) as mgr:
        for step in (1, 2):
            mgr.save(step, state_of(step), metrics={"loss": 0.5}, custom_metadata={"seen": step})
        mgr.wait_until_finished()
        mgr.pin(2, "paper")
    return root


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several items; change nothing."""
    path = tmp_path_factory.mktemp("parts") / "items"
    ckpt.sync.save(
        path,
        items={"model": state_of(1)["params"], "opt": {"mu": np.zeros(500)}, "config": {"n": 2}},
        custom_metadata={"seen": 1},
    )
    return path


@pytest.fixture
def cp(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Ran:
        return in_this_process(capsys, "cp", *arguments)

    return call


def leaves_of(path: Path) -> list[str]:
    """The leaf paths of a checkpoint of one unnamed tree."""
    manifest = decode((path / "ckpt.json").read_bytes(), where=str(path))
    return list(manifest.items["default"].leaves.names)


def embed_in(path: Path) -> tuple[Path, int]:
    """The file that holds an array of a checkpoint, and where that begins."""
    item = decode((path / "ckpt.json").read_bytes(), where=str(path)).items["default"]
    leaf = next(each for each in item.leaves if each.name == "params.embed")
    file = item.data_files[leaf.files[0] if leaf.files else 0]
    return path / "default" / file, leaf.offsets[0]


def test_a_branch_of_every_step_of_a_root(root: Path, tmp_path: Path, cp: Any) -> None:
    ran = cp(root, tmp_path / "b", "--select", "params")
    assert ran.status == 0
    assert ran.out.count(": copied, ") == 2
    # What was left out is said once.
    assert ran.err == "ckpt: left out, since not selected: 3 leaves\n"
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        assert mgr.all_steps() == [1, 2]
        assert mgr.metrics(2) == {"loss": 0.5}
        assert mgr.metadata(2).info.custom_metadata == {"seen": 2}
        assert mgr.root_metadata() == {"model": "tiny"}
        assert [each.name for each in mgr.pins()[2]] == ["paper"]
        for step in (1, 2):
            assert mgr.verify(step).ok
            found = mgr.restore(step)
            wanted = state_of(step)["params"]
            assert list(found) == ["params"]
            assert np.array_equal(found["params"]["embed"], wanted["embed"])
            # The same array twice, as it was saved.
            assert found["params"]["tied"] is found["params"]["embed"]
            kernel = found["params"]["layers"][2]["kernel"]
            assert np.array_equal(kernel, wanted["layers"][2]["kernel"])
        # Ages decide what is kept, so they are those of the steps.
        with ckpt.sync.CheckpointManager(root, mode="r") as old:
            assert mgr.metadata(1).info.created == old.metadata(1).info.created


def test_orbax_reads_what_was_selected(root: Path, tmp_path: Path, cp: Any) -> None:
    assert cp(root / "2", tmp_path / "b", "--select", "params.embed").status == 0
    found = ocp.StandardCheckpointer().restore(tmp_path / "b" / "default")
    assert np.array_equal(found["params"]["embed"], np.arange(1000.0) + 2)


def test_containers_that_lose_children(root: Path, tmp_path: Path, cp: Any) -> None:
    ran = cp(root / "1", tmp_path / "b", "--select", "params.layers.1", "--select", "opt.0.nu")
    assert ran.status == 0
    assert "lists, tuples and objects that lost a part of their leaves are dicts" in ran.err
    found = ckpt.sync.load(tmp_path / "b")
    assert list(found["params"]["layers"]) == [1]
    assert np.array_equal(found["opt"][0]["nu"], np.ones(4))
    with pytest.raises(ckpt.errors.TargetMismatchError):
        ckpt.sync.load(tmp_path / "b", like=state_of(1))
    # Leaf paths are what they were, and what is empty stays in what was selected as a whole.
    names = leaves_of(tmp_path / "b")
    assert names == ["opt.0.nu", "params.layers.1.bias", "params.layers.1.kernel"]
    assert cp(root / "1", tmp_path / "c", "--select", "opt", "--select", "epoch").status == 0
    assert ckpt.sync.load(tmp_path / "c")["opt"][1:] == (None, {})


@pytest.mark.parametrize(
    ("patterns", "leaves"),
    [
        (["params.**"], 8),
        (["params.layers.*.kernel"], 3),
        (["**.kernel", "epoch"], 4),
        (["params.tied"], 1),
        (["*"], 11),
    ],
)
def test_patterns(patterns: list[str], leaves: int, root: Path, tmp_path: Path, cp: Any) -> None:
    options = [each for pattern in patterns for each in ("--select", pattern)]
    assert cp(root / "1", tmp_path / "b", *options).status == 0
    assert len(leaves_of(tmp_path / "b")) == leaves
    if leaves == 11:
        assert files_of(tmp_path / "b") == files_of(root / "1")


def test_whole_items_are_copied_as_they_are(items: Path, tmp_path: Path, cp: Any) -> None:
    ran = cp(items, tmp_path / "b", "--select", "opt", "--select", "config")
    assert (ran.status, ran.err) == (0, "ckpt: left out, since not selected: the item model\n")
    before, after = files_of(items), files_of(tmp_path / "b")
    kept = {path for path in before if path.startswith(("opt/", "config/"))}
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert not [path for path in after if path.startswith("model/")]
    assert ckpt.sync.verify(tmp_path / "b").ok
    found = ckpt.sync.load(tmp_path / "b")
    assert sorted(found) == ["config", "opt"]
    assert found["config"] == {"n": 2}
    found = ocp.StandardCheckpointer().restore(tmp_path / "b" / "opt")
    assert np.array_equal(found["mu"], np.zeros(500))
    assert cp(items, tmp_path / "b", "--select", "opt", "--select", "config").out.endswith(
        ": already there\n"
    )


def test_a_part_of_one_item(items: Path, tmp_path: Path, cp: Any) -> None:
    ran = cp(items, tmp_path / "b", "--select", "model:layers.0", "--select", "config")
    assert ran.status == 0
    assert "left out, since not selected: 6 leaves of model, the item opt" in ran.err
    found = ckpt.sync.load(tmp_path / "b")
    assert sorted(found) == ["config", "model"]
    assert list(found["model"]["layers"]) == [0]
    assert ckpt.sync.verify(tmp_path / "b").ok


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("modle", "(is it 'model'?)"),
        ("model:embd", "has no leaf that fits 'embd' (is it 'embed'?)"),
        ("model/embed", "has no item and no leaf that fits (is it 'model:embed'?)"),
        ("model:layers/*/kernel", "fits 'layers%2F*%2Fkernel' (is it 'layers.*.kernel'?)"),
        ("", "expected a leaf path"),
        ("config.n", "has no item and no leaf that fits (is it 'config:n'?)"),
    ],
)
def test_a_pattern_that_fits_nothing(
    pattern: str, words: str, items: Path, tmp_path: Path, cp: Any
) -> None:
    ran = cp(items, tmp_path / "b", "--select", "opt", "--select", pattern)
    assert (ran.status, ran.out) == (2, "")
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "b").exists()


def test_nothing_of_a_root_fits(root: Path, tmp_path: Path, cp: Any) -> None:
    ran = cp(root, tmp_path / "b", "--select", "parms")
    assert (ran.status, ran.out) == (2, "")
    assert "has no leaf that fits (is it 'params'?)" in ran.err
    assert not (tmp_path / "b").exists()


def test_a_part_of_a_virtual_step_is_written(tmp_path: Path, cp: Any) -> None:
    save_file({"a": np.arange(9.0, dtype="f4"), "b": np.ones(3, "f4")}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "a", step=0)
    assert cp(tmp_path / "a", tmp_path / "b", "--select", "a").status == 0
    assert cp(tmp_path / "a", tmp_path / "b", "--select", "a").out.endswith("already there\n")
    (tmp_path / "m.safetensors").unlink()
    assert np.array_equal(ckpt.sync.load(tmp_path / "b" / "0")["a"], np.arange(9.0))


def test_what_a_handler_needs_whole_is_not_cut(
    tmp_path: Path, cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.sync.save(tmp_path / "a", items={"rng": np.random.default_rng(0), "m": {"w": np.ones(3)}})
    assert cp(tmp_path / "a", tmp_path / "b", "--select", "rng").status == 0
    first = ckpt.sync.load(tmp_path / "a")["rng"]
    assert ckpt.sync.load(tmp_path / "b")["rng"].random() == first.random()
    # An item of a handler that keeps a tree: any other name than that of a plain one.
    monkeypatch.setattr(selection, "_PLAIN_TREE", "another")
    ckpt.sync.save(tmp_path / "c", items={"m": {"w": np.ones(3), "v": np.ones(3)}})
    ran = cp(tmp_path / "c", tmp_path / "d", "--select", "m:w")
    assert ran.status == 2
    assert "can only be read whole. Select 'm' or none of it" in ran.err
    assert not (tmp_path / "d").exists()


def test_steps_without_it_are_named(tmp_path: Path, cp: Any) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        mgr.save(1, {"w": jnp.zeros(3)})
        mgr.save(2, {"w": jnp.zeros(3), "ema": jnp.ones(3)})
    ran = cp(tmp_path / "a", tmp_path / "b", "--select", "ema")
    assert ran.status == 0
    assert f"{tmp_path}/b/1: not copied: nothing of it is selected" in ran.out
    assert list(ckpt.sync.load(tmp_path / "b" / "2")) == ["ema"]


def test_a_selection_is_begun_again(root: Path, tmp_path: Path, cp: Any) -> None:
    for options in (["--select", "params"], ["--select", "params", "--verify"]):
        target = tmp_path / f"b{len(options)}"
        assert cp(root, target, *options).status == 0
        before = files_of(target)
        assert cp(root, target, *options).out.count(": already there") == 2
        assert files_of(target) == before
    # Not silently something else.
    ran = cp(root, tmp_path / "b2", "--select", "opt")
    assert ran.status == 2
    assert "has other steps 1, 2 already; nothing was copied" in ran.err


def test_what_is_damaged_in_a_copy_is_written_again(root: Path, tmp_path: Path, cp: Any) -> None:
    target = tmp_path / "b"
    assert cp(root, target, "--select", "params").status == 0
    flip(*embed_in(target / "1"))
    (target / "2" / "default" / "_METADATA").unlink()
    ran = cp(root, target, "--select", "params", "--json")
    assert [each["outcome"] for each in ran.json["steps"]] == ["there", "copied"]
    ran = cp(root, target, "--select", "params", "--verify", "--json")
    assert [each["outcome"] for each in ran.json["steps"]] == ["copied", "there"]
    assert all(ckpt.sync.verify(target / step).ok for step in ("1", "2"))


def test_damage_of_what_is_selected_is_found(root: Path, tmp_path: Path, cp: Any) -> None:
    assert cp(root, tmp_path / "a").status == 0
    flip(*embed_in(tmp_path / "a" / "1"))
    ran = cp(tmp_path / "a", tmp_path / "b", "--select", "params.*", "--select", "opt")
    assert ran.status == 1
    assert "b/1: not copied: " in ran.out
    assert "b/2: copied" in ran.out
    assert not (tmp_path / "b" / "1").exists()
