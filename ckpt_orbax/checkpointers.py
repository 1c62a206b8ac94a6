"""Checkpointers: one checkpoint at a path."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import ckpt
import ckpt.sync
from ckpt_orbax import _items
from ckpt_orbax import args as args_lib
from ckpt_orbax.handlers import (
    CheckpointHandler,
    CompositeCheckpointHandler,
    ItemHandlers,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from ckpt_orbax.metadata import StepMetadata, step_metadata
from ckpt_orbax.options import AsyncOptions

__all__ = ["AsyncCheckpointer", "Checkpointer", "PyTreeCheckpointer", "StandardCheckpointer"]

Path = str | os.PathLike[str]


class Checkpointer:
    """Saves and restores one checkpoint at a path. `save` returns when it is on disk.

    Example:
        ```python
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as ckptr:
            ckptr.save(path, args=ocp.args.StandardSave(state))
            state = ckptr.restore(path, args=ocp.args.StandardRestore(state))
        ```
    """

    _is_async = False

    def __init__(self, handler: CheckpointHandler, **_: Any) -> None:
        """Take a handler. Other options have no effect.

        Args:
            handler: The handler of the item; a `CompositeCheckpointHandler` for several.
        """
        self._handler = handler
        self._handlers = ItemHandlers.of(handler)
        self._pending: ckpt.Commit | None = None
        self._callback: Callable[[], None] | None = None
        self._timeout: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def handler(self) -> CheckpointHandler:
        """The handler."""
        return self._handler

    def save(
        self,
        directory: Path,
        *args: Any,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        save_context: Any = None,
        **kwargs: Any,
    ) -> None:
        """Save a checkpoint.

        Args:
            directory: Its path, or the URL of a place in a store.
            args: What to save: `args=ocp.args.StandardSave(state)`, or what the arguments of the
                handler take, such as a tree.
            force: True to replace a checkpoint that is there.
            custom_metadata: JSON values to keep with it.
            save_context: Without effect.
            kwargs: As `args`.

        Raises:
            ValueError: There is something at the path, and `force` is not given.
            CheckpointError: The save has failed, or the one before it.

        Example:
            ```python
            ckptr.save(path, args=ocp.args.StandardSave(state), force=True)
            ```
        """
        self.wait_until_finished()
        given = self._args(0, args, kwargs)
        try:
            commit = ckpt.sync.save(
                os.fspath(directory),
                **_items.saved_items(given, self._handlers),
                handlers=[_items.JsonItemHandler()],
                if_exists="replace" if force else "error",
                custom_metadata=custom_metadata,
                durable=False,
                timeout=self._timeout,
            )
        except ckpt.errors.StepExistsError as error:
            hint = "" if force else ". Pass force=True to replace it"
            raise ValueError(f"{error.message}{hint}") from error
        self._pending = commit
        if self._callback is not None:
            commit.add_done_callback(partial(_call_after, self._callback))
        if not self._is_async:
            self.wait_until_finished()

    def restore(self, directory: Path, *args: Any, **kwargs: Any) -> Any:
        """Restore a checkpoint, after the save that is under way.

        Args:
            directory: Its path; also a step of a root, or an item of one.
            args: How to restore: `args=ocp.args.StandardRestore(target)`, or what the arguments of
                the handler take, such as `item=` and `restore_args=`. Nothing restores it as it was
                saved.
            kwargs: As `args`.

        Returns:
            The tree, or a `Composite` if `args` is one, or if there are several items.

        Raises:
            FileNotFoundError: There is no checkpoint.
            KeyError: There is no such item.
            ValueError: The target does not fit; the message lists every leaf.

        Example:
            ```python
            state = ckptr.restore(path, args=ocp.args.StandardRestore(abstract_state))
            ```
        """
        self.wait_until_finished()
        path = os.fspath(directory)
        several = isinstance(self._handler, CompositeCheckpointHandler)
        given: Any = None if several and not (args or kwargs) else self._args(1, args, kwargs)
        found = ckpt.sync.metadata(path)
        is_composite = isinstance(given, args_lib.Composite)
        stored = lambda: found  # noqa: E731
        asked = dict(given) if is_composite else dict.fromkeys(found.items, given)
        wanted = _items.wanted_items(asked, stored, self._handlers, named=is_composite)
        loaded = _items.loaded_items(partial(ckpt.sync.load, path), stored, wanted)
        is_single = found.unnamed and not is_composite
        return next(iter(loaded.values())) if is_single else args_lib.Composite(**loaded)

    def metadata(self, directory: Path) -> StepMetadata:
        """Return the metadata of a checkpoint: a `StepMetadata`, whose `item_metadata` is a tree.

        Example:
            ```python
            print(ckptr.metadata(path).item_metadata["params"])
            ```
        """
        self.wait_until_finished()
        found = ckpt.sync.metadata(os.fspath(directory))
        return step_metadata(found, is_single=found.unnamed)

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: It has failed.

        Example:
            ```python
            ckptr.wait_until_finished()
            ```
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has failed.

        Example:
            ```python
            ckptr.check_for_errors()
            ```
        """
        if self._pending is not None and self._pending.done():
            self.wait_until_finished()

    def close(self) -> None:
        """Wait for the save that is under way.

        Example:
            ```python
            ckptr.close()
            ```
        """
        self.wait_until_finished()

    def _args(self, which: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], args_lib.CheckpointArgs):
            return args[0]
        if "args" in kwargs:
            given = kwargs.pop("args")
            if not isinstance(given, args_lib.CheckpointArgs | None):
                raise TypeError(
                    f"args= is a {type(given).__name__}; expected ocp.args.StandardSave(...)"
                )
            return given
        return self._handlers.args_classes(None)[which](*args, **kwargs)


