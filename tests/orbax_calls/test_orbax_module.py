"""The module `ckpt_orbax` by itself: what it needs, what it refuses, and how it is installed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt
import ckpt_orbax as ocp
from tests.orbax_calls.runs import small_files
from tests.support import forked_programs
from tests.support.paths import ROOT

MODULES = sorted((ROOT / "ckpt_orbax").rglob("*.py"))


def run(script: str) -> str:
    ended = forked_programs.run("-c", script)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_it_needs_nothing_private_of_the_library() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            private = [name for name in names if name.startswith("ckpt._")]
            assert private == [], path


def test_the_library_does_not_know_it() -> None:
    for path in (ROOT / "ckpt").rglob("*.py"):
        assert "ckpt_orbax" not in path.read_text(), path


def test_it_does_without_orbax() -> None:
    script = (
        "import sys\n"
        "sys.modules['orbax'] = None\n"
        "import ckpt_orbax as ocp, tempfile, jax.numpy as jnp\n"
        "with ocp.CheckpointManager(tempfile.mkdtemp()) as mngr:\n"
        "    mngr.save(1, args=ocp.args.StandardSave({'w': jnp.ones(3)}))\n"
        "    print(mngr.restore(1)['w'].shape)\n"
    )
    assert run(script) == "(3,)"


def test_programs_that_import_orbax_get_it() -> None:
    script = (
        "import ckpt_orbax; ckpt_orbax.install(); ckpt_orbax.install()\n"
        "import orbax.checkpoint as ocp\n"
        "from orbax.checkpoint import args, checkpoint_utils, test_utils\n"
        "from orbax.checkpoint.path import step\n"
        "import orbax.checkpoint.checkpoint_managers as policies\n"
        "from flax.training import orbax_utils\n"
        "assert ocp.CheckpointManager is ckpt_orbax.CheckpointManager\n"
        "assert args.StandardSave is ckpt_orbax.args.StandardSave\n"
        "assert step is ckpt_orbax.path.step and policies.LatestN\n"
        "found = orbax_utils.save_args_from_target({'w': 1})['w']\n"
        "assert type(found) is ckpt_orbax.SaveArgs\n"
        "try: import orbax.checkpoint.pathways\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert run(script).startswith("orbax.checkpoint.pathways: ckpt_orbax has no such module")


def test_it_is_not_installed_over_orbax() -> None:
    script = (
        "import orbax.checkpoint, ckpt_orbax\n"
        "try: ckpt_orbax.install()\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert "imported already" in run(script)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        restore = ocp.args.PyTreeRestore
        transform = ocp.Transform(value_fn=lambda x: x)
        cases: list[tuple[Any, str]] = [
            (restore({"w": 1}, legacy_transform_fn=lambda *_: None), "legacy_transform_fn"),
            (restore({"w": 1}, transforms={"w": transform}), "w: functions of values"),
            (restore({"w": 1}, transforms={"w.*": ocp.Transform()}), "patterns"),
            (ocp.args.StandardRestore({"w": 1}, support_layout=True), "support_layout"),
        ]
        for args, text in cases:
            with pytest.raises(NotImplementedError, match=text):
                mngr.restore(1, args=args)
        assert mngr.restore(1)["w"].shape == (3,)
    with pytest.raises(NotImplementedError, match="LeafType"):
        ocp.type_handlers.register_type_handler(int, object())
    jobs = ocp.options.MultiprocessingOptions(active_processes={0})
    options = ocp.CheckpointManagerOptions(multiprocessing_options=jobs)
    with pytest.raises(NotImplementedError, match="active_processes"):
        ocp.CheckpointManager(tmp_path / "run", options=options)


def test_a_logger_is_told(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = []

    class Logger:
        def log_entry(self, entry: dict[str, Any]) -> None:
            entries.append(entry)

    with ocp.CheckpointManager(tmp_path, logger=Logger()) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        mngr.restore(1)
    told = [(each["event_type"], each["step"], each["directory"]) for each in entries]
    assert told == [("save", 1, str(tmp_path)), ("restore", 1, str(tmp_path))]


def test_a_save_that_has_failed_is_heard_and_not_listed(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        # A timeout that has passed fails the save once its snapshot is taken.
        mngr.wait_until_finished()
        mngr._options.async_options = ocp.AsyncOptions(timeout_secs=0)
        with pytest.raises(ckpt.errors.CheckpointError):
            mngr.save(2, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        mngr._options.async_options = None
        assert mngr.all_steps() == [1]
        assert mngr.save(2, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        assert mngr.all_steps() == [1, 2]


def test_a_save_that_has_failed_gives_no_step_up(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    # Each of another value: equal arrays would share a file.
    one, two, three = (ocp.args.StandardSave({"w": jnp.full((512, 512), n)}) for n in (1, 2, 3))
    with ocp.CheckpointManager(tmp_path, options=options) as mngr:
        mngr.save(1, args=one)
        mngr.wait_until_finished()
        with small_files():
            mngr.save(2, args=two)
            assert mngr.all_steps() == [2]
            with pytest.raises(ckpt.errors.StorageError):
                mngr.wait_until_finished()
        assert mngr.all_steps() == [1]
        mngr.save(3, args=three)
        mngr.wait_until_finished()
        assert mngr.all_steps() == [3]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.isdigit()) == ["3"]


def test_a_failed_save_of_the_newer_interface_is_not_listed(tmp_path: Path) -> None:
    one, two, three = ({"w": jnp.full((512, 512), n)} for n in (1, 2, 3))
    with ocp.v1.training.Checkpointer(tmp_path) as ckptr:
        ckptr.save(1, one)
        with small_files(), pytest.raises(ckpt.errors.StorageError):
            ckptr.save(2, two)
        assert [each.step for each in ckptr.checkpoints] == [1]
        assert ckptr.save(3, three)
        assert [each.step for each in ckptr.checkpoints] == [1, 3]


def test_a_pinned_step_that_is_given_up_stays_and_stops_no_save(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["a"])
    with ocp.CheckpointManager(tmp_path, options=options) as mngr:
        mngr.save(1, args=ocp.args.StandardSave({"w": jnp.ones(2)}), metrics={"a": 2.0})
        mngr.save(2, args=ocp.args.StandardSave({"w": jnp.zeros(2)}), metrics={"a": 1.0})
        with ckpt.sync.CheckpointManager(tmp_path) as other:
            mngr._pending[1].result()  # type: ignore[index]
            other.pin(2, "evaluation")
            assert mngr.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"a": 3.0})
            assert mngr.all_steps() == [3]
            mngr.wait_until_finished()
            assert other.all_steps() == [2, 3]
