"""`TierDrains`: which steps of the tiers are copied on, and what has become of them.

The trainer decides, since policies are functions of Python; its keeper copies, and tells. In a job
the primary decides for all, and each keeper copies the part of its process. The retention of a tier
leaves what still is to be copied on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ckpt._arguments import check_step
from ckpt._commit import Commit, StepInfo, arrived, stays
from ckpt._events import EventRecorder, Outcome
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.service import RootService
from ckpt._tiers.drains.drain import missing
from ckpt._tiers.keeper.client import KeeperClient
from ckpt._tiers.keeper.messages import Closed, Held, Moved, Step, ToKeeper, Told
from ckpt._tiers.settings import PART_FOLDER, Tier
from ckpt._tree.table import size_text
from ckpt.errors import CheckpointError
from ckpt.policies._context import SavedStep
from ckpt.policies._save_policies import refusal_of
from ckpt.storage._local.storage import LocalStorage

logger = logging.getLogger("ckpt")


class TierDrains:
    """The copies of steps from tier to tier. Its coroutines run on the engine's loop."""

    def __init__(
        self, tiers: Sequence[tuple[RootService, Tier]], root: RootService, keeper: KeeperClient
    ) -> None:
        """Copy steps of `tiers`, the nearest first, on to the next, and in the end to `root`."""
        self._services = [service for service, _ in tiers]
        self._settings = [tier for _, tier in tiers]
        self._targets = [*self._services[1:], root]
        self._root = root
        self._keeper = keeper
        self._guard = threading.Lock()
        # By tier, steps that the keeper has been told of, and has not copied yet.
        self._told: list[dict[int, Step]] = [{} for _ in tiers]
        # By tier, steps that its retention must leave, and that the keeper does not hold yet.
        self._unheld: list[set[int]] = [set() for _ in tiers]
        # By tier, steps that were given up. They stay until its next save, or for the next run.
        self._failed: list[set[int]] = [set() for _ in tiers]
        # By step, the commits that wait for the root.
        self._commits: dict[int, list[Commit]] = {}
        # By tier, the steps that were copied on, or will be: what its policy is told.
        self._previous: list[dict[int, SavedStep]] = [{} for _ in tiers]
        # By tier, the greatest step that the next place has had.
        self._newest: list[int | None] = [None] * len(tiers)
        # Whether steps have arrived since the loop was closed.
        self.is_untidy: bool = False
        # What the keeper has not copied in the end, also of steps that only then were to go on.
        self._left: tuple[int, ...] = ()
        for link, service in enumerate(self._services):
            service.root.retention.spared = partial(self._waiting, link)

    async def open(self) -> None:
        """Tell the keeper what earlier runs have left to be copied."""
        await run_in_thread(self._keeper.start)
        for service in self._services:
            await run_in_thread(_say_parts_of_others, service)
        for link, (service, target) in enumerate(zip(self._services, self._targets, strict=True)):
            self._previous[link] = await target.reader.saved_steps()
            self._newest[link] = max(self._previous[link], default=None)
            what = f"looking for steps that are not in {redact(target.storage.location)}"
            act = partial(self._left_by_others, link)
            found = await service.root.processes.on_primary("drains", link, what, act)
            # The newest first, but for what only counts in the end.
            for number, wanted, save in reversed(found):
                self._keeper.tell(self._noted(link, number, save, wanted=wanted))

    async def _left_by_others(self, link: int) -> list[tuple[int, bool, str]]:
        """Return the steps that the next place lacks, ascending.

        With each comes whether it is to have it, and the save that it is of.
        """
        service, target = self._services[link], self._targets[link]
        left = await missing(service.storage, target.storage, None, service.root.names)
        if left and target is not self._root:
            # What was prefetched from the root is there, and is not copied to tiers between.
            left = await missing(service.storage, self._root.storage, left, service.root.names)
        here = await service.root.index.refresh()
        new = {step: here[step] for step in sorted(left) if step in here}
        there = await target.root.index.refresh()
        # What the next place has deleted is not brought back.
        gone = target.root.retention.would_delete(dict(sorted((there | new).items())))
        found = {step: each for step, each in new.items() if step not in gone}
        steps = await service.root.retention.saved_steps(found)
        return [
            (each.step, await self._is_wanted(link, each), found[each.step].save) for each in steps
        ]

    async def _is_wanted(self, link: int, saved: SavedStep) -> bool:
        """Ask the policy whether a step is copied on."""
        drain = self._settings[link].drain
        if drain is not None:
            previous = [each for _, each in sorted(self._previous[link].items())]
            context = self._services[link].saves.history.context(saved.step)
            if await run_in_thread(refusal_of, drain, saved.step, previous, context) is not None:
                return False
        self._previous[link][saved.step] = saved
        return True

    def _noted(self, link: int, number: int, save: str, *, wanted: bool) -> Step:
        """Return what the keeper is told of a step, which from then on is on its way."""
        step = Step(link, number, self._services[link].root.names.name(number), wanted, save)
        with self._guard:
            self._failed[link].clear()
            if wanted:
                self._unheld[link].add(number)
            told = self._told[link]
            told[number] = step
            # Of those that stay, only the newest matters in the end.
            for other in [n for n, each in told.items() if not each.is_wanted and n < number]:
                del told[other]
        return step

    def committed(self, info: StepInfo, commit: Commit) -> None:
        """Note who waits until a step is in the root.

        Before the commit is done: if this process dies right then, the keeper knows of the step.
        """
        if info.step is not None:
            with self._guard:
                self._commits.setdefault(info.step, []).append(commit)
                self._unheld[0].add(info.step)
            step_dir = self._services[0].root.names.name(info.step)
            self._keeper.tell(Step(0, info.step, step_dir, is_wanted=False))

    async def send_on(self, link: int, number: int) -> None:
        """Have a step of a tier copied on, if the policy wants that; before the tier is tidied.

        The primary of a job decides. The step stays until the keeper holds it.

        Raises:
            CheckpointError: It could not be decided.
        """
        service = self._services[link]

        async def decide() -> tuple[bool, str] | None:
            found = (await service.root.index.refresh()).get(number)
            if found is None:
                # It was deleted meanwhile.
                return None
            (saved,) = await service.root.retention.saved_steps({number: found})
            return await self._is_wanted(link, saved), found.save

        what = f"deciding where step {number} is copied to"
        decided = await service.root.processes.on_primary(f"drain-{link}", number, what, decide)
        if decided is None:
            with self._guard:
                self._unheld[link].discard(number)
            return
        wanted, save = decided
        await run_in_thread(self._keeper.start)
        self._keeper.tell(self._noted(link, number, save, wanted=wanted))
        if not wanted:
            self._say_refused(link, number)

    def _waiting(self, link: int) -> set[int]:
        """Return the steps that the next place is to have; called by the retention.

        Not all of them are held: the keeper may not have heard of one, or may have ended. Those of
        saves under way are among them: a step is there before its save knows that.
        """
        with self._guard:
            told, service = self._told[link], self._services[link]
            # Of those that stay, the newest goes on in the end.
            going = {n for n, each in told.items() if each.is_wanted or n == max(told)}
            return going.union(
                self._unheld[link], self._failed[link], self._left, service.saves.joined
            )

    def _say_refused(self, link: int, number: int) -> None:
        """End the wait for a step that stays where it is."""
        with self._guard:
            self._unheld[link].discard(number)
            commits = self._commits.pop(number, [])
        for commit in commits:
            stays(commit, "the policy drain= of its tier does not want it there")

    def undecided(self, number: int, error: CheckpointError) -> None:
        """End the wait for a step of the nearest tier of which it could not be decided."""
        with self._guard:
            commits = self._commits.pop(number, [])
        for commit in commits:
            stays(commit, f"{error.message}. The next run decides again")

    def greeting(self) -> list[ToKeeper]:
        """Return what a new keeper has to know: the steps that are not copied yet."""
        with self._guard:
            return [step for told in self._told for _, step in sorted(told.items(), reverse=True)]

    def heard(self, message: Told) -> None:
        """Take what the keeper says; called in a thread."""
        if isinstance(message, Held):
            with self._guard:
                self._unheld[message.link].discard(message.step)
        elif isinstance(message, Closed):
            self._left = message.left
        elif isinstance(message, Moved):
            self._moved(message)

    def _moved(self, message: Moved) -> None:
        link, target = message.link, self._targets[message.link]
        is_last = link == len(self._targets) - 1
        if message.is_damaged:
            # First: who hears of it may save at once.
            with contextlib.suppress(CheckpointError):
                target.loop.submit(partial(self._distrust, link, message.step)).future.result()
        with self._guard:
            self._told[link].pop(message.step, None)
            self._unheld[link].discard(message.step)
            if not is_last and not message.problem:
                self._unheld[link + 1].add(message.step)
            ends = is_last or bool(message.problem)
            commits = self._commits.pop(message.step, []) if ends else []
            if message.problem:
                self._failed[link].add(message.step)
                self._previous[link].pop(message.step, None)
            else:
                self._newest[link] = max(message.step, self._newest[link] or 0)
        self._report(message)
        for commit in commits:
            if message.problem:
                stays(commit, message.problem)
            else:
                arrived(commit)
        if message.problem:
            return
        try:
            target.loop.submit(partial(self._arrived, link, message.step))
        except CheckpointError:
            # The manager is closing, and tidies then.
            self.is_untidy = True

    def _report(self, message: Moved) -> None:
        """Say what has become of a copy, and tell observers of it."""
        source, target = self._services[message.link], self._targets[message.link]
        where, newest = redact(target.storage.location), self._newest[message.link]
        outcome: Outcome = "ok"
        if message.problem:
            outcome = "failed"
            logger.log(
                # What somebody has deleted is no news.
                logging.WARNING if message.is_gone else logging.ERROR,
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
            size, seconds = size_text(message.nbytes), message.seconds
            logger.info("copied step %d to %s: %s in %.2f s", message.step, where, size, seconds)
        recorder = EventRecorder("drain", message.step, self._root.engine.observers)
        began_ns = time.perf_counter_ns() - int(message.seconds * 1e9)
        reason = message.problem or None
        end = partial(recorder.end, began_ns, outcome, nbytes=message.nbytes, reason=reason)

        async def on_loop() -> None:
            end()

        try:
            target.loop.submit(on_loop)
        except CheckpointError:
            # The manager is closing, and nothing more is told there.
            end()

    async def _arrived(self, link: int, number: int) -> None:
        """A step is at the next place: it may go on from there, and both may be tidied."""
        if link + 1 < len(self._services):
            await self.send_on(link + 1, number)
        for each in (self._targets[link], self._services[link]):
            if each.tidies_alone:
                await each.root.preserve(check_step(number))

    async def _distrust(self, link: int, number: int) -> None:
        """Have saves share no file of a step that its tier has damaged."""
        service = self._services[link]
        # Where its manifest is damaged, its data files may be whole.
        with contextlib.suppress(CheckpointError):
            service.reader.distrust((await service.root.index.found(number)).manifest)

    def given_up(self) -> list[int]:
        """Return the steps that were not copied on, and tell those that wait for them."""
        with self._guard:
            waiting = {s for told in self._told for s, step in told.items() if step.is_wanted}
            left = sorted(waiting.union(self._left))
            commits = [each for several in self._commits.values() for each in several]
            self._commits.clear()
        for commit in commits:
            stays(commit, "the run has ended before it was copied; the next one goes on with it")
        return left


def _say_parts_of_others(service: RootService) -> None:
    """Name the steps at a tier that only a job of another size can have in the root. Blocks."""
    processes = service.root.processes
    if processes.process or not isinstance(service.storage, LocalStorage):
        return
    own = Path(service.storage.location)
    top = own if processes.count == 1 else own.parent
    counts: set[int] = set()
    for path in top.glob("process_*-of-*"):
        match = PART_FOLDER.fullmatch(path.name)
        # What cannot be listed is not read by this job, either.
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
