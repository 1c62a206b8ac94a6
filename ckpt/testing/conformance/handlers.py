"""The conformance suite for handlers: the promises of every handler, tried on real checkpoints.

Each check is a function of a `HandlerCase` and an empty directory. It raises `AssertionError` if
the handler breaks the promise.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from msgspec.structs import replace

from ckpt import sync
from ckpt._api.manager import CheckpointManager
from ckpt._format.manifest import ItemEntry, JsonValue, Manifest, decode, encode
from ckpt._format.manifest_head import FILE_NAME
from ckpt._plan.adapt import Adapt
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CorruptCheckpointError,
    HandlerError,
    UnsupportedFormatError,
)
from ckpt.handlers._base import Deferred, Handler, ItemReader, ItemWriter
from ckpt.handlers._registry import find_handlers

__all__ = ["CHECKS", "HandlerCase", "check_handler"]

_ITEM = "thing"
_PATIENCE_S = 60


@dataclass(frozen=True, slots=True)
class HandlerCase:
    """A handler with an object to save.

    Attributes:
        handler: The handler.
        make: Makes an object to save, always in the same state.
        same: Returns True if the first object was restored correctly as the second.
        like: Makes the target; None if the handler needs none.
        raw: Returns True if the second is the correct result for the first without a target; None
            if `same` tells it.
        change: Changes an object in place as much as possible; None if it cannot be changed.
        foreign: Makes an object that the handler must refuse to save.
    """

    handler: Handler
    make: Callable[[], Any]
    same: Callable[[Any, Any], bool]
    like: Callable[[], Any] | None = None
    raw: Callable[[Any, Any], bool] | None = None
    change: Callable[[Any], object] | None = None
    foreign: Callable[[], Any] = object

    @property
    def handlers(self) -> dict[str, Handler]:
        """The argument `handlers=` that chooses the handler for the items of the checks."""
        return {_ITEM: self.handler, "other": self.handler}


def check_handler(case: HandlerCase, root: Path) -> None:
    """Run every check, each in its own directory below `root`.

    Raises:
        AssertionError: The handler fails a check.
    """
    for check in CHECKS:
        directory = root / check.__name__
        directory.mkdir(parents=True)
        check(case, directory)


def it_has_a_stable_name(case: HandlerCase, root: Path) -> None:
    """The name is a string, always the same, and the key by which the item's handler is found."""
    name = case.handler.name
    assert isinstance(name, str), f"the name {name!r} is not a string"
    assert name == case.handler.name, "another name when asked again"
    find_handlers({_ITEM: case.handler})
    written = _manifest(_saved(case, root)).items[_ITEM].handler
    assert find_handlers(case.handlers).named(written, _ITEM).name == written


def it_brings_back_what_was_saved(case: HandlerCase, root: Path) -> None:
    """The object is restored, with a target and without one."""
    path = _saved(case, root)
    _assert_same(case, _loaded(case, path))
    found = sync.load(path, handlers=case.handlers)[_ITEM]
    if case.like is None or case.raw is not None:
        assert (case.raw or case.same)(case.make(), found), f"without a target came back {found!r}"


def it_may_be_changed_once_save_has_returned(case: HandlerCase, root: Path) -> None:
    """`stage` takes the snapshot: later changes by the caller are not saved."""
    if case.change is None:
        return
    held = _Held()
    # The commit begins only after the object has been changed.
    delayed = _Delayed(case.handler, held)
    with sync.CheckpointManager(root / "run", handlers={_ITEM: delayed}) as mgr:
        with held.holding():
            thing = case.make()
            mgr.save(0, items={_ITEM: thing})
            case.change(thing)
        mgr.wait_until_finished()
    assert not case.same(case.make(), thing), "`change` changes nothing"
    _assert_same(case, _loaded(case, root / "run" / "0"))


def it_goes_along_with_other_items(case: HandlerCase, root: Path) -> None:
    """Several items of the handler and a tree in one step, saved and loaded at once."""
    tree = {"w": list(range(5)), "text": "x"}
    items = {_ITEM: case.make(), "tree": tree, "other": case.make()}
    sync.save(root / "x", items=items, handlers=case.handlers)
    wanted = _make_targets(case) | {"tree": None, "other": case.like() if case.like else None}
    found = sync.load(root / "x", items=wanted, handlers=case.handlers)
    _assert_same(case, found[_ITEM])
    _assert_same(case, found["other"])
    assert found["tree"] == tree


