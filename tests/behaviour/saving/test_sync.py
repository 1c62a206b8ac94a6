"""The plain facade: the same names without `await`, wherever plain code runs."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.support.forked_programs import run
from tests.support.numbered_states import state_of
from tests.support.paths import PROGRAMS
from tests.support.trees import assert_same

SCRIPTS = str(PROGRAMS / "end_scripts.py")
PATIENCE_S = 120


def small(number: int) -> dict[str, Any]:
    return {"w": np.full(64, number, np.int32), "number": number}


# --- The same names, the same parameters ----------------------------------------------------------


def public(owner: Any) -> dict[str, Any]:
    """Public members of a class, and those special ones that a user calls."""
    members = inspect.getmembers_static(owner)
    return {n: m for n, m in members if not n.startswith("_") or n == "__init__"}


def parameters(function: Any) -> list[tuple[str, Any, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default, p.annotation) for p in found]


def test_the_two_managers_have_the_same_public_members() -> None:
    mine, theirs = public(ckpt.sync.CheckpointManager), public(ckpt.CheckpointManager)
    assert set(mine) == set(theirs)
    assert {"save", "restore", "all_steps", "latest_step", "delete", "close"} <= set(mine)


@pytest.mark.parametrize("name", sorted(public(ckpt.CheckpointManager)))
def test_a_method_has_the_same_parameters_and_result_in_both(name: str) -> None:
    mine = public(ckpt.sync.CheckpointManager)[name]
    theirs = public(ckpt.CheckpointManager)[name]
    if isinstance(theirs, property):
        mine, theirs = mine.fget, theirs.fget
    assert parameters(mine) == parameters(theirs)
    results = [inspect.signature(each).return_annotation for each in (mine, theirs)]
    assert results[0].removeprefix("Sync") == results[1]
    assert not inspect.iscoroutinefunction(mine)


def test_the_functions_are_the_same_in_both() -> None:
    functions = {name for name in ckpt.__all__ if inspect.isfunction(getattr(ckpt, name))}
    # It waits for nothing, so there is one for both.
    assert functions - {"abstract"} == set(ckpt.sync.__all__) - {"CheckpointManager"}
    assert {"save", "load", "metadata"} <= functions
    for name in functions - {"abstract"}:
        mine, theirs = getattr(ckpt.sync, name), getattr(ckpt, name)
        assert parameters(mine) == parameters(theirs), name
        assert not inspect.iscoroutinefunction(mine), name


# --- Wherever plain code runs ---------------------------------------------------------------------

SCRIPT = """
import numpy as np
import ckpt.sync

state = {"w": np.arange(1000.0), "n": 1}
with ckpt.sync.CheckpointManager("run") as mgr:
    assert mgr.latest_step() is None
    for step in range(3):
        commit = mgr.save(step, state, metrics={"loss": step})
    assert commit.result().step == 2
    assert mgr.all_steps() == [0, 1, 2]
    assert mgr.metrics(1) == {"loss": 1.0}
    assert mgr.metadata().info.step == 2
    mgr.delete(0)
    found = mgr.restore()
