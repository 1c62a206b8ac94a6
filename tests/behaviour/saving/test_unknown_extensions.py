"""What an extension that is unknown here has stored: carried unchanged, and in nobody's way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec import Raw
from msgspec.structs import replace
from safetensors.numpy import save_file

import ckpt
from ckpt._plan.compared_leaves import how_items_differ
from ckpt.manifest import FILE_NAME, Manifest, decode, encode, peek
from ckpt.tiers import Tier
from tests.support.command import ckpt_command
from tests.support.joined_steps import join
from tests.support.simulated_job import closed, managers, saved
from tests.support.trees import assert_same

# Spaces and the order of members are nobody's business but the extension's.
COLUMNS = b'{"of" : [0, 2], "at":{"b":null,"a":1e3}}'
SAYS = {"says": ["something", None]}
STATE = {
    "model": {"w": jnp.arange(1000.0), "b": np.ones(3, np.float32), "n": 3},
    "opt": {"mu": np.arange(500.0)},
}


def manifest_of(step: Path) -> Manifest:
    return decode((step / "ckpt.json").read_bytes(), where=str(step))


def note(step: Path) -> None:
    """Let an extension of the future have noted something of a step, and of each of its items."""
    manifest = manifest_of(step)
    items = {
        name: replace(
            item,
            leaves=item.leaves.replaced(
                extensions={**item.leaves.extensions, "later": Raw(COLUMNS)}
            ),
        )
        for name, item in manifest.items.items()
    }
    extensions = manifest.extensions | {"later": SAYS}
    (step / "ckpt.json").write_bytes(encode(replace(manifest, items=items, extensions=extensions)))


def noted(manifest: Manifest) -> tuple[Any, dict[str, bytes | None]]:
    """What it says of the step, and its columns by item."""
    columns = {name: item.leaves.extensions.get("later") for name, item in manifest.items.items()}
    return manifest.extensions.get("later"), {
        name: None if each is None else bytes(each) for name, each in columns.items()
    }


ALL = (SAYS, dict.fromkeys(STATE, COLUMNS))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(
        tmp_path / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        mgr.save(1, items=STATE).result()
    note(tmp_path / "run" / "1")
    return tmp_path / "run"


def test_such_a_step_is_read_like_any_other(root: Path) -> None:
    assert noted(manifest_of(root / "1")) == ALL
    head = peek((root / "1" / "ckpt.json").read_bytes())
    assert head is not None
    assert head.extensions["later"] == SAYS
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert_same(mgr.restore(), STATE)
        found = mgr.metadata(1)
        assert found.tree["model"]["w"].notes.keys() == {"vital_signs"}
        assert (found.info.nonfinite_leaves, "later" in str(found)) == (0, False)
        assert mgr.verify(1).ok
        assert mgr.restore(1, items=["opt"], check_devices=True)["opt"]["mu"][1] == 1
    # A view of one item says what is true of that item.
    of_item = ckpt.sync.metadata(root / "1" / "opt").info
    assert (of_item.nonfinite_leaves, of_item.unequal_leaves) == (0, 0)
    other = manifest_of(root / "1")
    assert how_items_differ(other, other) == ""


def test_a_copy_carries_it(root: Path, tmp_path: Path) -> None:
    assert ckpt_command("cp", root / "1", tmp_path / "copy").status == 0
    assert noted(manifest_of(tmp_path / "copy")) == ALL


def test_a_copy_of_whole_items_carries_their_columns(root: Path, tmp_path: Path) -> None:
    ran = ckpt_command("cp", root / "1", tmp_path / "copy", "--select", "model")
    assert ran.status == 0, ran.err
    assert noted(manifest_of(tmp_path / "copy")) == (None, {"model": COLUMNS})
    assert "'later'" in ran.err
    assert "'vital_signs'" not in ran.err


def test_a_copy_of_some_leaves_says_that_it_does_not(root: Path, tmp_path: Path) -> None:
    ran = ckpt_command("cp", root / "1", tmp_path / "copy", "--select", "model:w")
    assert ran.status == 0, ran.err
    copy = manifest_of(tmp_path / "copy")
    assert (copy.extensions, copy.items["model"].leaves.extensions) == ({}, {})
    assert ran.err.count("'later'") == ran.err.count("'vital_signs'") == 1


def test_an_item_that_goes_leaves_the_columns_of_the_others(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(1, item="opt")
    left = manifest_of(root / "1")
    assert noted(left) == (None, {"model": COLUMNS})
    assert left.extensions["vital_signs"] == {"nonfinite_leaves": 0, "unequal_leaves": 0}
    [said] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "'later'" in said.getMessage()


def test_digests_that_come_later_leave_it(tmp_path: Path) -> None:
    save_file({"a": np.arange(1000.0, dtype="f4")}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "run", step=1)
    note(tmp_path / "run" / "1")
    before = manifest_of(tmp_path / "run" / "1")
    assert ckpt.sync.verify(tmp_path / "run" / "1").ok
    after = manifest_of(tmp_path / "run" / "1")
    assert len(before.items["default"].leaves.unchecked())
    assert not len(after.items["default"].leaves.unchecked())
    assert noted(after) == (SAYS, {"default": COLUMNS})


def test_a_drain_carries_it(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with ckpt.sync.CheckpointManager(near) as mgr:
        mgr.save(1, items=STATE).result()
    note(near / "1")
    with ckpt.sync.CheckpointManager(far, tiers=[Tier(near)]) as mgr:
        mgr.wait_until_finished()
        mgr.save(2, items=STATE).in_root.result()
    assert noted(manifest_of(far / "1")) == ALL


def test_a_join_of_parts_says_that_it_drops_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mgrs = managers(tmp_path, own_disks=True)
    saved(mgrs, 1, {"w": np.arange(1000.0)})
    closed(mgrs)
    parts = [tmp_path / str(index) / "1" for index in range(len(mgrs))]
    note(parts[0])
    joined = join(parts, tmp_path / "joined" / "1")
    assert joined.extensions == {}
    assert "'later'" in caplog.text


def test_a_checkpoint_written_anew_says_that_it_does_not_have_it(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.sync.convert(root / "1", tmp_path / "anew")
    assert manifest_of(tmp_path / "anew").extensions == {}
    assert "'later' and 'vital_signs'" in caplog.text


def test_columns_need_not_be_an_object(root: Path) -> None:
    manifest = manifest_of(root / "1")
    for found in (b"null", b"[1,2]", b'"x"', b"3"):
        item = manifest.items["opt"]
        other = replace(item, leaves=item.leaves.replaced(extensions={"later": Raw(found)}))
        data = encode(replace(manifest, items={"opt": other}))
        assert noted(decode(data, where="here"))[1] == {"opt": found}
        assert msgspec.json.decode(data)["items"]["opt"]["leaves"]["extensions"] == {
            "later": msgspec.json.decode(found)
        }


def test_damaged_notes_of_a_step_stop_no_retention(tmp_path: Path) -> None:
    """A step whose vital signs cannot be read counts as its head says."""
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, {"w": np.ones(4)})
    path = tmp_path / "1" / FILE_NAME
    manifest = decode(path.read_bytes(), where=str(path))
    damaged = {"vital_signs": Raw(b'{"norms": "AAAA"}')}
    items = {
        name: replace(item, leaves=item.leaves.replaced(extensions=damaged))
        for name, item in manifest.items.items()
    }
    counts = {"vital_signs": {"nonfinite_leaves": 1, "unequal_leaves": 0}}
    path.write_bytes(encode(replace(manifest, items=items, extensions=counts)))
    with ckpt.sync.CheckpointManager(tmp_path, keep=1) as mgr:
        assert mgr.latest_step(healthy=True) == 3
        mgr.save(4, {"w": np.ones(4)})
        mgr.wait_until_finished()
        assert mgr.all_steps() in ([4], [3, 4])
        assert not mgr.verify(4).problems