def its_metadata_needs_no_file(case: HandlerCase, root: Path) -> None:
    """`metadata()` reads the manifest only, and its target brings the item back."""
    path = _saved(case, root)
    found = sync.metadata(path)
    assert str(found), "no text"
    if case.like is None or case.raw is not None:
        back = sync.load(path, found.target(), handlers=case.handlers)[_ITEM]
        assert (case.raw or case.same)(case.make(), back)
    shutil.rmtree(path / _ITEM)
    assert _ITEM in sync.metadata(path).items


def it_notices_damage(case: HandlerCase, root: Path) -> None:
    """A missing, cut or changed file raises an error that names the item, or is not needed."""
    path = _saved(case, root / "sound")
    noticed = 0
    for name in (name for name in _manifest(path).files if name.startswith(f"{_ITEM}/")):
        for number, damage in enumerate((_remove, _cut, _change)):
            copy = root / f"damaged-{number}" / name.replace("/", "-")
            shutil.copytree(path, copy)
            damage(copy / name)
            try:
                found = _loaded(case, copy)
            except CorruptCheckpointError as error:
                _assert_names(error, _ITEM, f"load with {name} damaged")
                noticed += 1
            else:
                _assert_same(case, found)
    entry = _manifest(path).items[_ITEM]
    assert noticed or not entry.nbytes, "no damage was noticed"


def it_refuses_entries_that_are_not_its_own(case: HandlerCase, root: Path) -> None:
    """An item of another handler, or a broken entry, raises an error."""
    path = _saved(case, root, tree={"x": 1})
    whole = _manifest(path)
    entry = whole.items[_ITEM]
    _rewrite(path, whole, replace(entry, handler="nobody"))
    try:
        _loaded(case, path)
    except UnsupportedFormatError as error:
        _assert_names(error, _ITEM, "load an item of a handler that is not here")
    else:
        raise AssertionError("an entry of a handler that is not here was loaded")
    assert sync.load(path, items=["tree"]) == {"tree": {"x": 1}}
    foreign: tuple[JsonValue, ...] = (None, [1], {"foreign": 1})
    for data in foreign:
        _rewrite(path, whole, ItemEntry(handler=case.handler.name, data=data))
        with _refused(f"load an entry with nothing in it but {data!r}"):
            _loaded(case, path)


def it_refuses_what_it_cannot_save(case: HandlerCase, root: Path) -> None:
    """An object of another type raises an error that names the item, and nothing is left."""
    with sync.CheckpointManager(root / "run", handlers=case.handlers) as mgr:
        with _refused("save a foreign object"):
            mgr.save(0, items={_ITEM: case.foreign(), "tree": {"x": 1}}).result()
        _assert_only(root / "run", [])
        mgr.save(0, items={_ITEM: case.make()}).result()


def it_refuses_a_target_of_another_kind(case: HandlerCase, root: Path) -> None:
    """A wrong target is refused with an error of this library that names the item."""
    path = _saved(case, root)
    with _refused("load onto a foreign target"):
        sync.load(path, items={_ITEM: case.foreign()}, handlers=case.handlers)


def it_gives_way_when_another_item_fails(case: HandlerCase, root: Path) -> None:
    """If another item fails, its error is raised and nothing is left."""
    for where in ("stage", "commit"):
        failing = _Held(fails=where)
        with sync.CheckpointManager(
            root / where, handlers=case.handlers | {"failing": failing}
        ) as mgr:
            try:
                mgr.save(0, items={_ITEM: case.make(), "failing": failing}).result()
            except HandlerError as error:
                _assert_names(error, "failing", f"save beside an item that fails in {where}")
            else:
                raise AssertionError("the error of the other item was lost")
            _assert_only(root / where, [])


def it_can_be_cancelled(case: HandlerCase, root: Path) -> None:
    """A cancelled save leaves nothing, and a cancelled restore can be repeated."""
    held = _Held()
    with sync.CheckpointManager(root / "run", handlers=case.handlers | {"held": held}) as mgr:
        with held.holding():
            mgr.save(0, items={"held": held})
            commit = mgr.save(1, items={_ITEM: case.make()})
            commit.cancel()
        assert isinstance(commit.exception(), CommitCancelledError), commit
        mgr.wait_until_finished()
        _assert_only(root / "run", ["0"])
        mgr.save(1, items={_ITEM: case.make()}).result()
    anyio.run(_cancel_restore, case, root / "run")


