"""A store of another package: a small class over a file system of fsspec does all a store does."""

from __future__ import annotations

import inspect
import threading
import uuid
from collections.abc import Callable
from typing import Any

import anyio
import fsspec
import numpy as np
import pytest
import safetensors.numpy

import ckpt
import ckpt.sync
from ckpt._format.manifest_head import FILE_NAME
from ckpt._settings import Timeouts
from ckpt.errors import InvalidArgumentError, NotACheckpointError, StepExistsError, StorageError
from ckpt.storage import CopiesObjects, Store, StoredObject, StoreLimits, Swap, open_root
from ckpt.testing.compare import differences
from ckpt.testing.conformance import STORE_CHECKS, StoreCase
from ckpt.testing.conformance.store_cases import assert_whole, publish, write

# Bytes before the content of each file: its generation.
MARK = 16
# Files of one process have no other writers, so a lock makes conditional writes atomic.
LOCK = threading.Lock()


class FilesOfFsspec:
    """A store in the memory file system of fsspec; each file begins with its generation."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: Any = fsspec.filesystem("memory")

    @property
    def location(self) -> str:
        return f"fsspec-memory:/{self._root}"

    @property
    def limits(self) -> StoreLimits:
        return StoreLimits()

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> StoredObject | None:
        whole = self._read(key)
        return None if whole is None else StoredObject(whole[MARK:][start:stop], whole[:MARK])

    async def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, data)

    async def swap(self, key: str, data: bytes, generation: bytes | None) -> Swap:
        with LOCK:
            return Swap(self._write(key, data) if self._is_at(key, generation) else None)

    async def delete(self, key: str) -> None:
        if self._read(key) is not None:
            self._files.rm_file(self._path(key))

    async def delete_if(self, key: str, generation: bytes) -> bool:
        with LOCK:
            is_there = self._is_at(key, generation)
            if is_there:
                self._files.rm_file(self._path(key))
            return is_there

    async def list(self, prefix: str) -> list[str]:
        found = (path.removeprefix(self._path("")) for path in self._files.find(self._root))
        return sorted(key.removeprefix(prefix) for key in found if key.startswith(prefix))

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        whole = self._read(source)
        if whole is None:
            return None
        self._write(target, whole[MARK:])
        return len(whole) - MARK

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        return self._files.cat_file(path) if self._files.isfile(path) else None

    def _write(self, key: str, data: bytes | memoryview) -> bytes:
        generation = uuid.uuid4().bytes
        self._files.pipe_file(self._path(key), generation + data)
        return generation

    def _is_at(self, key: str, generation: bytes | None) -> bool:
        whole = self._read(key)
        return (None if whole is None else whole[:MARK]) == generation


def fresh() -> Callable[[Timeouts], Any]:
    root = f"/{uuid.uuid4().hex}"
    return lambda timeouts: open_root(FilesOfFsspec(root), timeouts)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_small_class_is_a_store(check: Any) -> None:
    anyio.run(check, StoreCase(fresh, lease_seconds=0.4))


def test_what_a_store_has_to_offer_is_small() -> None:
    """At most 15 members, each as the small class has it, and optional abilities of two at most."""
    members = [name for name in dir(Store) if name[0] != "_"]
    assert members == [
        *("delete", "delete_if", "get", "limits", "list", "location", "put", "swap"),
    ]
    assert [name for name in dir(CopiesObjects) if name[0] != "_"] == ["copy"]
    for owner, names in ((Store, members), (CopiesObjects, ["copy"])):
        for name in names:
            asked, given = getattr(owner, name), getattr(FilesOfFsspec, name)
            if not isinstance(asked, property):
                assert inspect.signature(asked) == inspect.signature(given), name
    assert len(inspect.getsource(FilesOfFsspec).splitlines()) <= 200


def test_a_copy_that_the_store_refuses_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(FilesOfFsspec):
        async def copy(self, source: str, target: str, nbytes: int) -> int | None:
            raise StorageError("no copies today")

    async def main() -> None:
        storage: Any = open_root(Refusing(f"/{uuid.uuid4().hex}"))
        attempt = await storage.begin("2")
        assert await storage.share(attempt, "1", {"d/0": 2 << 20}) == []
        await storage.discard(attempt)

    anyio.run(main)
    assert "1 of 1 unchanged files could not be copied" in caplog.text


def test_a_commit_with_a_lost_answer_stays() -> None:
    """The step may be there; so its attempt is not removed when the writer gives up."""

    class Losing(FilesOfFsspec):
        async def swap(self, key: str, data: bytes, generation: bytes | None) -> Swap:
            swap = await super().swap(key, data, generation)
            if key == f"1/{FILE_NAME}":
                raise StorageError("the answer was lost")
            return swap

    async def main() -> None:
        root = f"/{uuid.uuid4().hex}"
        storage = open_root(Losing(root))
        attempt = await write(storage, "1", "x")
        with pytest.raises(StorageError, match="it is unknown whether the checkpoint"):
            await storage.publish(attempt, overwrite=False)
        await storage.discard(attempt)
        await assert_whole(open_root(FilesOfFsspec(root)), "1", "x", attempt)

    anyio.run(main)


def test_an_upload_keeps_to_the_limits_of_the_store() -> None:
    class Narrow(FilesOfFsspec):
        @property
        def limits(self) -> StoreLimits:
            return StoreLimits(largest_bytes=100, usual_bytes=10)

    async def main() -> None:
        storage: Any = open_root(Narrow(f"/{uuid.uuid4().hex}"))
        attempt = await storage.begin("2")
        assert storage.traits.usual_file_bytes == 10
        with pytest.raises(StorageError, match="at most 100 at once"):
            await storage.write_block(attempt, "d/0", memoryview(bytes(101)))

    anyio.run(main)


def test_a_deletion_under_way_is_waited_for_as_long_as_a_request_may_take() -> None:
    class Brief(FilesOfFsspec):
        @property
        def limits(self) -> StoreLimits:
            return StoreLimits(request_seconds=0.05)

    class Stopped(Brief):
        """Its process stops in the middle of a deletion, and lives."""

        async def delete(self, key: str) -> None:
            raise StorageError("stopped")

    async def main() -> None:
        root = f"/{uuid.uuid4().hex}"
        await publish(open_root(Brief(root)), "1", "old")
        await open_root(Stopped(root)).remove("1")
        # Far less than the time that requests of other stores may take.
        with anyio.fail_after(StoreLimits().request_seconds / 2):
            attempt = await publish(open_root(Brief(root)), "1", "new")
        await assert_whole(open_root(Brief(root)), "1", "new", attempt)

    anyio.run(main)


class Overtaken(FilesOfFsspec):
    """Another writer takes the place of a manifest while the first one writes it."""

    def __init__(self, root: str, answer: Swap) -> None:
        super().__init__(root)
        self.root, self.answer = root, answer
        self.is_first = True

    async def swap(self, key: str, data: bytes, generation: bytes | None) -> Swap:
        if key != f"1/{FILE_NAME}" or not self.is_first:
            return await super().swap(key, data, generation)
        self.is_first = False
        await publish(open_root(FilesOfFsspec(self.root)), "1", "other", overwrite=True)
        return self.answer


def test_a_step_is_not_written_over_another_that_may_have_replaced_it() -> None:
    async def main() -> None:
        root = f"/{uuid.uuid4().hex}"
        storage = open_root(Overtaken(root, Swap(None, doubtful=True)))
        with pytest.raises(StorageError, match="another writer's checkpoint is there now"):
            await publish(storage, "1", "own", overwrite=True)
        await assert_whole(open_root(FilesOfFsspec(root)), "1", "other")

    anyio.run(main)


@pytest.mark.parametrize("is_abandoned", [True, False])
def test_data_that_a_late_write_may_still_need_stays(is_abandoned: bool) -> None:
    async def main() -> None:
        root = f"/{uuid.uuid4().hex}"
        storage = open_root(Overtaken(root, Swap(None, abandoned=is_abandoned)))
        attempt = await write(storage, "1", "own")
        with pytest.raises(StepExistsError):
            await storage.publish(attempt, overwrite=False)
        await storage.discard(attempt)
        left = await FilesOfFsspec(root).list(f"1/{attempt.folder}/")
        assert bool(left) is is_abandoned

    anyio.run(main)


def test_the_checks_of_dead_writers_keep_to_the_case() -> None:
    given: list[Any] = []
    leases: set[float] = set()

    def recorded() -> Callable[[Timeouts], Any]:
        opens = fresh()

        def opened(timeouts: Timeouts) -> Any:
            leases.add(timeouts.lease)
            return opens(timeouts)

        return opened

    check = next(
        each for each in STORE_CHECKS if each.__name__ == "a_dead_writer_is_cleaned_up_after"
    )
    anyio.run(check, StoreCase(recorded, abandon=given.append, lease_seconds=0.4))
    assert given
    assert leases == {0.4}


# Calls that take the path of a checkpoint or a root; a store that is an object is given by name.
At = Callable[[str], Any]
STATE: dict[str, Any] = {"n": 3, "w": np.arange(5.0)}


def loaded(at: At) -> Any:
    return ckpt.sync.load(at("one"))


def of_a_branch(at: At) -> Any:
    found = ckpt.sync.load({"a": ckpt.Source(at("one")), "w": at("one")})
    return found["a"] | {"w": found["w"]}


def of_metadata(at: At) -> Any:
    return ckpt.sync.load(at("one"), like=ckpt.sync.metadata(at("one")).target())


def of_an_array(at: At) -> Any:
    return {"n": 3, "w": np.asarray(ckpt.sync.open_array(at("one"), "w")[:])}


def saved_behind(at: At) -> Any:
    ckpt.sync.save(at("two"), STATE, durable=False).result()
    return ckpt.sync.load(at("two"))


def merged(at: At) -> Any:
    ckpt.sync.save(at("two"), STATE)
    return ckpt.sync.merge({at("one"): 0.5, at("two"): 0.5})


def converted(at: At) -> Any:
    ckpt.sync.convert(at("one"), at("two"))
    return ckpt.sync.load(at("two"))


def converted_to_a_step(at: At) -> Any:
    ckpt.sync.convert({at("one"): 1.0}, at("run"), step=4)
    return ckpt.sync.load(at("run/4"))


def of_another_library(at: At) -> Any:
    anyio.run(at("m").put, "model.safetensors", safetensors.numpy.save({"w": STATE["w"]}))
    return {"n": 3, **ckpt.sync.load(at("m"))}


def begun_from(at: At) -> Any:
    with ckpt.sync.CheckpointManager(at("run"), trash="trash") as mgr:
        return mgr.resume(lambda: STATE, source=at("one"))[1]


def watched(at: At) -> Any:
    ckpt.sync.save(at("run/8"), STATE)
    with ckpt.sync.watch(at("run")) as steps:
        assert next(iter(steps)).step == 8
    with ckpt.sync.CheckpointManager(at("run"), mode="r") as mgr:
        return mgr.restore(8)


@pytest.mark.parametrize(
    "call",
    [
        *(loaded, of_a_branch, of_metadata, of_an_array, saved_behind, merged, converted),
        *(converted_to_a_step, of_another_library, begun_from, watched),
    ],
)
def test_every_call_that_takes_a_path_takes_an_object(call: Callable[[At], Any]) -> None:
    root = f"/{uuid.uuid4().hex}"

    def at(name: str) -> Any:
        return FilesOfFsspec(f"{root}/{name}")

    info = ckpt.sync.save(at("one"), STATE)
    assert info.path == at("one").location
    assert ckpt.sync.verify(at("one")).ok
    assert differences(STATE, call(at)) == []


def test_a_checkpoint_of_an_object_is_replaced_whole() -> None:
    place = FilesOfFsspec(f"/{uuid.uuid4().hex}/final")
    ckpt.sync.save(place, {"w": np.zeros(5)})
    with pytest.raises(StepExistsError):
        ckpt.sync.save(place, STATE)
    before = set(anyio.run(place.list, ""))
    ckpt.sync.save(place, STATE, if_exists="replace")
    assert differences(STATE, ckpt.sync.load(place)) == []
    # Nothing of the old one is left, nor of the writers.
    assert before & set(anyio.run(place.list, "")) == {FILE_NAME}
    assert anyio.run(place.list, ".ckpt-attempts/") == []


class WithoutUrl(FilesOfFsspec):
    @property
    def location(self) -> str:
        return f"bucket{self._root}"


def test_what_an_object_cannot_be_is_said(tmp_path: Any) -> None:
    root = f"/{uuid.uuid4().hex}"
    with ckpt.sync.CheckpointManager(FilesOfFsspec(root)) as mgr:
        mgr.save(5, STATE)
    with pytest.raises(NotACheckpointError, match=f"is a root with the steps 5.*{root}/5"):
        ckpt.sync.load(FilesOfFsspec(root))
    assert differences(STATE, ckpt.sync.load(FilesOfFsspec(f"{root}/5"))) == []
    with pytest.raises(NotACheckpointError, match="no directory or file"):
        ckpt.sync.load(FilesOfFsspec(f"{root}/6"))
    with pytest.raises(InvalidArgumentError, match="a path object or a store, not type"):
        ckpt.sync.load(FilesOfFsspec)  # type: ignore[arg-type]
    # Other processes have no more of it than its URL.
    with pytest.raises(InvalidArgumentError, match="no storage is known for 'fsspec-memory'"):
        ckpt.sync.adopt(FilesOfFsspec(root), tmp_path / "virtual")
    with pytest.raises(InvalidArgumentError, match="has no URL by which"):
        ckpt.sync.adopt(WithoutUrl(root), tmp_path / "virtual")
    with pytest.raises(InvalidArgumentError, match="a store that was given as an object"):
        ckpt.sync.CheckpointManager(FilesOfFsspec(root), tiers=[ckpt.tiers.Tier(tmp_path)])
