"""`ManagerBase`: the part of a manager that the asyncio and the plain one share."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, get_args

from ckpt._api.hints import hinted, no_attribute
from ckpt._arguments import instance_of, invalid, one_of, plain_json
from ckpt._commit import StepInfo
from ckpt._events import Observer
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._plan.save_plan import Formats
from ckpt._redaction import redact
from ckpt._runtime.futures import shortened
from ckpt._runtime.loop import EngineLoop
from ckpt._runtime.threads import run_at_exit
from ckpt._settings import OpenMode, Staging, StagingMode, Timeouts, as_staging
from ckpt._steps.root import RootOptions
from ckpt._steps.saves.commits import OnFailure, OpenCommits
from ckpt._steps.saves.history import Preemption
from ckpt._steps.saves.queue import Run
from ckpt._steps.service import RootService, make_engine, make_job, root_service
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.handlers._registry import HandlersLike
from ckpt.keep._deletion import Deletion
from ckpt.keep._keep_policies import KeepLike, as_keep_rules
from ckpt.save_when._save_policies import SavePolicyLike, check_save_policy, signals_of
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._resolve import PathLike, check_trash, open_root

if TYPE_CHECKING:
    from ckpt._steps.saves.partial import OpenSave
    from ckpt._tiers.settings import SharedMemory, Tier
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions._interface import Extensions


class ManagerBase:
    """The part that both managers share: their arguments, and the methods that never wait."""

    @hinted
    def __init__(
        self,
        root: PathLike,
        *,
        save_when: SavePolicyLike | None = None,
        keep: KeepLike | None = None,
        trash: str | os.PathLike[str] | Deletion | None = None,
        step_names: StepNames | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
        handlers: HandlersLike = (),
        staging: Staging | StagingMode | None = None,
        formats: Formats | None = None,
        extensions: Extensions = (),
        mode: OpenMode = "a",
        timeouts: Timeouts | None = None,
        coordinator: Coordinator | None = None,
        observers: Iterable[Observer] = (),
        tiers: Sequence[SharedMemory | Tier] = (),
        on_failure: OnFailure = "raise",
    ) -> None:
        """Manage the steps below `root`. Does no input or output yet.

        Args:
            root: A directory, a URL (`s3://bucket/run`), or a store of `ckpt.storage`.
            save_when: The steps that are saved: a policy of `ckpt.save_when`, or a function of
                step, previous steps and `SaveContext` that returns True for steps to save. None
                saves every step.
            keep: The steps that are kept after a commit: a policy of `ckpt.keep`, a number `n` for
                the `n` latest, or a function that returns True for steps to keep. None keeps all.
                Pinned steps, the step just saved and the greatest one are always kept; if the
                greatest one is unhealthy, the last healthy one, too. A mapping of item names (or
                patterns such as `ema_*`; `*` for all others) to policies keeps some items longer.
            trash: A folder to which the other steps are moved instead of being removed (see
                `ckpt.keep.Deletion`); or a `Deletion`, which says more about how they are deleted.
            step_names: Naming of the step directories (`ckpt.step_names`).
            custom_metadata: JSON values to keep with the root, written with the first save. Those
                that the root has already stay as they are.
            handlers: Handlers for more kinds of items, tried in order before the built-in ones (a
                `PyTreeHandler` after those); or a mapping of item names to the handler of each.
            staging: How snapshots are taken, how much host memory they may use, and what a save
                does while another one is under way: a `Staging`, or the name of its mode.
            formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, where the first
                pattern that matches a leaf applies; a dtype, for all arrays of its kind; or a
                function of leaf path and `jax.ShapeDtypeStruct` that returns an `ArrayFormat` or
                None. A pattern that applies to no array of a save is an error.
            extensions: What takes part beside the arrays, from `ckpt.extensions`: `VitalSigns()`
                takes a fingerprint and the norm of each array, `Contract({...})` says what the run
                is, and `Rehearsal()` tries what a save will need.
            mode: How the root is opened. `"a"` creates it with the first save if it does not exist.
                `"r+"` fails if there is no root, or if its steps have other names than those of
                `step_names`. `"r"` refuses everything that writes, for evaluators; a root that does
                not exist yet has no steps then.
            timeouts: Time limits, in seconds.
            coordinator: The processes of the job (`ckpt.coordination`). None uses those of
                `jax.distributed`.
            observers: Called with an `Event` for every timed phase, on the library's thread.
            tiers: Places nearer than the root, the nearest first (`ckpt.tiers`): `SharedMemory()`
                is the memory of this host, for `snapshot`; at a `Tier("/nvme/run")` saves are
                committed, and copied on to the root while training continues. Reads take a step
                from the nearest place that has it.
            on_failure: Report of a failed save whose commit nobody has checked. With "raise", the
                next `save` raises its error before it begins, or else the end of the manager does.
                "log" only logs it.

        Raises:
            InvalidArgumentError: An argument is invalid.
        """
        timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
        one_of("mode", mode, get_args(OpenMode))
        if "CKPT_DRILL_ROOT" in os.environ:
            from ckpt._proof.drill_root import in_drill

            mode, trash = in_drill(mode, trash)
        storage = open_root(root, timeouts, create=mode == "a")
        if save_when is not None:
            check_save_policy(save_when)
        rules = None if keep is None else as_keep_rules(keep)
        deletion = trash if isinstance(trash, Deletion | None) else Deletion(trash=trash)
        names = checked(Standard() if step_names is None else step_names)
        if deletion is not None and deletion.trash is not None:
            check_trash(root, deletion.trash, lambda name: names.step(name) is not None)
        staging = as_staging(staging)
        engine = make_engine(staging, handlers, observers, formats, extensions, OrbaxSidecars())
        job = make_job(coordinator, timeouts, storage.location, engine)
        one_of("on_failure", on_failure, get_args(OnFailure))
        metadata = custom_metadata and plain_json("custom_metadata", custom_metadata)
        if not isinstance(metadata, Mapping | None):
            raise invalid("custom_metadata", metadata, "a mapping of names to JSON values")
        make: Callable[..., RootService] = root_service
        if tiers not in ((), []):
            from ckpt._tiers.factory import service_with
            from ckpt.coordination._jobs import job_of

            make = service_with(tiers, root, job_of(coordinator), read_only=mode == "r")
        self._given, self._timeouts = root, timeouts
        self._loop = EngineLoop()
        preemption = Preemption(() if save_when is None else signals_of(save_when))
        options = RootOptions(
            names,
            timeouts,
            mode,
            "empty" if mode == "r" else "error",
            save_when,
            rules,
            deletion,
            metadata,
        )
        run = Run(self._loop, preemption, OpenCommits(on_failure))
        self._service = make(run, storage, engine, options, job)
        run_at_exit(self._service.saves.finish_at_exit)
        weakref.finalize(self, self._loop.stop).atexit = False

    def __init_subclass__(cls) -> None:
        # Python's own messages name the class that users know, not the one that has the method.
        for base in cls.__mro__[:-1]:
            for name, method in vars(base).items():
                if inspect.isfunction(method):
                    inspect.unwrap(method).__qualname__ = f"{cls.__name__}.{name}"

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            raise no_attribute(f"{type(self).__name__!r} object", name)

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a manager cannot be pickled or copied: it has a thread and saves under way. Open a "
            "manager in each process"
        )

    @property
    def directory(self) -> Path | str:
        """The directory of the steps; for a root in a store, its URL."""
        storage = self._service.storage
        return Path(storage.location) if isinstance(storage, LocalStorage) else storage.location

    def __repr__(self) -> str:
        saving = "".join(f", saving {step}" for step in self._service.saving)
        known = self._service.root.index.known
        count = "1 step" if len(known) == 1 else f"{len(known)} steps"
        seen = f", {count}, the latest {known[-1]}" if known else ""
        return f"<{type(self).__name__} {redact(self._service.storage.location)!r}{seen}{saving}>"

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Return True if the run should end at `step`; does not wait.

        True once one of the signals of `save_when.Preempted` has arrived. With `jax.distributed`
        it is true from the step on which JAX's preemption service lets all processes agree. Ask at
        every step, after `save`: the first save for such a step is made even if policy or backlog
        refuse it.
        The answer for a step never changes.

        Raises:
            InvalidArgumentError: Signals cannot be handled: this is not the main thread.

        Example:
            ```python
            for step in range(100):
                state = train_step(state)
                if mgr.reached_preemption(step):
                    break
            ```
        """
        return self._service.reached_preemption(step)

    def mark(self, step: SupportsIndex, state: Any) -> None:
        """Keep fingerprints of the state at `step`, to prove that a resume repeats the run.

        Call it at the beginning of each step, with the state that the step gets, in all processes
        of a job. After a restart, the steps since the last checkpoint are run again. Their marks
        are compared with those of the run that saved it: the first one that differs is logged as a
        warning, with the leaves and what their pattern says. If all are equal, one line of
        information says so. `ckpt.extensions.Marks` changes how.

        Devices take the fingerprints of their arrays, which the program may donate as soon as this
        returns: it does not wait for them. The first call compiles; arrays of numpy are looked at
        before it returns. A mark takes up to 60 bytes a leaf in the folder `.ckpt-marks` of the
        root, where the latest 64 notes of 1 MiB are kept. The end of the manager waits for marks.

        Args:
            step: The step.
            state: A tree that `save` takes. It may have objects that know their own state, such as
                data iterators. Other leaves than before are a difference.

        Raises:
            NotRepeatedError: `Marks(on_difference="raise")` is set, and a step before is known to
                differ.
            UnsupportedLeafError: A leaf cannot be saved, or its buffer is gone.
            ReadOnlyError: The manager is read-only.
            ClosedError: The manager is closed.

        Example:
            ```python
            for step in range(100):
                mgr.mark(step, state)
                state = train_step(state)
            ```
        """
        from ckpt._proof.run_marks import mark

        mark(self._service, step, state)

    def is_saving_in_progress(self) -> bool:
        """Return True if a save is under way.

        Example:
            ```python
            if not mgr.is_saving_in_progress():
                print("every save is durable, or has failed")
            ```
        """
        return bool(self._service.saving)

    def steps_in_progress(self) -> list[int]:
        """Return the steps that are being saved, ascending; does not wait.

        Example:
            ```python
            print("being saved:", mgr.steps_in_progress())
            ```
        """
        return sorted(set(self._service.saving))

    def _raise_unseen(self, error: BaseException | None = None) -> None:
        """Raise failures that nobody has checked, or add them as a note to `error`."""
        unseen = self._service.take_failure()
        if unseen is None:
            return
        if error is None:
            raise shortened(unseen)
        notes = "; ".join([str(unseen), *getattr(unseen, "__notes__", ())])
        error.add_note(
            f"a save to {redact(self._service.storage.location)} failed as well: {notes}"
        )