assert (found["w"] == state["w"]).all() and found["n"] == 1
info = ckpt.sync.save("final", state)
assert info.nbytes == 8000
assert (ckpt.sync.load("final")["w"] == state["w"]).all()
assert (ckpt.sync.load("run/1")["w"] == state["w"]).all()
assert ckpt.sync.metadata("final").tree["n"] == 1
print("done")
"""


def test_in_a_plain_script(tmp_path: Path) -> None:
    ran = run("-c", SCRIPT, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")


def test_in_four_threads_with_one_manager(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr, ThreadPoolExecutor(4) as threads:
        together = threading.Barrier(4)

        def work(first: int) -> None:
            together.wait(PATIENCE_S)
            for step in range(first, 20, 4):
                info = mgr.save(step, small(step)).result(PATIENCE_S)
                assert info is not None
                assert info.step == step
                assert_same(mgr.restore(step), small(step))
                assert step in mgr.all_steps()

        list(threads.map(work, range(4)))
        assert mgr.all_steps() == list(range(20))


def test_in_four_threads_with_a_manager_each(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait(PATIENCE_S)
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            for step in range(number, 20, 4):
                mgr.save(step, small(step)).result(PATIENCE_S)
                assert_same(mgr.restore(step), small(step))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == list(range(20))
        for step in range(20):
            assert_same(mgr.restore(step), small(step))
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(20))}


def test_one_shots_in_four_threads(tmp_path: Path) -> None:
    def work(number: int) -> None:
        path = tmp_path / str(number)
        ckpt.sync.save(path, state_of(number, large=1 << 14))
        assert_same(ckpt.sync.load(path), state_of(number, large=1 << 14))
        assert ckpt.sync.metadata(path).tree["number"] == number

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(8)))


def test_in_a_running_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
            commit = mgr.save(0, small(0))
            assert commit.result() is await commit
            assert_same(mgr.restore(), small(0))
            assert mgr.all_steps() == [0]
        ckpt.sync.save(tmp_path / "one", small(1))
        assert_same(ckpt.sync.load(tmp_path / "one"), small(1))

    asyncio.run(main())


def test_both_managers_side_by_side(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            with ckpt.sync.CheckpointManager(tmp_path) as plain:
                await (await mgr.save(0, small(0)))
                plain.save(1, small(1)).result()
                assert await mgr.all_steps() == plain.all_steps() == [0, 1]

    asyncio.run(main())


def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No settings of the user's, neither read nor written.
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    cells = [
        "import sys; print(sys.executable)",
        "import numpy as np\nimport ckpt, ckpt.sync\nstate = {'w': np.arange(1000.0)}",
        # Plain calls, although a cell runs inside a running loop.
        "import asyncio; asyncio.get_running_loop()",
        "mgr = ckpt.sync.CheckpointManager('run')\ncommit = mgr.save(0, state)",
        "print(commit.result().step, mgr.all_steps(), (mgr.restore()['w'] == state['w']).all())",
        "mgr.close()",
        "ckpt.sync.save('final', state)\nprint((ckpt.sync.load('final')['w'] == state['w']).all())",
        # And `await`, as notebooks allow.
        "async with ckpt.CheckpointManager('run') as mgr:\n    commit = await mgr.save(1, state)",
        "print((await commit).step, ckpt.sync.CheckpointManager('run').all_steps())",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook,
        timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    printed = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
    ]
    assert printed[0].strip() == sys.executable, "the kernel is another interpreter"
    assert printed[4] == "0 [0] True\n"
    assert printed[6] == "True\n"
    assert printed[8] == "1 [0, 1]\n"


# --- Where a call would wait for ever -------------------------------------------------------------


def test_a_blocking_call_on_the_library_s_own_thread_is_refused(tmp_path: Path) -> None:
    """In a child, which can be killed where it does wait for ever."""
    ran = run(SCRIPTS, "blocks_the_library", tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()[:-1]]
    found = {call: (error, text) for call, error, text in lines}
    methods = {name for name in public(ckpt.sync.CheckpointManager) if name != "__init__"}
    at_once = {"directory", "is_saving_in_progress", "mark", "reached_preemption", "watch", "trash"}
    at_once |= {"steps_in_progress"}
    in_callback = {call.removeprefix("callback ") for call in found if call.startswith("callback")}
    assert in_callback == methods - at_once
    assert {"observer result", "observer exception"} <= set(found)
    for call, (error, text) in found.items():
        assert error == "InvalidArgumentError", f"{call}: {text}"
        assert "own thread" in text
        assert "hand the work to another thread" in text


def test_the_outcome_of_a_commit_can_be_read_in_its_own_callback(tmp_path: Path) -> None:
    found: Future[Any] = Future()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        commit = mgr.save(0, small(0))
        commit.add_done_callback(lambda done: found.set_result(done.result()))
        assert found.result(PATIENCE_S).step == 0
