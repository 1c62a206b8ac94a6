"""`ManagerBase`: what the asyncio and the plain manager share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, get_args

from ckpt._api.watch import watcher_of
from ckpt._arguments import instance_of, invalid, one_of, plain_json
from ckpt._events import Observer
from ckpt._plan.format_rules import Formats
from ckpt._redaction import redact
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.loop import EngineLoop
from ckpt._runtime.tracebacks import shortened
from ckpt._settings import Staging, StagingMode, Timeouts, VitalSignsMode, as_staging
from ckpt._steps.factory import job_of, make_engine, make_peers
from ckpt._steps.saves.backlog import BacklogPolicy
from ckpt._steps.saves.commits import OnFailure, OpenCommits
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.service import RootService
from ckpt._steps.watcher import Watcher, WatchOptions
from ckpt._tiers.factory import RunParts, Service, check_tiers, disks_of, with_tiers
from ckpt._tiers.settings import SharedMemory, Tier
from ckpt.coordination._base import Coordinator
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike
from ckpt.policies._deletion import Deletion
from ckpt.policies._preservation import PreservationPolicyLike, check_preservation
from ckpt.policies._save_policies import SavePolicyLike, check_save_policy
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, check_trash, open_root


class ManagerBase:
    """What the asyncio and the synchronous manager share: their arguments, and what never waits."""

    def __init__(
        self,
        root: PathLike,
        *,
        save_policy: SavePolicyLike | None = None,
        preservation: PreservationPolicyLike | Mapping[str, PreservationPolicyLike] | None = None,
        deletion: Deletion | None = None,
        step_names: StepNames | None = None,
        metadata: Mapping[str, Any] | None = None,
        handlers: HandlersLike = (),
        staging: Staging | StagingMode | None = None,
        formats: Formats | None = None,
        vital_signs: VitalSignsMode = False,
        frozen: str | Sequence[str] = (),
        backlog: BacklogPolicy = "wait",
        read_only: bool = False,
        create: bool = True,
        permission_mode: int | None = None,
        preemption_signals: Iterable[int] = (),
        timeouts: Timeouts | None = None,
        coordinator: Coordinator | None = None,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] | None = None,
        tiers: Sequence[SharedMemory | Tier] = (),
        on_failure: OnFailure = "raise",
    ) -> None:
        """Manage the steps below `root`. Does no input or output yet.

        Args:
            root: A directory, a URL (`s3://bucket/run`), or a store of `ckpt.storage`.
            save_policy: Which steps are saved: a policy of `ckpt.policies`, or a function of step,
                previous steps and `SaveContext` that returns True for steps to save. None saves
                every step.
            preservation: Which steps are kept after a commit: a policy of `ckpt.policies`, or a
                function that returns True for steps to keep. None keeps all. Pinned steps, the
                step just saved and the greatest one are always kept; if that one is unhealthy, the
                last healthy one, too. A mapping of item names (or patterns such as `ema_*`; `*` for
                all others) to policies keeps some items longer.
            deletion: How the other steps are deleted; `Deletion(trash=...)` moves them away.
            step_names: How the directories of steps are named (`ckpt.step_names`).
            metadata: JSON values to keep with the root. If it has metadata already, that stays.
            handlers: Handlers for more kinds of items, tried in order before the built-in ones (a
                `PyTreeHandler` after those); or a mapping of item names to the handler of each.
            staging: How snapshots are taken, and how much host memory they may use: a `Staging`,
                or the name of its mode.
            formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, of which the
                first that matches a leaf applies, or a function of leaf path and
                `jax.ShapeDtypeStruct` that returns an `ArrayFormat` or None. A pattern that applies
                to no array of a save is an error.
            vital_signs: Note a fingerprint, the norm and the largest value of every array, and how
                many of its values are not finite. `metadata` shows them; see `VitalSigns`. With
                True, accelerators take those of their large arrays, from the second save on, and
                compare replicas; the host takes all others after `save` has returned. "host" leaves
                all to the host. "device" leaves large arrays to their devices, also to CPUs, and
                from the first save on, which waits until the kernels are compiled.
            frozen: Patterns of leaf paths whose arrays should not change, such as `"base"`. On
                accelerators, their vital signs are compared with those of the step before, and what
                is equal is not copied to the host; what is not is saved, with a warning.
            backlog: What a save does while another one is under way. `wait` takes its snapshot
                meanwhile and commits after it; with two under way it first waits for the older.
                `skip` saves nothing and returns a falsy commit that says so. `supersede` replaces
                a save that has not begun to write, whose commit becomes falsy. (A save with
                `force=True` is never skipped.)
            read_only: Refuse everything that writes; for evaluators.
            create: Create the root if it does not exist. With False, opening the manager fails,
                also if all steps that are there have other names than `step_names` says.
            permission_mode: Permissions of new directories, such as 0o750; files get the same
                without the execute bits. None leaves both to the umask.
            preemption_signals: Signals that announce the end of the run, such as
                `(signal.SIGTERM,)`. They are handled from the first use in the main thread until
                the manager closes; see `reached_preemption`.
            timeouts: Time limits, in seconds.
            coordinator: The processes of the job (`ckpt.coordination`). None uses those of
                `jax.distributed`.
            observers: Called with an `Event` for every timed phase, on the library's thread.
            clock: Returns the time in Unix seconds; for tests of policies.
            tiers: Places nearer than the root, the nearest first (`ckpt.tiers`): `SharedMemory()`
                is the memory of this host, for `snapshot`; at a `Tier("/nvme/run")` saves are
                committed, and copied on to the root behind the training. What is read comes from
                the nearest place that has it.
            on_failure: Who hears of a failed save whose commit nobody has checked. With "raise",
                the next `save` raises its error before it begins, else the end of the manager.
                "log" leaves it at the line in the log.

        Raises:
            InvalidArgumentError: An argument is invalid.
        """
        timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
        instance_of("read_only", read_only, bool)
        instance_of("create", create, bool)
        makes_root = create and not read_only
        storage = open_root(root, timeouts, create=makes_root, permission_mode=permission_mode)
        if save_policy is not None:
            check_save_policy(save_policy)
        if preservation is not None:
            check_preservation(preservation)
        if isinstance(preservation, Mapping):
            preservation = dict(preservation)
        deletion = instance_of("deletion", deletion, Deletion)
        names = checked(Standard() if step_names is None else step_names)
        if deletion is not None and deletion.trash is not None:
            check_trash(root, deletion.trash, lambda name: names.step(name) is not None)
        staging = as_staging(staging)
        engine = make_engine(
            staging, handlers, observers, formats, clock, vital_signs=vital_signs, frozen=frozen
        )
        peers = make_peers(coordinator, timeouts, storage.location, engine)
        one_of("backlog", backlog, get_args(BacklogPolicy))
        one_of("on_failure", on_failure, get_args(OnFailure))
        if backlog == "supersede" and peers is not None:
            what = f"'wait' or 'skip', since the {peers.count} processes of this job might differ"
            raise invalid("backlog", backlog, f"{what} in which save they give up")
        given: object = metadata
        if metadata is not None and not isinstance(given, Mapping):
            raise invalid("metadata", metadata, "a mapping of names to JSON values")
        given_tiers = check_tiers(tiers, read_only=read_only, job=job_of(coordinator))
        # It may be gone through only once.
        signals = Preemption(preemption_signals).signals
        self._given, self._timeouts = root, timeouts
        self._loop = EngineLoop()
        given_metadata = None if metadata is None else plain_json("metadata", dict(metadata))
        preemption = Preemption(signals)
        commits = OpenCommits(on_failure)

        def serve(
            place: Storage,
            kept: PreservationPolicyLike | Mapping[str, PreservationPolicyLike] | None,
            deleted: Deletion | None,
            processes: Peers | None,
        ) -> RootService:
            return RootService(
                self._loop,
                place,
                engine,
                save_policy=save_policy,
                preservation=kept,
                deletion=deleted,
                names=names,
                metadata=given_metadata,
                backlog=backlog,
                read_only=read_only,
                missing="empty" if read_only and create else "error",
                must_exist=not create,
                timeouts=timeouts,
                preemption=preemption,
                commits=commits,
                peers=processes,
            )

        service = serve(storage, preservation, deletion, peers)
        self._service: Service = service
        if given_tiers is not None:
            job = job_of(coordinator)
            where = storage.location
            run = RunParts(self._loop, engine, root, where, names, timeouts, signals, job)
            near = [
                serve(
                    open_root(tier.path, timeouts),
                    tier.preservation,
                    None,
                    make_peers(disks_of(run), timeouts, where, engine),
                )
                for tier in given_tiers.near
            ]
            self._service = with_tiers(given_tiers, service, near, run)
        run_at_exit(self._service.saves.finish_at_exit)
        weakref.finalize(self, self._loop.stop).atexit = False

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a manager cannot be pickled or copied: it has a thread and saves under way. Open a "
            "manager in each process"
        )

    @property
    def root(self) -> str:
        """The directory, or the URL of the place in a store."""
        return self._service.storage.location

    def __repr__(self) -> str:
        saving = "".join(f", saving {step}" for step in self._service.saving)
        known = self._service.root.index.known
        count = "1 step" if len(known) == 1 else f"{len(known)} steps"
        seen = f", {count}, the latest {known[-1]}" if known else ""
        return f"<{type(self).__name__} {redact(self.root)!r}{seen}{saving}>"

    def reached_preemption(self, step: SupportsIndex) -> bool:
        """Return whether the run should end at `step`; does not wait.

        True once one of `preemption_signals` has arrived. With `jax.distributed` it is true from
        the step on which JAX's preemption service lets all processes agree. Ask at every step,
        after `save`: the first save for such a step is made whatever policy and backlog say. For
        one step, the answer never changes.

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

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is under way.

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

    def _watcher(self, options: WatchOptions) -> Watcher:
        return watcher_of(self._given, options, self._service.root.names, self._timeouts)

    def _give_up_entering(self) -> None:
        # A block that was not entered is never left.
        self._loop.stop()
        self._service.stop_listening()

    def _raise_unseen(self, error: BaseException | None = None) -> None:
        """Raise failures that nobody has checked, or add them as a note to `error`."""
        unseen = self._service.take_failure()
        if unseen is None:
            return
        if error is None:
            raise shortened(unseen)
        notes = "; ".join([str(unseen), *getattr(unseen, "__notes__", ())])
        error.add_note(f"a save to {redact(self.root)} failed as well: {notes}")
