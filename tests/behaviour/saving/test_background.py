"""One-shot saves that go on in the background."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._calls.background import background_saves
from ckpt.handlers import Deferred
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": jnp.full((256, 256), value), "b": np.full(3, value)}


def test_it_returns_before_the_checkpoint_is_there(tmp_path: Path) -> None:
    gate = Gate()
    commit = ckpt.sync.save(tmp_path / "a", gate, handlers=[GateHandler()], durable=False)
    assert gate.reached.wait(PATIENCE_S)
    assert not commit.done()
    assert not (tmp_path / "a").exists()
    gate.open()
    info = commit.result(PATIENCE_S)
    assert (info.step, info.path) == (None, str(tmp_path / "a"))
    assert (tmp_path / "a" / "ckpt.json").exists()


def test_the_time_of_waiting_is_a_part_of_the_time_until_all_is_written(tmp_path: Path) -> None:
    taken = ckpt.sync.save(tmp_path / "a", state(), durable=False).result(PATIENCE_S).statistics
    assert taken.waited is not None
    assert taken.written is not None
    assert 0 <= taken.waited <= taken.written


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_is_donated_or_changed_afterwards_is_saved_as_it_was(
    backend: str, tmp_path: Path
) -> None:
    async def main() -> None:
        commits = []
        for number in range(4):
            given = state(number)
            commits.append(
                await ckpt.save(
                    tmp_path / str(number), given, custom_metadata=number, durable=False
                )
            )
            given["w"].delete()
            given["b"][:] = -1
        for number, commit in enumerate(commits):
            info = await commit
            assert info.custom_metadata == number
            found = await ckpt.load(info.path)
            assert (np.asarray(found["w"]) == number).all()
            assert (found["b"] == number).all()

    anyio.run(main, backend=backend)


def test_all_saves_share_one_thread_and_its_memory(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    for number in range(3):
        commit = ckpt.sync.save(tmp_path / str(number), state(), durable=False)
        ended = threading.Event()

        def note(_: ckpt.Commit, ended: threading.Event = ended) -> None:
            # On the library's thread, unless the commit is done already.
            threads.append(threading.current_thread())
            ended.set()

        commit.add_done_callback(note)
        assert ended.wait(PATIENCE_S)
    engines = [each for each in threads if each is not threading.current_thread()]
    assert len(set(engines)) <= 1
    saves = background_saves()
    assert saves is background_saves()
    assert saves._engine.arena.used == 0
    assert all(each is saves.loop._thread for each in engines)
    assert saves.loop._thread is not None


def test_errors_are_raised_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match="leaf 'w'"):
        ckpt.sync.save(tmp_path / "a", {"w": object()}, durable=False)
    with pytest.raises(errors.InvalidArgumentError, match="nothing to save"):
        ckpt.sync.save(tmp_path / "a", durable=False)
    ckpt.sync.save(tmp_path / "a", state(), durable=False).result(PATIENCE_S)
    with pytest.raises(errors.StepExistsError, match="Choose another path"):
        ckpt.sync.save(tmp_path / "a", state(), durable=False)
    ckpt.sync.save(tmp_path / "a", state(2), if_exists="replace", durable=False).result(PATIENCE_S)
    assert ckpt.sync.load(tmp_path / "a")["b"][0] == 2
    # One save's error is no other's.
    gate = Gate()

    class Failing(GateHandler):
        async def stage(self, item: Gate, writer: Any) -> Any:
            staged = await super().stage(item, writer)

            async def fail() -> Any:
                await staged
                raise RuntimeError("mine")

            return Deferred(fail)

    failing = ckpt.sync.save(tmp_path / "b", gate, handlers=[Failing()], durable=False)
    gate.open()
    ckpt.sync.save(tmp_path / "c", state(), durable=False).result(PATIENCE_S)
    with pytest.raises(errors.HandlerError, match="mine"):
        failing.result(PATIENCE_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_a_cancelled_one_leaves_nothing(tmp_path: Path) -> None:
    gate = Gate()
    commit = ckpt.sync.save(tmp_path / "a", gate, handlers=[GateHandler()], durable=False)
    assert gate.reached.wait(PATIENCE_S)
    assert commit.cancel()
    gate.open()
    with pytest.raises(errors.CommitCancelledError):
        commit.result(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_formats_are_those_of_the_call(tmp_path: Path) -> None:
    formats = {"w": "bfloat16"}
    ckpt.sync.save(tmp_path / "a", state(), formats=formats, durable=False).result(PATIENCE_S)
    ckpt.sync.save(tmp_path / "b", state(), durable=False).result(PATIENCE_S)
    assert ckpt.sync.load(tmp_path / "a")["w"].dtype == jnp.bfloat16
    assert ckpt.sync.load(tmp_path / "b")["w"].dtype == jnp.float32


PROGRAM = """
import sys
import jax.numpy as jnp
import ckpt.sync
ckpt.sync.save(sys.argv[1], {"w": jnp.ones((1000, 1000))}, durable=False)
if sys.argv[2] == "fails":
    class Failing:
        name = "failing"
        def accepts(self, item):
            return isinstance(item, set)
        async def stage(self, item, writer):
            from ckpt.handlers import Deferred
            async def fail():
                raise RuntimeError("mine")
            return Deferred(fail)
        async def load(self, entry, like, adapt, reader):
            raise AssertionError
    ckpt.sync.save(sys.argv[1] + "-2", {1}, handlers=[Failing()], durable=False)
print("ends")
"""


@pytest.mark.parametrize("how", ["saves", "fails"])
def test_a_program_that_ends_finishes_its_saves_and_says_what_failed(
    how: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "a", how],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout == "ends\n"
    assert (ckpt.sync.load(tmp_path / "a")["w"] == 1).all()
    if how == "saves":
        assert ended.returncode == 0, ended.stderr
    else:
        assert ended.returncode == 120
        assert f"a save to {tmp_path / 'a-2'} failed, and was never awaited" in ended.stderr
        assert "mine" in ended.stderr
        assert not (tmp_path / "a-2").exists()
