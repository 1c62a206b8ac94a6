"""Calls return objects of the classes by which programs annotate them."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path

import anyio
import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
import ckpt.types
from ckpt.keep import KeepPolicy, KeepPolicyLike, Metric, Mode
from ckpt.save_when import SavePolicy, SavePolicyLike
from tests.support.faults import Effect, FileOperation, Plan, Predicate

W = np.ones((4, 4), np.float32)


def check(results: Sequence[tuple[type, object]]) -> None:
    wrong = [(cls, type(result)) for cls, result in results if type(result) is not cls]
    assert not wrong


def test_of_plain_calls(tmp_path: Path) -> None:
    events: list[object] = []
    reports: list[object] = []
    adapt = ckpt.Adapt(report=reports.append)
    with ckpt.sync.CheckpointManager(
        tmp_path / "run",
        trash="trash",
        extensions=[ckpt.extensions.VitalSigns()],
        observers=[events.append],
    ) as mgr:
        commit = mgr.save(1, items={"tree": {"w": jnp.asarray(W)}, "note": "x", "old": "y"})
        info = commit.result()
        mgr.delete(1, item="old")
        mgr.pin(1, "paper")
        with mgr.partial(2) as part:
            part.save({"w": W})
        mgr.delete(2)
        metadata = mgr.metadata(1)
        mgr.restore(1, items={"tree": {"w": W}}, adapt=adapt)
        array = ckpt.sync.open_array(tmp_path / "run" / "1", "tree:w")
        results = [
            (ckpt.Commit, commit),
            (ckpt.types.CommitFuture, commit.in_root),
            (ckpt.types.Progress, commit.progress),
            (ckpt.StepInfo, info),
            (ckpt.types.SaveStatistics, info.statistics),
            (ckpt.types.SyncPartialSave, part),
            (ckpt.types.SyncTrash, mgr.trash),
            (ckpt.types.TrashedStep, mgr.trash.steps()[0]),
            (ckpt.types.SyncWatch, mgr.watch(until=1)),
            (ckpt.types.SyncWatch, ckpt.sync.watch(tmp_path / "run", until=1)),
            (ckpt.StepMetadata, metadata),
            (ckpt.types.DroppedItem, metadata.info.dropped[0]),
            (ckpt.types.ItemInfo, metadata.items["note"]),
            (ckpt.types.LeafInfo, metadata.items["tree"]["w"]),
            (ckpt.types.LeafSigns, ckpt.extensions.VitalSigns.of(metadata.items["tree"]["w"])),
            (ckpt.types.Pin, mgr.pins()[1][0]),
            (ckpt.types.VerifyReport, mgr.verify(1)),
            (ckpt.types.VerifyReport, ckpt.sync.verify(tmp_path / "run" / "1")),
            (ckpt.types.SyncStoredArray, array),
            (ckpt.types.RestoreReport, reports[0]),
            (ckpt.types.Event, events[0]),
            (
                ckpt.types.Conversion,
                ckpt.sync.convert(tmp_path / "run" / "1", tmp_path / "converted"),
            ),
        ]
        (tmp_path / "run" / "1" / "note" / "text.txt").unlink()
        results.append((ckpt.types.Problem, mgr.verify(1).problems[0]))
    check(results)


def test_of_awaited_calls(tmp_path: Path) -> None:
    async def main() -> list[tuple[type, object]]:
        root = tmp_path / "run"
        async with ckpt.CheckpointManager(root, trash="trash") as mgr:
            commit = await mgr.save(1, {"w": W})
            info = await commit
            async with mgr.partial(2) as part:
                await part.save({"w": W})
            await ckpt.save(tmp_path / "alone", {"w": W})
            loaded = await ckpt.merge(
                {root / "1": 0.5, root / "2": 0.5}, like=ckpt.abstract({"w": W})
            )
            await ckpt.convert(tmp_path / "alone", tmp_path / "w.safetensors", format="safetensors")
            await ckpt.adopt(tmp_path / "w.safetensors", tmp_path / "adopted")
            loaded = await ckpt.load(root / "2", like=loaded)
            assert np.array_equal(loaded["w"], W)
            watched = mgr.watch()
            await watched.aclose()
            assert [info async for info in watched] == []
            assert await ckpt.verify(tmp_path / "adopted")
            array = await ckpt.open_array(tmp_path / "alone", "w")
            assert (array.shape, array.dtype, array.nbytes) == ((4, 4), np.float32, W.nbytes)
            assert array.chunks == (4, 4)
            return [
                (ckpt.Commit, commit),
                (ckpt.StepInfo, info),
                (ckpt.types.PartialSave, part),
                (ckpt.types.Trash, mgr.trash),
                (ckpt.types.Watch, mgr.watch(until=1)),
                (ckpt.types.Watch, ckpt.watch(root, until=1)),
                (ckpt.StepMetadata, await ckpt.metadata(tmp_path / "alone")),
                (ckpt.types.StoredArray, array),
            ]

    check(anyio.run(main))


def test_names_of_what_calls_take() -> None:
    assert typing.get_args(Mode) == ("min", "max")
    assert str in typing.get_args(Metric)
    assert KeepPolicy in typing.get_args(KeepPolicyLike)
    assert SavePolicy in typing.get_args(SavePolicyLike)
    (operation,), effect = typing.get_args(Plan)
    assert (operation, effect) == (FileOperation, Effect | None)
    assert typing.get_args(Predicate) == ([FileOperation], bool)