def _call_after(callback: Callable[[], None], commit: ckpt.Commit) -> None:
    """Call a function of the user after a save, on a thread of its own."""
    if commit.exception() is None:
        threading.Thread(target=callback).start()


class AsyncCheckpointer(Checkpointer):
    """A `Checkpointer` whose `save` returns once the state may be donated.

    Example:
        ```python
        ckptr = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        ckptr.save(path, args=ocp.args.StandardSave(state))
        ckptr.wait_until_finished()
        ```
    """

    _is_async = True

    def __init__(
        self,
        handler: CheckpointHandler,
        timeout_secs: int | None = None,
        *,
        async_options: AsyncOptions | None = None,
        **_: Any,
    ) -> None:
        """Take a handler.

        Args:
            handler: As for a `Checkpointer`.
            timeout_secs: Seconds after which a save is given up.
            async_options: See `AsyncOptions`.
        """
        super().__init__(handler)
        if async_options is not None:
            timeout_secs = timeout_secs or async_options.timeout_secs
            self._callback = async_options.post_finalization_callback
        self._timeout = None if timeout_secs is None else float(timeout_secs)


class StandardCheckpointer(AsyncCheckpointer):
    """An `AsyncCheckpointer` for one tree.

    Example:
        ```python
        with ocp.StandardCheckpointer() as ckptr:
            ckptr.save(path, state)
        state = ocp.StandardCheckpointer().restore(path, abstract_state)
        ```
    """

    def __init__(self, *, async_options: AsyncOptions | None = None, **_: Any) -> None:
        """Take options; those without effect are accepted."""
        super().__init__(StandardCheckpointHandler(), async_options=async_options)

    def save(  # type: ignore[override]
        self,
        directory: Path,
        state: Any = None,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
        args: Any = None,
    ) -> None:
        """Save a tree; see `Checkpointer.save`.

        Example:
            ```python
            ckptr.save(path, state)
            ```
        """
        given = args_lib.StandardSave(state, save_args) if args is None else args
        super().save(directory, args=given, force=force, custom_metadata=custom_metadata)

    def restore(
        self, directory: Path, target: Any = None, *, strict: bool = True, args: Any = None
    ) -> Any:
        """Restore a tree, onto a target if one is given; see `Checkpointer.restore`.

        Example:
            ```python
            state = ckptr.restore(path, abstract_state)
            ```
        """
        given = args_lib.StandardRestore(target, strict=strict) if args is None else args
        return super().restore(directory, args=given)


class PyTreeCheckpointer(Checkpointer):
    """A `Checkpointer` for one tree.

    Example:
        ```python
        ckptr = ocp.PyTreeCheckpointer()
        ckptr.save(path, state)
        state = ckptr.restore(path)
        ```
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take options; they have no effect."""
        super().__init__(PyTreeCheckpointHandler())