# Reason given for discarding a save that its owner dropped.
_DROPPED = "it was dropped without finalize() or discard()"


def refused(advice: str) -> Callable[..., Any]:
    """Return a method that raises for syntax that a class does not have; `advice` is the text."""

    def refuse(self: object, *_: object) -> NoReturn:
        raise InvalidArgumentError(advice)

    return refuse


class PartialSaveBase:
    """The part of a partial save that both faces share: the methods that never wait."""

    def __init__(self, save: OpenSave, owner: object = None) -> None:
        """Called by a manager only; `owner` is kept alive."""
        self._save = save
        self._owner = owner
        self._info: StepInfo | None = None
        weakref.finalize(self, save.abandon, _DROPPED).atexit = False

    @property
    def step(self) -> int | None:
        """The step."""
        return self._save.request.step

    @property
    def info(self) -> StepInfo:
        """The `StepInfo` of the step.

        Raises:
            CheckpointError: The step is not published yet: the block has not ended.
        """
        if self._info is None:
            raise CheckpointError(
                "the partial save is not published yet: read info after the block, or after "
                "finalize()",
                step=self.step,
            )
        return self._info

    def __repr__(self) -> str:
        return repr(self._save)

    def _note_failure(self, error: BaseException) -> None:
        """Add an earlier failure of the save, which may not have been seen, to `error`."""
        failure = self._save.failure()
        if failure is not None and failure is not error:
            error.add_note(f"the partial save of step {self.step} had failed: {failure}")
