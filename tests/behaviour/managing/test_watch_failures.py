"""`watch` when the store fails, a manifest is damaged, or the lease of its pin is lost."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._format.manifest_head import FILE_NAME
from ckpt.storage._local.storage import LocalStorage
from tests.behaviour.managing.watched_roots import (
    BACKENDS,
    PATIENCE_S,
    QUICK,
    pinned,
    save,
    steps_of,
)


def test_a_lease_that_was_lost_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path, timeouts=ckpt.Timeouts(lease=0.3)) as watch:
        next(watch)
        for note in (tmp_path / ".ckpt-pins").iterdir():
            note.unlink()
        deadline = time.monotonic() + PATIENCE_S
        while "the lease of step 1 ran out" not in caplog.text:
            assert time.monotonic() < deadline


def refusing(storage: LocalStorage, method: str, errors: Iterator[OSError | None]) -> None:
    """Let a method of a root fail as `errors` says."""
    real = getattr(storage, method)

    async def maybe(*args: Any, **options: Any) -> Any:
        error = next(errors)
        if error is not None:
            raise error
        return await real(*args, **options)

    setattr(storage, method, maybe)


def storage_of(watch: Any) -> LocalStorage:
    return watch._face.watcher._storage


def io_error() -> OSError:
    return ckpt.errors.StorageError("a bad day", errno=errno.EIO)


@pytest.mark.parametrize("method", ["step_dirs", "put_note", "read"])
def test_a_store_that_fails_for_a_moment_is_asked_again(tmp_path: Path, method: str) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path, poll_interval=QUICK) as watch:
        bad = [io_error() for _ in range(5)]
        refusing(storage_of(watch), method, iter([*bad, *[None] * 100]))
        assert next(watch).step == 1
        assert pinned(tmp_path) == {1}
    with ckpt.sync.watch(tmp_path, poll_interval=QUICK) as watch:
        bad = [io_error() for _ in range(6)]
        refusing(storage_of(watch), method, iter([*bad, *[None] * 100]))
        with pytest.raises(ckpt.errors.StorageError, match="a bad day"):
            next(watch)
        assert pinned(tmp_path) == set()
        assert next(watch).step == 1


def test_a_root_that_may_not_be_written_to_says_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with ckpt.sync.watch(tmp_path) as watch:
        denied = ckpt.errors.StorageError("read-only file system", errno=errno.EROFS)
        refusing(storage_of(watch), "put_note", iter([denied]))
        with pytest.raises(ckpt.errors.StorageError, match=r"step 1: .*pin=False") as caught:
            next(watch)
        assert caught.value.errno == errno.EROFS


def test_a_damaged_manifest_is_told_once(tmp_path: Path) -> None:
    """It is whole, and contradicts itself."""
    from ckpt._format.manifest import decode, encode

    save(tmp_path, 1, 2)
    path = tmp_path / "1" / FILE_NAME
    manifest = decode(path.read_bytes(), where="")
    path.write_bytes(encode(replace(manifest, unnamed=True, items={})))
    with ckpt.sync.watch(tmp_path, timeout=0) as watch:
        with pytest.raises(ckpt.errors.CorruptCheckpointError, match="step 1"):
            next(watch)
        assert pinned(tmp_path) == set()
        assert next(watch).step == 2


def test_a_store_that_fails_until_the_time_is_over_is_told(tmp_path: Path) -> None:
    """Otherwise a wrong path looks like a root without steps."""
    file = tmp_path / "file"
    file.touch()
    root = tmp_path / "root"
    save(root, 1)
    for timeout in (0, 0.1):
        with pytest.raises(ckpt.errors.StorageError):
            steps_of(file, timeout=timeout, poll_interval=QUICK * 2)
        with ckpt.sync.watch(root, timeout=timeout, poll_interval=10) as watch:
            refusing(storage_of(watch), "step_dirs", iter([io_error() for _ in range(5)]))
            with pytest.raises(ckpt.errors.StorageError, match="a bad day"):
                next(watch)
    # When the time is over, it works: nothing new is there, and that is known.
    with ckpt.sync.watch(root, after=1, timeout=0.2, poll_interval=10) as watch:
        refusing(storage_of(watch), "step_dirs", iter([io_error(), *[None] * 100]))
        assert list(watch) == []


def not_renewing(watch: Any) -> Any:
    """Let the renewing of the lease end by what nobody expects."""

    async def touch_note(name: str) -> bool:
        raise MemoryError("none left")

    storage_of(watch).touch_note = touch_note
    return watch


@pytest.mark.parametrize("waits", [True, False])
def test_what_ends_the_renewing_of_the_lease_is_told(tmp_path: Path, waits: bool) -> None:
    """The watch must not look as if no more steps came."""
    save(tmp_path, 1, 2)
    with not_renewing(ckpt.sync.watch(tmp_path, timeouts=ckpt.Timeouts(lease=0.3))) as watch:
        keeper = watch._face.watcher
        if waits:
            take = keeper._next

            async def and_wait() -> Any:
                await take()
                await anyio.sleep_forever()

            keeper._next = and_wait
        else:
            assert next(watch).step == 1
            deadline = time.monotonic() + PATIENCE_S
            while not keeper._stopped:
                assert time.monotonic() < deadline
        with pytest.raises(MemoryError, match="none left"):
            next(watch)
        assert list(watch) == []
    assert pinned(tmp_path) == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ends_the_renewing_is_told_to_async_for(tmp_path: Path, backend: str) -> None:
    save(tmp_path, 1, 2)

    async def main() -> None:
        brief = ckpt.Timeouts(lease=0.3)
        async with not_renewing(ckpt.watch(tmp_path, timeouts=brief)) as watch:
            assert (await anext(watch)).step == 1
            with anyio.fail_after(PATIENCE_S):
                while not watch._face.watcher._stopped:
                    await anyio.lowlevel.checkpoint()
            with pytest.raises(MemoryError, match="none left"):
                await anext(watch)
            assert [info async for info in watch] == []

    anyio.run(main, backend=backend)