async def _cancel_restore(case: HandlerCase, root: Path) -> None:
    async with CheckpointManager(root, handlers=case.handlers) as mgr:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await mgr.restore(1, items=_make_targets(case))
        _assert_same(case, (await mgr.restore(1, items=_make_targets(case)))[_ITEM])


CHECKS: tuple[Callable[[HandlerCase, Path], None], ...] = (
    it_has_a_stable_name,
    it_brings_back_what_was_saved,
    it_may_be_changed_once_save_has_returned,
    it_goes_along_with_other_items,
    its_metadata_needs_no_file,
    it_notices_damage,
    it_refuses_entries_that_are_not_its_own,
    it_refuses_what_it_cannot_save,
    it_refuses_a_target_of_another_kind,
    it_gives_way_when_another_item_fails,
    it_can_be_cancelled,
)


class _Held:
    """An item and its handler: the commit waits while it is held, or one of its phases fails."""

    name = "ckpt.testing.held"

    def __init__(self, fails: str | None = None) -> None:
        self._fails = fails
        self._open = threading.Event()

    @contextmanager
    def holding(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._open.set()

    async def wait(self, writer: ItemWriter) -> None:
        if not await writer.in_thread(self._open.wait, _PATIENCE_S):
            raise TimeoutError("the check did not go on")

    def accepts(self, item: Any) -> bool:
        return item is self

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        if self._fails == "stage":
            raise RuntimeError("meant to fail")

        async def commit() -> ItemEntry:
            if self._fails == "commit":
                raise RuntimeError("meant to fail")
            await self.wait(writer)
            return ItemEntry(handler=self.name)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        return self


class _Delayed:
    """A handler whose commits wait while an item is held."""

    def __init__(self, handler: Handler, held: _Held) -> None:
        self._handler = handler
        self._held = held
        self.name = handler.name

    def accepts(self, item: Any) -> bool:
        return self._handler.accepts(item)

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        commit = await self._handler.stage(item, writer)

        async def later() -> ItemEntry:
            await self._held.wait(writer)
            return await commit

        return Deferred(later, getattr(commit, "close", None))

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        return await self._handler.load(entry, like, adapt, reader)


def _saved(case: HandlerCase, root: Path, **others: Any) -> Path:
    sync.save(root / "x", items={_ITEM: case.make(), **others}, handlers=case.handlers)
    return root / "x"


def _make_targets(case: HandlerCase) -> dict[str, Any]:
    return {_ITEM: None if case.like is None else case.like()}


def _loaded(case: HandlerCase, path: Path) -> Any:
    return sync.load(path, items=_make_targets(case), handlers=case.handlers)[_ITEM]


def _assert_same(case: HandlerCase, found: Any) -> None:
    assert case.same(case.make(), found), f"what came back is another: {found!r:.500}"


def _assert_only(root: Path, names: list[str]) -> None:
    found = sorted(path.name for path in root.iterdir() if path.name != "metadata")
    assert found == names, f"left behind: {found}"


def _assert_names(error: CheckpointError, item: str, what: str) -> None:
    assert error.item == item, f"asked to {what}: the error names the item {error.item!r}"


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except HandlerError as error:
        raise AssertionError(f"asked to {what}, the handler raised {error.__cause__!r}") from error
    except CheckpointError as error:
        _assert_names(error, _ITEM, what)
    else:
        raise AssertionError(f"asked to {what}, the handler did")


def _manifest(path: Path) -> Manifest:
    return decode((path / FILE_NAME).read_bytes(), where=str(path))


def _rewrite(path: Path, manifest: Manifest, entry: ItemEntry) -> None:
    files = {
        name: known for name, known in manifest.files.items() if not name.startswith(f"{_ITEM}/")
    }
    update = {"items": {**manifest.items, _ITEM: entry}, "files": files}
    (path / FILE_NAME).write_bytes(encode(replace(manifest, **update)))


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] if data else b"more")


def _change(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else b"more")
