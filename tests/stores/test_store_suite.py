"""The conformance suite: every kind of bad store is caught by the check that is about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.storage._base import Attempt, AttemptEntry, FileStamp
from ckpt.storage._local.storage import LocalStorage
from ckpt.testing.conformance import StoreCase, check_store, stores
from ckpt.testing.conformance import store_step_dirs as step_dirs
from ckpt.testing.conformance import store_writers as writers
from tests.stores.places import Place, case_of


class Overwriting(LocalStorage):
    async def publish(self, attempt: Attempt, **options: Any) -> None:
        await super().publish(attempt, overwrite=True)


class Unprotected(LocalStorage):
    """Looks, and then replaces whatever has come since."""

    async def publish(self, attempt: Attempt, *, overwrite: bool, **options: Any) -> None:
        if not overwrite and await self.exists(attempt.step_dir):
            await super().publish(attempt, overwrite=False)
        await anyio.sleep(0.01)
        await super().publish(attempt, overwrite=True)


class Forgetful(LocalStorage):
    """Lists once."""

    _known: list[str] | None = None

    async def step_dirs(self) -> list[str]:
        if self._known is None:
            self._known = await super().step_dirs()
        return self._known


class Unstamped(LocalStorage):
    async def stamps(self, names: Sequence[str], path: str) -> list[FileStamp | None]:
        found = await super().stamps(names, path)
        return [FileStamp("always the same") if stamp else None for stamp in found]


class Shifted(LocalStorage):
    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        await super().read_block(step_dir, path, max(offset - 1, 0), target, then)


class Hasty(LocalStorage):
    """What follows a read comes before it."""

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        if then is not None:
            then()
        await super().read_block(step_dir, path, offset, target)


class Forgiving(LocalStorage):
    """Errors of what follows a read are taken for errors of the file."""

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        try:
            await super().read_block(step_dir, path, offset, target, then)
        except ValueError as error:
            raise CorruptCheckpointError(str(error)) from error


class Short(LocalStorage):
    """What is cut is no error."""

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        try:
            await super().read_block(step_dir, path, offset, target, then)
        except CheckpointError:
            target[:] = bytes(len(target))


class Unlimited(LocalStorage):
    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        return await super().read(step_dir, path, 1 << 30)


class Careless(LocalStorage):
    async def remove(self, step_dir: str, *, attempt: str | None = None) -> bool:
        return await super().remove(step_dir)


class Sloppy(LocalStorage):
    async def put_note(self, name: str, data: bytes, *, replace: bool, durable: bool = True) -> Any:
        return await super().put_note(name, data, replace=True)


class Ageing(LocalStorage):
    async def notes(self, folder: str) -> dict[str, float]:
        return {name: age + 5 for name, age in (await super().notes(folder)).items()}


class Untouched(LocalStorage):
    async def touch_note(self, name: str) -> bool:
        return await self.read("", name, 1 << 20) is not None


class Dirty(LocalStorage):
    async def sweep(self) -> list[str]:
        return []


class Murderous(LocalStorage):
    """Takes everybody for dead."""

    async def sweep(self) -> list[str]:
        swept = []
        for path in self._root.iterdir():
            if ".orbax-checkpoint-tmp-" in path.name:
                path.rename(path.with_name(f"{path.name}.trash"))
                swept.append(path.name)
        return swept


class Blind(LocalStorage):
    async def attempts(self) -> list[AttemptEntry]:
        return []


class Mistrustful(LocalStorage):
    """Takes a whole file for a cut one."""

    async def cut_files(self, expected: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        return dict.fromkeys(expected, "a file")


class Lingering(LocalStorage):
    """A cancelled read goes on."""

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        pause = threading.Event()

        def later() -> None:
            data = (self._root / step_dir / path).read_bytes()[offset : offset + len(target)]
            pause.wait(0.02)
            for start in range(0, len(data), 1 << 16):
                target[start : start + (1 << 16)] = data[start : start + (1 << 16)]

        await anyio.to_thread.run_sync(later, abandon_on_cancel=True)


class Seen(LocalStorage):
    """An attempt is written in the place of the step directory."""

    async def step_dirs(self) -> list[str]:
        return sorted({name.split(".")[0] for name in await self._all()})

    async def _all(self) -> list[str]:
        return [path.name for path in self._root.iterdir() if path.is_dir()]


def case(kind: type[LocalStorage], root: Path, place: Place) -> StoreCase:
    names = iter(range(1000))

    def fresh() -> Callable[[Timeouts], LocalStorage]:
        directory = root / str(next(names))
        return lambda timeouts: kind(directory, timeouts)

    return StoreCase(fresh, case_of(place).abandon, 0.2)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Overwriting, step_dirs.a_step_dir_is_not_replaced_unless_asked),
        (Overwriting, step_dirs.only_what_was_meant_is_replaced),
        (Unprotected, writers.of_many_writers_one_wins),
        (Unprotected, writers.of_many_who_replace_one_attempt_one_wins),
        (Forgetful, step_dirs.its_listing_is_always_true),
        (Unstamped, step_dirs.a_change_is_told_by_the_stamp),
        (Unstamped, step_dirs.a_change_is_told_by_the_fingerprint),
        (Mistrustful, step_dirs.a_file_that_is_cut_is_told),
        (Shifted, step_dirs.every_range_is_read),
        (Short, step_dirs.every_range_is_read),
        (Hasty, step_dirs.a_block_is_whole_when_it_is_used),
        (Forgiving, step_dirs.a_block_is_whole_when_it_is_used),
        (Unlimited, step_dirs.small_files_are_read_within_limits),
        (Careless, step_dirs.a_step_dir_is_removed_whole),
        (Sloppy, writers.of_many_notes_of_one_name_one_is_made),
        (Sloppy, writers.notes_are_small_files_of_the_root),
        (Ageing, writers.a_note_is_never_older_than_it_is),
        (Untouched, writers.a_note_is_never_older_than_it_is),
        (Blind, writers.attempts_are_listed),
        (Blind, writers.a_dead_writer_is_cleaned_up_after),
        (Murderous, writers.a_live_writer_is_left_alone),
        (Lingering, writers.a_cancelled_write_leaves_its_memory_alone),
        (Seen, step_dirs.an_attempt_is_invisible),
    ],
    ids=lambda each: each.__name__,
)
def test_a_bad_store_is_caught(
    kind: Any, check: Any, tmp_path: Path, make_place: Callable[[str], Place]
) -> None:
    with pytest.raises((AssertionError, CheckpointError, ExceptionGroup)):
        anyio.run(check, case(kind, tmp_path, make_place("local")))


def test_a_store_that_never_cleans_up_is_caught(
    tmp_path: Path, make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_PATIENCE_S", 0.5)
    with pytest.raises(TimeoutError):
        anyio.run(
            writers.a_dead_writer_is_cleaned_up_after, case(Dirty, tmp_path, make_place("local"))
        )


def test_all_checks_are_run(
    tmp_path: Path, make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "CHECKS", (step_dirs.it_says_what_it_is,))
    check_store(case(LocalStorage, tmp_path, make_place("local")))
    monkeypatch.setattr(stores, "CHECKS", (*stores.CHECKS, step_dirs.a_step_dir_is_removed_whole))
    with pytest.raises(AssertionError):
        check_store(case(Careless, tmp_path / "careless", make_place("local")))
