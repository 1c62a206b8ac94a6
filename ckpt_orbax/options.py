"""Options of managers and checkpointers."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Container
from typing import Any


@dataclasses.dataclass
class AsyncOptions:
    """Options of saves in the background.

    Attributes:
        timeout_secs: Seconds after which a save is given up.
        barrier_sync_fn: Without effect.
        post_finalization_callback: Called in every process once a step is committed.
        create_directories_asynchronously: Without effect.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Any = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@dataclasses.dataclass
class FileOptions:
    """Options of files.

    Attributes:
        path_permission_mode: Mode of directories and files on a disk, such as `0o750`.
        skip_sync_file_validations: Without effect.
    """

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


@dataclasses.dataclass
class MultiprocessingOptions:
    """Options of jobs of several processes.

    Attributes:
        primary_host: 0, or None if every process saves to a disk of its own.
        active_processes: Refused.
        barrier_sync_key_prefix: Without effect.
    """

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass
class CheckpointManagerOptions:
    """Options of a `CheckpointManager`. Those that have no effect here are accepted.

    Attributes:
        save_interval_steps: Save steps that are multiples of this number.
        max_to_keep: Number of steps to keep; None keeps all.
        keep_time_interval: Keep steps that are so far apart, in addition.
        keep_period: Keep steps that are multiples of this number, in addition.
        best_fn: Function of the metrics of a step. With it, `max_to_keep` keeps the best steps.
        best_mode: `max` or `min`.
        keep_checkpoints_without_metrics: True to keep those as well.
        step_prefix: Prefix of the names of steps.
        step_format_fixed_length: Number of digits in these names, with zeros in front.
        step_name_format: An object with `build_name(step)`, instead of the two.
        create: True to create the root.
        cleanup_tmp_directories: Without effect: what a killed save left is always removed.
        save_on_steps: Steps that are saved, in addition.
        single_host_load_and_broadcast: Without effect: one process lists the root for all.
        todelete_subdir: Folder of the root to which steps are moved instead of being deleted.
        todelete_full_path: The same, as an absolute path.
        enable_background_delete: Without effect: steps are always deleted in the background.
        num_deletion_threads: Number of steps that are deleted at once.
        read_only: True to pass over everything that writes.
        enable_async_checkpointing: False if `save` shall return when the step is durable.
        async_options: See `AsyncOptions`.
        multiprocessing_options: See `MultiprocessingOptions`.
        should_save_fn: Function of a step and the latest step, instead of the interval.
        file_options: See `FileOptions`.
        atomicity_options: Without effect.
        save_root_metadata: False if metadata of the root are not to be written.
        temporary_path_class: Without effect.
        save_decision_policy: An object with `should_save(step, previous_steps, context=)`.
        preservation_policy: An object with `should_preserve(checkpoints, context=)`.
        prevent_write_metrics: True to keep metrics in the memory of this process only.
        enable_should_save_is_saving_in_progress_check: False if policies shall not be told that a
            save is under way.
        enable_per_process_directory_creation: Without effect.
        lightweight_initialize: Without effect.

    Raises:
        ValueError: Options contradict each other.

    Example:
        ```python
        options = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=3)
        mngr = ocp.CheckpointManager(directory, options=options)
        ```
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: AsyncOptions | None = None
    multiprocessing_options: MultiprocessingOptions = dataclasses.field(
        default_factory=MultiprocessingOptions
    )
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: FileOptions = dataclasses.field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: Any = None
    preservation_policy: Any = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', and is {self.best_mode!r}")
        if self.max_to_keep is not None and self.max_to_keep < 0:
            raise ValueError(f"max_to_keep must be None, 0 or more, and is {self.max_to_keep}")
        if self.todelete_subdir is not None and self.todelete_full_path is not None:
            raise ValueError("todelete_subdir and todelete_full_path cannot both be given")
        deletes = self.keep_time_interval or self.max_to_keep or self.keep_period
        if self.preservation_policy is not None and deletes:
            raise ValueError(
                "preservation_policy goes without max_to_keep, keep_period and keep_time_interval"
            )
        self.create = self.create and not self.read_only
        self.save_on_steps = frozenset(self.save_on_steps or ())  # type: ignore[call-overload]
