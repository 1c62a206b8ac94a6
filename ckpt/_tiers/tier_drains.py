"""`TierDrains`: the choice of steps that are copied on from the tiers, and the outcomes.

`TierFetches` copies steps back from farther places to the nearest tier on demand.

The trainer decides, since policies are Python functions; its agent copies, and reports. In a job
the primary decides for all, and each agent copies the part of its process. The retention of a tier
keeps the steps that are still to be copied on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio

from ckpt._arguments import check_step
from ckpt._commit import Commit, StepInfo, arrived, stays
from ckpt._events import EventRecorder, Outcome
from ckpt._format.manifest_head import save_id
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep
from ckpt._steps.service import RootService
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.agent.messages import (
    AgentMessage,
    CallResult,
    StepAtTier,
    StepFetchRequest,
    ToAgent,
    TransferResult,
)
from ckpt._tiers.drains.drain import missing
from ckpt._tiers.settings import PART_FOLDER, Tier
from ckpt._tree.table import format_bytes
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)
from ckpt.keep._questions import SavedStep
from ckpt.save_when._save_policies import refusal_of
from ckpt.storage._local.storage import LocalStorage

logger = logging.getLogger("ckpt")

# Name of the pin that protects a prefetched step from the preservation of its tier.
PREFETCHED = "prefetched"
# Tries to copy and pin a step that is deleted each time before it can be pinned.
_TRIES = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TierDrains:
    """The copies of steps from tier to tier. Its coroutines run on the engine's loop.

    Attributes:
        fetches: Copies steps back to the nearest tier.
    """

    def __init__(
        self, tiers: Sequence[tuple[RootService, Tier]], root: RootService, agent: AgentClient
    ) -> None:
        """Copy steps from each of `tiers`, the nearest first, to the next, and last to `root`."""
        self._services = [service for service, _ in tiers]
        self._settings = [tier for _, tier in tiers]
        self._targets = [*self._services[1:], root]
        self._root = root
        self._agent = agent
        self.fetches: TierFetches = TierFetches(self._services[0], agent)
        self._guard = threading.Lock()
        # By tier, steps that the agent knows and has not copied yet.
        self._pending: list[dict[int, StepAtTier]] = [{} for _ in tiers]
        # By tier, steps of which it is not decided yet if they go on.
        self._undecided: list[set[int]] = [set() for _ in tiers]
        # By tier, steps that were given up. They stay until its next save, or for the next run.
        self._failed: list[set[int]] = [set() for _ in tiers]
        # By step, the saves and commits that wait for the root, in order.
        self._commits: dict[int, list[tuple[str, Commit]]] = {}
        # By tier, the steps that were copied on, or will be: the previous steps for its policy.
        self._previous: list[dict[int, SavedStep]] = [{} for _ in tiers]
        # By tier, the greatest step that has arrived at the next place.
        self._newest: list[int | None] = [None] * len(tiers)
        # True if steps have arrived after the loop was closed.
        self.is_untidy: bool = False
        # Steps that the agent did not copy at its end, including those that only then were to go
        # on.
        self._left: tuple[int, ...] = ()

    async def open(self) -> None:
        """Tell the agent about steps that earlier runs have left to be copied."""
        await run_in_thread(self._agent.start)
        for service in self._services:
            await run_in_thread(_say_parts_of_others, service)
        for leg, (service, target) in enumerate(zip(self._services, self._targets, strict=True)):
            self._previous[leg] = await target.reader.saved_steps()
            self._newest[leg] = max(self._previous[leg], default=None)
            what = f"looking for steps that are not in {redact(target.storage.location)}"
            act = partial(self._left_by_others, leg)
            found = await service.root.processes.on_primary("drains", leg, what, act)
            # The newest wanted step goes first; unwanted steps matter only when the run ends.
            for number, wanted, save in reversed(found):
                self._agent.tell(self._noted(leg, number, save, wanted=wanted))

    async def _left_by_others(self, leg: int) -> list[tuple[int, bool, str]]:
        """Return the steps that the next place lacks, ascending.

        Each comes with the answer of the policy, and with its save.
        """
        service, target = self._services[leg], self._targets[leg]
        left = await missing(service.storage, target.storage, None, service.root.names)
        if left and target is not self._root:
            # A step that was prefetched from the root is there, and need not go to tiers between.
            left = await missing(service.storage, self._root.storage, left, service.root.names)
        here = await service.root.index.refresh()
        new = {step: here[step] for step in sorted(left) if step in here}
        there = await target.root.index.refresh()
        # A step that the next place has deleted is not brought back.
        gone = target.root.retention.would_delete(dict(sorted((there | new).items())))
        found = {step: each for step, each in new.items() if step not in gone}
        steps = await service.root.retention.saved_steps(found)
        return [
            (each.step, await self._is_wanted(leg, each), _save_of(found[each.step]))
            for each in steps
        ]

    async def _is_wanted(self, leg: int, saved: SavedStep) -> bool:
        """Return True if the policy wants the step to be copied on."""
        drain = self._settings[leg].drain
        if drain is not None:
            previous = [each for _, each in sorted(self._previous[leg].items())]
            context = self._services[leg].saves.history.context(saved.step)
            if await run_in_thread(refusal_of, drain, saved.step, previous, context) is not None:
                return False
        self._previous[leg][saved.step] = saved
        return True

    def _noted(self, leg: int, number: int, save: str, *, wanted: bool) -> StepAtTier:
        """Return the message to the agent about a step, and count the step as on its way."""
        step = StepAtTier(leg, number, self._services[leg].root.names.name(number), wanted, save)
        with self._guard:
            self._failed[leg].clear()
            self._undecided[leg].discard(number)
            pending = self._pending[leg]
            pending[number] = step
            # Of the unwanted steps, only the newest is copied when the run ends.
            for other in [n for n, each in pending.items() if not each.is_wanted and n < number]:
                del pending[other]
        return step

    def committed(self, info: StepInfo, save: str, commit: Commit) -> None:
        """Note a commit that waits until its step is in the root.

        Called before the commit is done: if this process dies then, the agent knows the step.
        """
        if info.step is not None:
            with self._guard:
                self._commits.setdefault(info.step, []).append((save, commit))
                self._undecided[0].add(info.step)
            step_dir = self._services[0].root.names.name(info.step)
            self._agent.tell(StepAtTier(0, info.step, step_dir, is_wanted=False, save=save))

    async def send_on(self, leg: int, number: int) -> None:
        """Let a step of a tier be copied on if the policy wants it; called before tidying.

        The primary of a job decides. A wanted step stays until it has been copied.

        Raises:
            CheckpointError: The decision has failed.
        """
        service = self._services[leg]

        async def decide() -> tuple[bool, str] | None:
            found = (await service.root.index.refresh()).get(number)
            if found is None:
                # The step was deleted meanwhile.
                return None
            (saved,) = await service.root.retention.saved_steps({number: found})
            return await self._is_wanted(leg, saved), _save_of(found)

        what = f"deciding where step {number} is copied to"
        decided = await service.root.processes.on_primary(f"drain-{leg}", number, what, decide)
        if decided is None:
            with self._guard:
                self._undecided[leg].discard(number)
            self._end_waits(number, "it was deleted before it was copied")
            return
        wanted, save = decided
        await run_in_thread(self._agent.start)
        self._agent.tell(self._noted(leg, number, save, wanted=wanted))
        if not wanted:
            self._end_waits(number, "the policy drain= of its tier does not want it there")

    def waiting(self, leg: int) -> set[int]:
        """Return the steps that the next place is to get; called by the retention.

        The agent holds the steps that it copies, but it may not know a step yet, or may have ended.
        """
        with self._guard:
            pending = self._pending[leg]
            # Of the unwanted steps, the newest goes on when the run ends.
            going = {n for n, each in pending.items() if each.is_wanted or n == max(pending)}
            return going.union(self._undecided[leg], self._failed[leg], self._left)

    def undecided(self, number: int, error: CheckpointError) -> None:
        """End the waits for a step of the nearest tier after a failed decision."""
        self._end_waits(number, f"{error.message}. The next run decides again")

    def _end_waits(self, number: int, reason: str) -> None:
        with self._guard:
            commits = self._commits.pop(number, [])
        for _, commit in commits:
            stays(commit, reason)

    def greeting(self) -> list[ToAgent]:
        """Return the messages that a new agent needs: the steps that are not copied yet."""
        with self._guard:
            return [
                step
                for pending in self._pending
                for _, step in sorted(pending.items(), reverse=True)
            ]

    def heard(self, message: AgentMessage) -> None:
        """Handle a message of the agent; called in a thread."""
        if isinstance(message, TransferResult):
            self._moved(message)

    def _moved(self, message: TransferResult) -> None:
        leg, target = message.leg, self._targets[message.leg]
        is_last = leg == len(self._targets) - 1
        if message.outcome == "damaged":
            # This comes first: a waiter that hears of the failure may save at once.
            with contextlib.suppress(CheckpointError):
                target.run.loop.submit(partial(self._distrust, leg, message.step)).future.result()
        with self._guard:
            is_newest = self._is_newest(message)
            if message.problem and not is_newest:
                # The step was saved anew meanwhile: the outcome of the new save tells of both.
                return
            if is_newest:
                self._pending[leg].pop(message.step, None)
                self._undecided[leg].discard(message.step)
            waiting = self._commits.get(message.step, [])
            answered = _answered(message.save, [save for save, _ in waiting])
            if not is_last and not message.problem:
                self._undecided[leg + 1].add(message.step)
            commits = waiting[:answered] if is_last or message.problem else []
            del waiting[: len(commits)]
            if not waiting:
                self._commits.pop(message.step, None)
            if message.problem:
                self._failed[leg].add(message.step)
                self._previous[leg].pop(message.step, None)
            else:
                self._newest[leg] = max(message.step, self._newest[leg] or 0)
        self._report(message)
        for _, commit in commits:
            if message.problem:
                stays(commit, message.problem)
            else:
                arrived(commit)
        if message.problem:
            return
        try:
            target.run.loop.submit(partial(self._arrived, leg, message.step))
        except CheckpointError:
            # The manager is closing; it tidies at the end.
            self.is_untidy = True

    def _is_newest(self, message: TransferResult) -> bool:
        """Return True if no newer save of the step is known than that of the message."""
        pending = self._pending[message.leg].get(message.step)
        newer = {save for save, _ in self._commits.get(message.step, [])[-1:]}
        newer |= {pending.save} if pending is not None else set()
        return not message.save or newer <= {"", message.save}

    def _report(self, message: TransferResult) -> None:
        """Log the outcome of a copy, and report it to observers."""
        source, target = self._services[message.leg], self._targets[message.leg]
        where, newest = redact(target.storage.location), self._newest[message.leg]
        outcome: Outcome = "ok"
        if message.problem:
            outcome = "failed"
            logger.log(
                # A step that somebody has deleted is worth a warning only.
                logging.WARNING if message.outcome == "deleted" else logging.ERROR,
                "step %d of %s was NOT copied to %s: %s; %s",
                message.step,
                redact(source.storage.location),
                where,
                message.problem,
                "it has no step yet"
                if newest is None
                else f"the newest durable step there is {newest}",
            )
        else:
            size, seconds = format_bytes(message.nbytes), message.seconds
            logger.info("copied step %d to %s: %s in %.2f s", message.step, where, size, seconds)
        recorder = EventRecorder("drain", message.step, self._root.engine.observers)
        began_ns = time.perf_counter_ns() - int(message.seconds * 1e9)
        reason = message.problem or None
        end = partial(recorder.end, began_ns, outcome, nbytes=message.nbytes, reason=reason)

        async def on_loop() -> None:
            end()

        try:
            target.run.loop.submit(on_loop)
        except CheckpointError:
            # The loop is closing and takes no more calls.
            end()

    async def _arrived(self, leg: int, number: int) -> None:
        """Let a step that has arrived go on to the next place, and tidy both places."""
        if leg + 1 < len(self._services):
            await self.send_on(leg + 1, number)
        for each in (self._targets[leg], self._services[leg]):
            await each.root.processes.tidy(partial(each.root.preserve, check_step(number)))

    async def _distrust(self, leg: int, number: int) -> None:
        """Keep saves from sharing files with a step that is damaged at its tier."""
        service = self._services[leg]
        # If its manifest is damaged, its data files may be whole.
        with contextlib.suppress(CheckpointError):
            service.reader.distrust((await service.root.index.found(number)).manifest)

    def given_up(self, left: tuple[int, ...]) -> list[int]:
        """Return the steps that were not copied on, and end the waits for them.

        Args:
            left: The steps that the agent has named at its end.
        """
        self._left = left
        with self._guard:
            waiting = {
                s for pending in self._pending for s, step in pending.items() if step.is_wanted
            }
        for number in list(self._commits):
            reason = "the run has ended before it was copied; the next one goes on with it"
            self._end_waits(number, reason)
        return sorted(waiting.union(self._left))


def _save_of(step: IndexedStep) -> str:
    return save_id(step.save, step.created_ns)


def _answered(save: str, saves: Sequence[str]) -> int:
    """Return how many saves of a step, in order, an outcome is the answer to.

    It answers its save and those that it has replaced; all of them if its save is unknown.
    """
    unknown = 0 if save else len(saves)
    return saves.index(save) + 1 if save in saves else unknown


def _say_parts_of_others(service: RootService) -> None:
    """Warn about steps at a tier that only a job of another size brings to the root. Blocks."""
    processes = service.root.processes
    if processes.process or not isinstance(service.storage, LocalStorage):
        return
    own = Path(service.storage.location)
    top = own if processes.count == 1 else own.parent
    counts: set[int] = set()
    for path in top.glob("process_*-of-*"):
        match = PART_FOLDER.fullmatch(path.name)
        # This job does not read a folder that cannot be listed.
        with contextlib.suppress(OSError):
            names = [each.name for each in path.iterdir()]
            if match and any(service.root.names.step(name) is not None for name in names):
                counts.add(int(match[1]))
    for count in sorted(counts - {processes.count}):
        logger.warning(
            "%s has steps of a job of %d processes, and this one has %d: it does not read them, or "
            "copy on those that wait. Start a job of %d to have them in the root, or remove them",
            top,
            count,
            processes.count,
            count,
        )


class TierFetches:
    """Copies steps back to the nearest tier. Its coroutines run on the engine's loop."""

    def __init__(self, near: RootService, agent: AgentClient) -> None:
        self._near = near
        self._agent = agent
        # Set on the engine's loop.
        self._turn: anyio.Lock | None = None

    async def fetch(self, step: int, places: Sequence[int]) -> None:
        """Bring a step to the nearest tier, whole and pinned.

        Args:
            step: The step.
            places: Numbers of the farther places that have it, the nearest first; empty if only the
                nearest tier has it.

        Raises:
            StepExistsError: Another save of the step is in its place.
            CheckpointError: No place could give a copy; this is the error of the first one.
        """
        self._turn = self._turn or anyio.Lock()
        async with self._turn:
            for turn in range(_TRIES):
                await self._copy(step, places)
                try:
                    await self._near.pin(step, PREFETCHED)
                    return
                except StepNotFoundError:
                    # The tier was tidied before the step was pinned.
                    if turn == _TRIES - 1:
                        raise

    async def _copy(self, step: int, places: Sequence[int]) -> None:
        first: CheckpointError | None = None
        for place in places:
            wanted = StepFetchRequest(place, step, self._near.root.names.name(step))
            done = await self._agent.call(wanted, again=True)
            error = self._error_of(wanted, done)
            if error is None:
                logger.info(
                    "prefetched step %d to %s: %s in %.2f s",
                    step,
                    redact(self._near.storage.location),
                    format_bytes(done.nbytes),
                    done.seconds,
                )
                return
            first = first or error
            if done.outcome == "blocked" or done.errno in _FULL:
                break
        if first is not None:
            raise first

    def _error_of(self, wanted: StepFetchRequest, done: CallResult) -> CheckpointError | None:
        step = wanted.step
        if done.outcome in ("copied", "there"):
            return None
        if done.outcome == "blocked":
            where = redact(f"{self._near.storage.location}/{wanted.step_dir}")
            return StepExistsError(
                f"{where} is another save of this step, or damaged beyond recognition: remove it "
                f"first (ckpt rm). {done.problem}",
                step=step,
            )
        if done.outcome == "damaged":
            return CorruptCheckpointError(done.problem, step=step)
        if done.outcome == "deleted":
            return StepDeletedError(done.problem, step=step)
        advice = ""
        if done.errno in _FULL:
            advice = ". Make room there: unpin what was prefetched before, or keep fewer steps"
        return StorageError(f"{done.problem}{advice}", errno=done.errno, step=step)
