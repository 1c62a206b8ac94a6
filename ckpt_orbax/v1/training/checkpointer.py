"""`Checkpointer` of v1: the steps of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from ckpt_orbax import _items, policies
from ckpt_orbax.checkpoint_manager import CheckpointManager
from ckpt_orbax.metadata import RootMetadata
from ckpt_orbax.options import CheckpointManagerOptions
from ckpt_orbax.v1 import _calls
from ckpt_orbax.v1._calls import STATE, AsyncResponse, CheckpointMetadata, ThreadResponse
from ckpt_orbax.v1.context import Context, current
from ckpt_orbax.v1.training.errors import StepAlreadyExistsError, StepNotFoundError

Step = int | CheckpointMetadata


class Checkpointer:
    """Saves and loads the steps of one directory.

    Example:
        ```python
        policy = v1.training.save_decision_policies.FixedIntervalPolicy(100)
        with v1.training.Checkpointer(directory, save_decision_policy=policy) as ckptr:
            if ckptr.latest is not None:
                state = ckptr.load(ckptr.latest, abstract_state)
            ckptr.save(200, state, metrics={"loss": 0.5})
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Context | None = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
    ) -> None:
        """Open a root.

        Args:
            directory: A directory, or a URL of a store.
            context: Settings for all calls.
            save_decision_policy: Steps that are saved; by default the first, and then each for
                which no other save is under way.
            preservation_policy: Steps that are kept; by default all.
            step_name_format: An object with `build_name(step)`.
            custom_metadata: Metadata of the root.
            cleanup_tmp_directories: Without effect: what a killed save left is always removed.
            lightweight_initialize: Without effect.
            logger: An object with `log_entry(dict)`.
        """
        self._context = Context(context)
        default = policies.AnySavePolicy(
            [
                policies.InitialSavePolicy(),
                policies.ContinuousCheckpointingPolicy(),
                policies.PreemptionCheckpointingPolicy(),
            ]
        )
        options = CheckpointManagerOptions(
            save_decision_policy=save_decision_policy or default,
            preservation_policy=preservation_policy or policies.PreserveAll(),
            step_name_format=step_name_format,
            cleanup_tmp_directories=cleanup_tmp_directories,
            lightweight_initialize=lightweight_initialize,
            todelete_full_path=self._context.deletion.gcs_deletion_options.todelete_full_path,
            async_options=self._context.asynchronous,
            file_options=self._context.file,
            multiprocessing_options=self._context.multiprocessing,
        )
        self._manager = CheckpointManager(
            directory, options=options, metadata=custom_metadata, logger=logger
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Any:
        """The root: a `pathlib.Path`, or the text of a URL."""
        return self._manager.directory

    @property
    def latest(self) -> CheckpointMetadata | None:
        """The latest step, also one that is being saved; None if there is none."""
        found = self.checkpoints
        return found[-1] if found else None

    @property
    def checkpoints(self) -> Sequence[CheckpointMetadata]:
        """The steps, ascending, with the one that is being saved."""
        return [
            CheckpointMetadata(
                info.step,
                path=self._manager._path_of(info.step),
                metrics=info.metrics,
                commit_timestamp_nsecs=int(info.time.timestamp() * 1e9),
            )
            for info in self._manager._checkpoints
        ]

    def should_save(self, step: int) -> bool:
        """Return True if `save` would save the step.

        Example:
            ```python
            if ckptr.should_save(200):
                ckptr.save(200, state)
            ```
        """
        return self._manager.should_save(step)

    def save(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> bool:
        """Save a tree; return when it is on disk.

        Args:
            step: The step.
            state: The tree.
            checkpointable_name: Its name in the step.
            options: Those of `save_checkpointables_async`.

        Returns:
            True if the step was saved; False if the policy has refused it.

        Raises:
            StepAlreadyExistsError: The step exists, and `overwrite` is False.

        Example:
            ```python
            is_saved = ckptr.save(200, state)
            ```
        """
        return self.save_checkpointables(step, {checkpointable_name: state}, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Save several items by name; options as for `save`.

        Example:
            ```python
            ckptr.save_checkpointables(200, {"model": state, "config": {"lr": 0.1}})
            ```
        """
        response = self.save_checkpointables_async(step, checkpointables, **options)
        return response is not None and bool(response.result())

    def save_async(
        self, step: int, state: Any, *, checkpointable_name: str = STATE, **options: Any
    ) -> AsyncResponse | None:
        """Take a snapshot, and return once it is safe; None if the policy has refused the step.

        Example:
            ```python
            response = ckptr.save_async(200, state)
            ```
        """
        return self.save_checkpointables_async(step, {checkpointable_name: state}, **options)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> AsyncResponse | None:
        """Take a snapshot of several items; see `save_async`.

        Args:
            step: The step.
            checkpointables: The items by name.
            force: True to save whatever the policy says.
            overwrite: True to replace a step that is there.
            metrics: Metrics of the step.
            custom_metadata: JSON values to keep with the step.

        Example:
            ```python
            response = ckptr.save_checkpointables_async(200, {"model": state})
            ```
        """
        exists = any(info.step == step for info in self._manager._checkpoints)
        if exists and not overwrite:
            raise StepAlreadyExistsError(f"{self.directory} has step {step} already")
        if not (exists or force or self._manager.should_save(step)):
            return None
        items = _calls.items_to_save(checkpointables, current(self._context))
        given = {"items": items, "metrics": metrics, "custom_metadata": custom_metadata}
        commit = self._manager._start(step, metrics, given, "replace" if exists else "error")
        return AsyncResponse(commit, True, self.wait)

    def load(
        self,
        step: Step | None = None,
        abstract_state: Any = None,
        *,
        checkpointable_name: str | None = "AUTO",
    ) -> Any:
        """Load a tree, onto a target if one is given.

        Args:
            step: The step; None for the latest.
            abstract_state: The target; None loads the tree as it was saved.
            checkpointable_name: Its name in the step; by default the one tree that is there.

        Raises:
            StepNotFoundError: There is no such step.
            ValueError: There is no such item, or the target does not fit.

        Example:
            ```python
            state = ckptr.load(100, abstract_state)
            ```
        """
        number = self._existing(step)
        name = _calls.the_name(checkpointable_name, self._manager._described(number))
        return self.load_checkpointables(number, {name: abstract_state})[name]

    def load_checkpointables(
        self, step: Step | None = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load several items by name; see `load`.

        Example:
            ```python
            found = ckptr.load_checkpointables(100)
            ```
        """
        number = self._existing(step)
        stored = self._manager._described(number)
        asked = abstract_checkpointables or dict.fromkeys(stored.items)
        wanted = _calls.wanted_items(asked, stored, current(self._context))
        load = partial(self._manager._manager.restore, number)
        self.wait()
        return _items.loaded_items(load, lambda: stored, wanted)

    def load_async(
        self, step: Step | None = None, abstract_state: Any = None, **options: Any
    ) -> ThreadResponse:
        """Load a tree in a thread; see `load`.

        Example:
            ```python
            state = ckptr.load_async(100, abstract_state).result()
            ```
        """
        return ThreadResponse(partial(self.load, step, abstract_state, **options))

    def load_checkpointables_async(self, *args: Any, **options: Any) -> ThreadResponse:
        """Load several items in a thread; see `load_checkpointables`.

        Example:
            ```python
            found = ckptr.load_checkpointables_async(100).result()
            ```
        """
        return ThreadResponse(partial(self.load_checkpointables, *args, **options))

    def metadata(
        self, step: Step | None = None, checkpointable_name: str | None = "AUTO"
    ) -> CheckpointMetadata:
        """Return what is stored of a tree, without its arrays.

        Example:
            ```python
            print(ckptr.metadata(100).metadata["params"])
            ```
        """
        stored = self._manager._described(self._existing(step))
        name = _calls.the_name(checkpointable_name, stored)
        return _calls.described(stored, name, current(self._context))

    def checkpointables_metadata(self, step: Step | None = None) -> CheckpointMetadata:
        """Return what is stored of all items, without their arrays.

        Example:
            ```python
            print(ckptr.checkpointables_metadata(100).metadata.keys())
            ```
        """
        stored = self._manager._described(self._existing(step))
        return _calls.described(stored, None, current(self._context))

    def root_metadata(self) -> RootMetadata:
        """Return the metadata of the root.

        Example:
            ```python
            print(ckptr.root_metadata().custom_metadata)
            ```
        """
        found = self._manager.metadata()
        assert isinstance(found, RootMetadata)
        return found

    def delete(
        self, step: Step, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> bool:
        """Delete a step; return True if there was one.

        Raises:
            NotImplementedError: There is a `checkpointable_name`: items are not deleted.
            StepNotFoundError: There is no such step, and `missing_ok` is False.

        Example:
            ```python
            ckptr.delete(100)
            ```
        """
        _calls.check_whole(checkpointable_name)
        try:
            self._manager.delete(self._existing(step))
        except FileNotFoundError:
            if missing_ok:
                return False
            raise
        return True

    def delete_async(self, step: Step, **options: Any) -> ThreadResponse:
        """Delete a step in a thread; see `delete`.

        Example:
            ```python
            ckptr.delete_async(100).result()
            ```
        """
        return ThreadResponse(partial(self.delete, step, **options))

    def reload(self) -> None:
        """Read the list of steps again.

        Example:
            ```python
            ckptr.reload()
            ```
        """
        self._manager.reload()

    def is_saving_in_progress(self) -> bool:
        """Return True while a save is under way.

        Example:
            ```python
            assert not ckptr.is_saving_in_progress()
            ```
        """
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: It has failed.

        Example:
            ```python
            ckptr.wait()
            ```
        """
        self._manager.wait_until_finished()

    def cancel(self, step: Step | None = None) -> None:
        """Give up the save that is under way; nothing of it is left.

        Example:
            ```python
            ckptr.cancel()
            ```
        """
        self._manager.cancel()

    def close(self) -> None:
        """Wait for the save that is under way, and for deletions.

        Example:
            ```python
            ckptr.close()
            ```
        """
        self._manager.close()

    def _existing(self, step: Step | None) -> int:
        if isinstance(step, CheckpointMetadata):
            step = step.step
        known = [info.step for info in self._manager._checkpoints]
        if step is None and known:
            return known[-1]
        if step is None or step not in known:
            what = "no steps" if step is None else f"no step {step}"
            raise StepNotFoundError(f"{self.directory} has {what}")
        return step


def _renamed(name: str) -> Any:
    # By its name, since a subclass may have a method of its own.
    return _calls.deprecated(name, lambda self, *args, **more: getattr(self, name)(*args, **more))


for _name, _new in {
    "save_pytree": "save",
    "save_pytree_async": "save_async",
    "load_pytree": "load",
    "load_pytree_async": "load_async",
    "pytree_metadata": "metadata",
}.items():
    setattr(Checkpointer, _name, _renamed(_new))
