"""`CheckpointManager` with the calls of Orbax."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import ckpt
import ckpt.sync
from ckpt_orbax import _items, multihost
from ckpt_orbax import args as args_lib
from ckpt_orbax.handlers import CheckpointHandlerRegistry, ItemHandlers
from ckpt_orbax.metadata import RootMetadata, StepMetadata, nested_metrics, step_metadata
from ckpt_orbax.options import AsyncOptions as AsyncOptions
from ckpt_orbax.options import CheckpointManagerOptions as CheckpointManagerOptions
from ckpt_orbax.options import FileOptions as FileOptions
from ckpt_orbax.options import MultiprocessingOptions as MultiprocessingOptions
from ckpt_orbax.path.step import names_of_format, standard_name_format
from ckpt_orbax.policies import (
    DecisionContext,
    PreservationContext,
    Step,
    preservation_policy_of,
    ranked_steps,
    save_policy_of,
)
from ckpt_orbax.utils import TMP_DIR_SUFFIX

__all__ = ["AbstractCheckpointManager", "CheckpointManager", "StepAlreadyExistsError"]

_LOG: logging.Logger = logging.getLogger("ckpt")

METRIC_ITEM_NAME, DEFAULT_ITEM_NAME, METADATA_ITEM_NAME = "metrics", "default", "metadata"


class StepAlreadyExistsError(ValueError):
    """The step exists."""


class AbstractCheckpointManager:
    """The base class of managers, also of those that programs write."""


class CheckpointManager(AbstractCheckpointManager):
    """Saves and restores the steps of one directory, with the calls of Orbax.

    The steps are those of `ckpt`, which Orbax reads; steps that Orbax wrote are read, too. It
    behaves as Orbax does where a program could see it: `save` returns once the state may be
    donated, waits for the save before it, and raises its error; lists have the step that is being
    saved; steps at or below the latest are not saved again. What differs is on the page "From Orbax
    in one line".

    Example:
        ```python
        import ckpt_orbax as ocp

        options = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=3)
        with ocp.CheckpointManager(directory, options=options) as mngr:
            if mngr.latest_step() is not None:
                args = ocp.args.StandardRestore(state)
                state = mngr.restore(mngr.latest_step(), args=args)
            mngr.save(100, args=ocp.args.StandardSave(state))
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: CheckpointHandlerRegistry | None = None,
    ) -> None:
        """Open a root.

        Args:
            directory: A directory, or a URL of a store.
            checkpointers: The legacy form of `item_handlers`: a checkpointer, or checkpointers by
                item name.
            options: Options.
            metadata: Metadata of the root, written with its first save.
            item_names: Names of items. They need not be known.
            item_handlers: A handler, or handlers by item name.
            logger: An object with `log_entry(dict)`, called for every save and restore.
            handler_registry: Handlers by item name and arguments.

        Raises:
            ValueError: Arguments contradict each other.
        """
        self._options = options = options or CheckpointManagerOptions()
        if checkpointers is not None:
            if item_names is not None or item_handlers is not None or handler_registry is not None:
                raise ValueError("checkpointers goes without other handlers and names")
            one = getattr(checkpointers, "handler", None)
            item_handlers = one or {name: each.handler for name, each in checkpointers.items()}
        self._handlers = ItemHandlers.of(item_handlers, item_names, handler_registry)
        self._is_single = self._handlers.is_single
        for name in (item_names or ()) if not isinstance(item_handlers, Mapping) else item_handlers:
            _check_name(name)
        self._writes_metrics = bool(options.best_fn) and not options.prevent_write_metrics
        self._logger = logger
        self._directory = os.fspath(directory)
        self._save_policy = save_policy_of(options)
        self._preservation_policy = preservation_policy_of(options)
        # Steps that the policy has given up, since the save after which they are not kept is
        # committed. The engine's thread asks for them when it deletes steps.
        self._given_up: set[int] = set()
        # The save under way: its step, its commit, and the steps to go back to if it fails.
        self._pending: tuple[int, ckpt.Commit, list[Step]] | None = None
        digits = options.step_format_fixed_length
        names = options.step_name_format or standard_name_format(options.step_prefix, digits)
        self._names = names_of_format(names)
        self._manager = _opened(self._directory, options, metadata, self._names, self._given_up)
        writes = (
            options.save_root_metadata and not options.read_only and multihost.is_primary_host()
        )
        if metadata and writes and "://" not in self._directory:
            _write_root_metadata(Path(self._directory), metadata)
        # Steps as policies see them. Kauldron has a subclass that reads the list by this name.
        self._checkpoints = self._listed()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Any:
        """The root: a `pathlib.Path`, or the text of a URL."""
        return self._directory if "://" in self._directory else Path(self._directory)

    def _path_of(self, step: int) -> Any:
        """Return the path of a step."""
        name = self._names.name(step)
        return f"{self._directory}/{name}" if "://" in self._directory else self.directory / name

    def cancel(self) -> None:
        """Give up the save that is under way; nothing of it is left.

        Example:
            ```python
            mngr.cancel()
            ```
        """
        if self._pending is not None and self._pending[1].cancel():
            self._checkpoints, self._pending = self._pending[2], None

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Return the steps, ascending, with the one that is being saved.

        Steps that other programs save are seen by `reload`.

        Args:
            read: True to read the root again.

        Example:
            ```python
            print(mngr.all_steps())
            ```
        """
        if read:
            self.reload()
        return [info.step for info in self._checkpoints]

    def latest_step(self) -> int | None:
        """Return the latest step, also one that is being saved; None if there is none.

        Example:
            ```python
            step = mngr.latest_step()
            ```
        """
        return self._checkpoints[-1].step if self._checkpoints else None

    def best_step(self) -> int | None:
        """Return the step with the best metrics, or the latest without `best_fn`.

        Example:
            ```python
            state = mngr.restore(mngr.best_step())
            ```
        """
        if self._options.best_fn is None:
            return self.latest_step()
        reverse = self._options.best_mode == "min"
        ranked = ranked_steps(self._checkpoints, self._options.best_fn, reverse=reverse)
        return ranked[-1].step if ranked else None

    def reload(self) -> None:
        """Read the list of steps again.

        Example:
            ```python
            mngr.reload()
            ```
        """
        self._manager.reload()
        self._checkpoints = self._listed()

    def reached_preemption(self, step: int) -> bool:
        """Return True once the job is to end soon.

        Example:
            ```python
            if mngr.reached_preemption(step):
                mngr.wait_until_finished()
            ```
        """
        return self._manager.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Return True if `save` would save the step.

        Example:
            ```python
            if mngr.should_save(step):
                mngr.save(step, args=ocp.args.StandardSave(state))
            ```
        """
        if self._options.read_only:
            _LOG.warning("%s is read only: step %d is not saved", self._directory, step)
            return False
        latest = self.latest_step()
        if latest is not None and latest >= step:
            return False
        tells = self._options.enable_should_save_is_saving_in_progress_check
        context = DecisionContext(
            is_saving_in_progress=tells and self.is_saving_in_progress(),
            reached_preemption=self.reached_preemption(step),
            multiprocessing_options=self._options.multiprocessing_options,
        )
        now = Step(step, _now())
        answer = bool(self._save_policy.should_save(now, self._checkpoints, context=context))
        # Processes of a job have clocks of their own: the first one decides for all.
        return bool(multihost.broadcast_one_to_all(answer))

    def delete(self, step: int) -> None:
        """Delete a step.

        Raises:
            FileNotFoundError: There is no such step.

        Example:
            ```python
            mngr.delete(100)
            ```
        """
        if self._options.read_only:
            _LOG.warning("%s is read only: step %d is not deleted", self._directory, step)
            return
        if step not in self.all_steps():
            raise FileNotFoundError(f"{self._directory} has no step {step} to delete")
        self.wait_until_finished()
        self._manager.delete(step)
        self._checkpoints = [info for info in self._checkpoints if info.step != step]

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: args_lib.CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Take a snapshot of a step, and return once it is safe; writing goes on.

        Args:
            step: The step.
            items: The legacy form of `args`: a tree, or items by name.
            save_kwargs: The legacy form of arguments.
            metrics: Metrics of the step.
            force: True to save whatever the policy says.
            args: What to save.
            custom_metadata: JSON values to keep with the step.

        Returns:
            True if the step is saved; False if the policy has refused it, or if it is not greater
            than the latest.

        Raises:
            ValueError: There is nothing to save, or arguments are of another kind.
            StepAlreadyExistsError: With `force`, the step exists.
            CheckpointError: The save before this one has failed; the step is not saved.

        Example:
            ```python
            is_saved = mngr.save(100, args=ocp.args.StandardSave(state), metrics={"loss": 0.5})
            ```
        """
        began = time.time()
        if items is None and args is None:
            raise ValueError("save(): pass args=, such as args=ocp.args.StandardSave(state)")
        if self._is_single is None:
            self._is_single = not isinstance(args, args_lib.Composite)
        self._check_args(items, args)
        if not force and not self.should_save(step):
            return False
        self.wait_until_finished()
        if step in self.all_steps():
            raise StepAlreadyExistsError(f"{self._directory} has step {step} already")
        if args is None:
            args = self._legacy_args(items, save_kwargs, 0)
        for name, each in _items.by_name(args).items():
            _check_name(name)
            self._handlers.check(name, each)
        given = _items.saved_items(args, self._handlers) | {"custom_metadata": custom_metadata}
        if metrics is not None and self._writes_metrics:
            given["metrics"] = metrics
        self._start(step, metrics, given)
        is_async = self._options.enable_async_checkpointing
        if not is_async:
            self.wait_until_finished()
        self._log("save", step, began, synchronous=not is_async)
        return True

    def _start(
        self, step: int, metrics: Any, given: dict[str, Any], if_exists: Any = "error"
    ) -> ckpt.Commit:
        """Start a save, after the one before it, whatever the policy says.

        Args:
            step: The step.
            metrics: Its metrics, for the policies.
            given: Arguments of `save` of a manager of `ckpt`.
            if_exists: One of them.
        """
        self.wait_until_finished()
        asked = self._options.async_options
        if asked is not None:
            given["timeout"] = float(asked.timeout_secs)
        infos = self._checkpoints
        others = [each for each in infos if each.step != step]
        # The policy sees the new step last, also where the run has gone back.
        kept, given_up = self._preserved([*others, Step(step, _now(), metrics)])
        # A step that was given up may still be there.
        how = "replace" if step in self._given_up else if_exists
        save: Any = self._manager.save
        commit: ckpt.Commit = save(step, force=True, if_exists=how, **given)
        commit.add_done_callback(partial(self._committed, step, given_up))
        self._checkpoints = kept
        self._pending = step, commit, infos
        return commit

    def _committed(self, step: int, given_up: set[int], commit: ckpt.Commit) -> None:
        """Give steps up once a save is committed, before its manager deletes any."""
        if commit.exception() is None:
            self._given_up.discard(step)
            self._given_up |= given_up
            asked = self._options.async_options
            if asked is not None and asked.post_finalization_callback is not None:
                # On a thread of its own, since it may call this manager.
                threading.Thread(target=asked.post_finalization_callback).start()

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: args_lib.CheckpointArgs | None = None,
    ) -> Any:
        """Restore a step, after the save that is under way.

        Args:
            step: The step; None for the latest.
            items: The legacy form of `args`: a target, or targets by item name.
            restore_kwargs: The legacy form of arguments.
            directory: Another root.
            args: What to restore, and how; None for everything as it was saved.

        Returns:
            The tree of a step that was saved without names, else a `Composite`.

        Raises:
            FileNotFoundError: There is no such step.
            KeyError: There is no such item.
            ValueError: The target does not fit; the message lists every leaf.

        Example:
            ```python
            state = mngr.restore(100, args=ocp.args.StandardRestore(abstract_state))
            ```
        """
        began = time.time()
        self.wait_until_finished()
        if directory is not None or self._is_closed:
            options = dataclasses.replace(self._options, read_only=True)
            other = CheckpointManager(directory or self._directory, options=options)
            other._handlers, other._is_single = self._handlers, self._is_single
            with other:
                return other.restore(step, items, restore_kwargs, args=args)
        if step is None:
            step = self.latest_step()
            if step is None:
                raise FileNotFoundError(f"{self._directory} has no steps")
        stored = functools.cache(partial(self._described, step))
        if self._is_single is None:
            stored()
        self._check_args(items, args)
        if args is None and (items is not None or restore_kwargs is not None):
            args = self._legacy_args(items, restore_kwargs, 1)
        if args is None and not self._is_single:
            args = args_lib.Composite(**dict.fromkeys(stored().items))
        asked = {DEFAULT_ITEM_NAME: args} if self._is_single else _items.by_name(args)
        wanted = _items.wanted_items(asked, stored, self._handlers, named=not self._is_single)
        found = _items.loaded_items(partial(self._manager.restore, step), stored, wanted)
        self._log("restore", step, began)
        return found[DEFAULT_ITEM_NAME] if self._is_single else args_lib.Composite(**found)

    def _described(self, step: int) -> ckpt.StepMetadata:
        """Return what `ckpt` knows of a step, after the save of it."""
        if self._pending is not None and self._pending[0] == step:
            self.wait_until_finished()
        found = self._manager.metadata(step)
        if self._is_single is None:
            self._is_single = set(found.items) == {DEFAULT_ITEM_NAME}
        return found

    def item_metadata(self, step: int) -> Any:
        """Return the `TreeMetadata` of a step, or a `Composite` of one for each item.

        Example:
            ```python
            print(mngr.item_metadata(100)["params"])
            ```
        """
        found = step_metadata(self._described(step), is_single=bool(self._is_single))
        return found.item_metadata

    def metadata(self, step: int | None = None) -> RootMetadata | StepMetadata:
        """Return the metadata of a step, or of the root.

        Raises:
            FileNotFoundError: There is no such step.

        Example:
            ```python
            print(mngr.metadata(100).custom_metadata, mngr.metadata().custom_metadata)
            ```
        """
        if step is None:
            return RootMetadata(custom_metadata=self._manager.root_metadata())
        return step_metadata(self._described(step), is_single=bool(self._is_single))

    def metrics(self, step: int) -> Any:
        """Return the metrics of a step; None if it has none.

        Example:
            ```python
            print(mngr.metrics(100))
            ```
        """
        for info in self._checkpoints:
            if info.step == step and info.metrics is not None and self._writes_metrics:
                return info.metrics
        try:
            return nested_metrics(self._manager.metrics(step)) or None
        except ckpt.errors.StepNotFoundError:
            return None

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: It has failed. Its step is no longer listed.

        Example:
            ```python
            mngr.wait_until_finished()
            ```
        """
        pending = self._pending
        if pending is None:
            return
        step, commit, infos = pending
        try:
            commit.result()
        except Exception:
            self._checkpoints = infos
            raise
        finally:
            if commit.done() and self._pending is pending:
                self._pending = None
        if self._given_up:
            self._manager.wait_until_finished()
        if step in self._given_up:
            # A manager of `ckpt` never deletes the step that it has just saved, nor a pinned one.
            with contextlib.suppress(ckpt.errors.StepPinnedError):
                self._manager.delete(step)

    def is_saving_in_progress(self) -> bool:
        """Return True while a save is under way.

        Example:
            ```python
            if not mngr.is_saving_in_progress():
                mngr.save(step, args=ocp.args.StandardSave(state))
            ```
        """
        return self._pending is not None and not self._pending[1].done()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has failed.

        Example:
            ```python
            mngr.check_for_errors()
            ```
        """
        if self._pending is not None and self._pending[1].done():
            self.wait_until_finished()

    def close(self) -> None:
        """Wait for the save that is under way, and for deletions.

        Raises:
            CheckpointError: The last save has failed.

        Example:
            ```python
            mngr.close()
            ```
        """
        try:
            self.wait_until_finished()
        finally:
            self._is_closed = True
            self._manager.close()

    def _listed(self) -> list[Step]:
        infos = [
            Step(each.step, each.committed, nested_metrics(each.metrics) or None)
            for each in self._manager.steps()
            if each.step is not None
        ]
        if not self.is_saving_in_progress():
            return infos
        assert self._pending is not None
        step = self._pending[0]
        others = [info for info in infos if info.step != step]
        return [*others, *(info for info in self._checkpoints if info.step == step)]

    def _preserved(self, infos: list[Step]) -> tuple[list[Step], set[int]]:
        """Return the steps that the policy keeps, and the numbers of the others."""
        answer = self._preservation_policy.should_preserve(infos, context=PreservationContext())
        kept = [info for info, is_kept in zip(infos, answer, strict=True) if is_kept]
        return kept, {info.step for info in infos} - {info.step for info in kept}

    def _check_args(self, items: Any, args: Any) -> None:
        if isinstance(items, args_lib.CheckpointArgs):
            raise ValueError(f"pass it by name: args={type(items).__name__}(...)")
        if args is None:
            return
        if not isinstance(args, args_lib.CheckpointArgs):
            raise ValueError(
                f"args= is a {type(args).__name__}; expected ocp.args.StandardSave(...)"
            )
        is_composite = isinstance(args, args_lib.Composite)
        if self._is_single and is_composite:
            raise ValueError(
                "Cannot provide `args` of type `Composite` when dealing with a single, unnamed "
                "(default) checkpointable object."
            )
        if not self._is_single and not is_composite:
            raise ValueError(
                "Must provide `args` of type `Composite` when dealing with multiple checkpointable "
                "objects."
            )

    def _legacy_args(self, items: Any, more: Any, which: int) -> args_lib.CheckpointArgs:
        """Return arguments for a save (0) or a restore (1) that was asked for without any."""

        def made(name: str | None, item: Any, options: Any) -> Any:
            return self._handlers.args_classes(name)[which](item, **(options or {}))

        if self._is_single:
            found: args_lib.CheckpointArgs = made(None, items, more)
            return found
        items, more = items or {}, more or {}
        names = {**items, **more}
        return args_lib.Composite(
            **{name: made(name, items.get(name), more.get(name)) for name in names}
        )

    def _log(self, what: str, step: int, began: float, **more: Any) -> None:
        if self._logger is not None:
            name = "checkpoint_manager_blocking" if what == "save" else "checkpoint_manager"
            times = {f"{name}_start_time": began, f"{name}_duration_secs": time.time() - began}
            entry = {"event_type": what, "step": step, "directory": self._directory}
            self._logger.log_entry(entry | times | more)


def _opened(
    directory: str,
    options: CheckpointManagerOptions,
    metadata: Mapping[str, Any] | None,
    names: Any,
    given_up: set[int],
) -> ckpt.sync.CheckpointManager:
    jobs = options.multiprocessing_options
    if jobs.active_processes is not None:
        raise NotImplementedError(
            "active_processes: a manager of some processes of a job is not supported. Pass "
            "coordinator= to ckpt.CheckpointManager"
        )
    coordinator: Any = None
    if jobs.primary_host is None and multihost.process_count() > 1:
        coordinator = ckpt.coordination.OwnDisks(ckpt.coordination.JaxDistributed())
    root: Any = directory
    mode = options.file_options.path_permission_mode
    if mode is not None:
        root = ckpt.storage.Local(directory, permission_mode=mode)
    if options.create and "://" not in directory and not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        if mode is not None:
            os.chmod(directory, mode)
    trash = options.todelete_subdir or options.todelete_full_path
    deletion = ckpt.keep.Deletion(
        trash=trash,
        keep_latest=False,
        orbax_steps=True,
        concurrency=options.num_deletion_threads or 2,
    )
    return ckpt.sync.CheckpointManager(
        root,
        keep=None if options.read_only else lambda step: step not in given_up,
        trash=None if options.read_only else deletion,
        step_names=names,
        custom_metadata=metadata if options.save_root_metadata else None,
        handlers=[_items.JsonItemHandler()],
        mode="r" if options.read_only else "a",
        coordinator=coordinator,
    )


def _write_root_metadata(root: Path, metadata: Mapping[str, Any]) -> None:
    """Write the metadata of a root on a disk at once, unless it has some."""
    path = root / METADATA_ITEM_NAME / "_ROOT_METADATA"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}{TMP_DIR_SUFFIX}-{uuid.uuid4().hex}")
    written.write_text(json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}))
    with contextlib.suppress(FileExistsError):
        os.link(written, path)
    written.unlink()


def _check_name(name: str | None) -> None:
    if name == METRIC_ITEM_NAME:
        raise ValueError(f"the name {name!r} of an item is that of the metrics of the step")


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
