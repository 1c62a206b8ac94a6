"""The steps of all tiers of a run, read like those of one root: each from the nearest tier."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from ckpt._arguments import check_step
from ckpt._conversion.copies.step_location import holds_the_same
from ckpt._engine.restore.step_files import Elsewhere, StepCopy, files_of
from ckpt._engine.verify.report import VerifyReport
from ckpt._format.manifest import JsonValue, Manifest
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import PassedOver
from ckpt._steps.opened import OpenedStep, shortened
from ckpt._steps.reader import StepReader
from ckpt._steps.restore_options import RestoreOptions
from ckpt._steps.service import RootService
from ckpt._steps.step_choice import RunStart
from ckpt._steps.step_metadata import StepMetadata
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ItemDroppedError,
    StepNotFoundError,
    StorageError,
)
from ckpt.keep._questions import Requirement, SavedStep

logger = logging.getLogger("ckpt")

# Number of steps that may go while they are looked for; with more, something else is wrong.
_MOST_GONE = 20

T = TypeVar("T")
# What is done at a place: gets its reader, the step, and what finds other copies of the step.
_Look: TypeAlias = Callable[[StepReader, int, Elsewhere], Awaitable[T]]


class _Place(Struct, frozen=True):
    """A step in a tier.

    Attributes:
        step: The step.
        number: Number of the tier; 0 is the nearest one.
        tier: The tier.
        lacks_files: True if some of its files are missing or too short, so that no list has it.
        is_behind: True if the run went back behind it: its branch was given up.
    """

    step: int
    number: int
    tier: RootService
    lacks_files: bool = False
    is_behind: bool = False


class TieredReader(StepReader):
    """Reads the root, and the tiers that are nearer. Used on the engine's loop."""

    def __init__(
        self, root: RootService, find_tiers: Callable[[], Awaitable[Sequence[RootService]]]
    ) -> None:
        """Read from the tiers that `find_tiers` opens, the nearest first, the root last."""
        super().__init__(root.root, root.engine, root.run.origin)
        self.choice = root.reader.choice
        self._last = root
        self._find_tiers = find_tiers
        # Tiers for which a warning has said that they cannot be listed.
        self._said: set[RootService] = set()

    async def _listed(
        self, look: Callable[[StepReader], Awaitable[Iterable[int]]], *, ranks: bool = True
    ) -> tuple[Sequence[RootService], list[_Place]]:
        """Return the tiers, and the places of steps that `look` finds: newest first, then nearest.

        Without `ranks` the order of the steps does not matter.
        """
        tiers = await self._find_tiers()
        places: list[_Place] = []
        for number, tier in enumerate(tiers):
            try:
                steps = await _agreed(tier, partial(look, tier.reader))
                behind = await _agreed(tier, tier.reader.choice.left_behind) if ranks else ()
                places += [_Place(step, number, tier, is_behind=step in behind) for step in steps]
            except StorageError as error:
                if tier is self._last:
                    raise
                if tier not in self._said:
                    self._said.add(tier)
                    logger.warning("the steps of a tier are left out: %s", error)
        # Steps that the run has left behind come last, in case all others are gone.
        return tiers, sorted(places, key=lambda it: (it.is_behind, -it.step, it.number))

    async def all_steps(self) -> list[int]:
        """Return the steps of all tiers, ascending."""
        _, places = await self._listed(StepReader.all_steps, ranks=False)
        return sorted({place.step for place in places})

    async def latest_step(self, wanted: Requirement | None = None) -> int | None:
        """Return the latest step of all tiers that is as required."""
        _, places = await self._listed(partial(_latest, wanted=wanted))
        return places[0].step if places else None

    async def saved_steps(self) -> dict[int, SavedStep]:
        """Return the steps of all tiers in the form that policies take, ascending."""
        found: dict[int, SavedStep] = {}
        for tier in reversed(await self._find_tiers()):
            found |= await tier.reader.saved_steps()
        return dict(sorted(found.items()))

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of a step, with the tiers that have it."""
        places, found = await self._looked_at(
            step, lambda reader, number, _: reader.metadata(number)
        )
        where = tuple(place.tier.storage.location for place in places)
        return replace(found, info=replace(found.info, tiers=where))

    async def holders(self, step: int | None) -> tuple[int, list[RootService]]:
        """Return a step, or the newest one, and the tiers that have its last save, nearest first.

        Raises:
            StepNotFoundError: There is no such step.
        """
        places = await self._places_of(step, whole=True)
        same = await _saved_last(places)
        return places[0].step, [place.tier for place in places if same.get(place, False)]

    async def verify(
        self,
        step: int | None,
        deep: bool,
        sample: float | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> VerifyReport:
        """Compare a step with its manifest in all tiers that have it.

        Returns:
            The report of the first tier with a problem, or else of the last tier.
        """
        limits = deep, sample, seed, timeout
        if not (await self._listed(_looking_for(step), ranks=False))[1]:
            # A step with a damaged manifest is not listed; the root reports it.
            return await super().verify(step, *limits)
        places, report = await self._looked_at(
            step, lambda reader, number, _: reader.verify(number, *limits), whole=False
        )
        for place in places[1:]:
            if report.ok:
                report = await place.tier.reader.verify(place.step, *limits)
        return report

    async def start_of_run(self, wanted: Requirement | None) -> RunStart:
        """Return the start of the run: from scratch if no tier has a step."""
        tiers, places = await self._listed(_latest)
        for tier in tiers:
            with contextlib.suppress(StorageError):
                tier.reader.choice.pass_over_all(await tier.reader.choice.left_behind())
        if places:
            return RunStart(is_fresh=False)
        # The root looks for anything else that it may hold.
        return await super().start_of_run(wanted)

    async def load(
        self,
        step: int | None,
        options: RestoreOptions,
        caller: CallingThread,
        latest: OpenedStep | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> tuple[int | None, Any]:
        """Load a step from the nearest tier that has it; see `StepReader.load`.

        Damaged parts are read from the farther tiers.
        """
        return await _first_of(
            await self._places_of(step, whole=False),
            lambda reader, number, found: reader.load(number, options, caller, elsewhere=found),
        )

    async def _places_of(self, step: int | None, *, whole: bool) -> list[_Place]:
        """Return the places of a step, or of the newest one: its last save first.

        Args:
            step: The step.
            whole: True to leave out places that lack files of the step.

        Raises:
            StepNotFoundError: There is no such step.
        """
        tiers, places = await self._listed(_looking_for(step), ranks=step is None)
        if not places:
            steps = await self.all_steps()
            if step is not None and steps:
                where = redact(self._storage.location)
                raise StepNotFoundError(
                    f"there is no such step; {where} and its tiers have steps {shortened(steps)}",
                    step=step,
                )
            # The call raises an error that describes the other contents of the root.
            await super().metadata(step)
            raise StepNotFoundError("it was written just now; look again", step=step)
        top = [place for place in places if place.step == places[0].step]
        return await _latest_first(top if whole else _with_damaged(tiers, top))

    async def _looked_at(
        self, step: int | None, look: _Look[T], *, whole: bool = True
    ) -> tuple[list[_Place], T]:
        """Return all places of a step, and the result of `look` at the first one.

        A newer step may replace the newest one meanwhile: then `look` gets the newer one.
        """
        for turn in range(_MOST_GONE):
            places = await self._places_of(step, whole=whole)
            try:
                return places, await _first_of(places, look)
            except StepNotFoundError:
                if step is not None or turn == _MOST_GONE - 1:
                    raise
        raise AssertionError

    async def _newest(
        self, options: RestoreOptions, caller: CallingThread, start: RunStart | None = None
    ) -> tuple[int | None, Any]:
        """Load the newest step, from the nearest tier that has it whole; see `StepReader`.

        A warning names each copy and each step that is passed over.
        """
        wanted, goes_back = options.wanted, start is not None
        look = _latest if wanted is None else StepReader.all_steps
        tried: set[_Place] = set()
        first: Exception | None = None
        top: int | None = None
        gone = 0
        while True:
            tiers, places = await self._listed(look)
            if wanted is not None:
                places = await self._healthy(tiers, places, wanted, goes_back=goes_back)
            left = [place for place in places if place not in tried]
            if top is not None and not options.fallback:
                left = [place for place in left if place.step == top]
            if not left and look is not StepReader.all_steps and (tried or not places):
                # Listing every step takes long in a large root, and is seldom needed.
                look = StepReader.all_steps
                continue
            if not left:
                if first is None:
                    await super().metadata(None)
                    raise StepNotFoundError("a step was written just now; look again")
                raise first
            same = _with_damaged(tiers, [p for p in places if p.step == left[0].step])
            place = (await _latest_first([p for p in same if p not in tried]))[0]
            reader, elsewhere = place.tier.reader, partial(_copies_elsewhere, same, place)
            try:
                return await reader.load(place.step, options, caller, elsewhere=elsewhere)
            except StepNotFoundError as error:
                gone += 1
                first = first or error
                if gone == _MOST_GONE:
                    raise
            except (CorruptCheckpointError, ItemDroppedError, StorageError) as error:
                if isinstance(error, StorageError) and place.tier is self._last:
                    raise
                first = first or error
                top = place.step if top is None else top
                if isinstance(error, CorruptCheckpointError):
                    await reader.choice.pass_over(place.step, error.message)
                _say_next(place, error)
            tried.add(place)
            look = StepReader.all_steps

    async def _healthy(
        self,
        tiers: Sequence[RootService],
        places: Sequence[_Place],
        wanted: Requirement,
        *,
        goes_back: bool,
    ) -> list[_Place]:
        """Return the places of healthy steps; a warning names newer steps that are passed over.

        Raises:
            StepNotFoundError: There are steps, and none is healthy.
        """
        reasons = [await tier.reader.choice.judged(wanted) for tier in tiers]
        healthy = [p for p in places if reasons[p.number].get(p.step, "gone") is None]
        if places and not healthy:
            # The root, or the nearest tier with steps, raises an error with the reasons.
            last = max(places, key=lambda place: place.number)
            await last.tier.reader.choice.step_for_all(wanted, (), goes_back=goes_back)
        newest = healthy[0].step if healthy else -1
        everywhere: dict[int, PassedOver] = {}
        for number, tier in enumerate(tiers):
            passed = {
                step: why
                for step, why in reasons[number].items()
                if why is not None and step > newest
            }
            tier.reader.choice.say_passed(wanted, newest, passed)
            everywhere |= passed
        if goes_back:
            # Tell all tiers: an agent may be writing a step of the memory to the root just now.
            for tier in tiers:
                tier.reader.choice.pass_over_all(everywhere)
        return healthy


async def _agreed(tier: RootService, look: Callable[[], Awaitable[Iterable[int]]]) -> list[int]:
    """Return the steps that `look` finds in a tier, the same in all processes of a job."""

    async def act() -> list[JsonValue]:
        return list(await look())

    found: Any = await tier.root.processes.decided("tiers", "which steps there are", act)
    return [check_step(step) for step in found]


def _damaged(tier: RootService) -> list[int]:
    """Return the steps with missing or too short files, as far as listing a tier has shown.

    None in a job: the processes must not act on what only one of them has seen.
    """
    unreadable = tier.root.index.unreadable
    damaged = [each.step for each in unreadable if each.kind == "damaged"]
    return tier.root.processes.found_here(damaged)


async def _copy_at(place: _Place) -> StepCopy | None:
    """Return a step as another copy of one that is restored elsewhere.

    None if it is none, such as a step of another library.
    """
    storage = place.tier.root.storage
    opened = await place.tier.root.index.found(place.step)
    if opened.foreign is not None:
        return None
    files = files_of(storage, opened.step_dir, opened.manifest)
    return StepCopy(redact(storage.location), opened.manifest, files)


async def _first_of(places: Sequence[_Place], look: _Look[T]) -> T:
    """Return the result of the nearest place; warn about each damaged or missing copy."""
    for place in places:
        try:
            elsewhere = partial(_copies_elsewhere, places, place)
            return await look(place.tier.reader, place.step, elsewhere)
        except (CorruptCheckpointError, StepNotFoundError, StorageError) as error:
            if place is places[-1]:
                raise
            _say_next(place, error)
    raise AssertionError


async def _latest_first(places: list[_Place]) -> list[_Place]:
    """Return the places of a step: first those of its last save, the nearest first.

    One of the places may have another save of the step, with other contents.
    """
    if len(places) < 2:
        return places
    is_last = await _saved_last(places)
    left = [place for place in places if is_last.get(place, False) or not place.lacks_files]
    return sorted(left, key=lambda place: not is_last.get(place, False))


async def _saved_last(places: Sequence[_Place]) -> Mapping[_Place, bool]:
    """Return, for the places that can be read, True if they have the last save of the step."""
    found: dict[_Place, Manifest] = {}
    for place in places:
        # An error is raised when the step is read.
        with contextlib.suppress(CheckpointError):
            found[place] = (await place.tier.root.processes.steps.found(place.step)).manifest
    if not found:
        return {}
    last = max(found.values(), key=lambda manifest: manifest.created_ns)
    return {
        place: await run_in_thread(holds_the_same, last, manifest)
        for place, manifest in found.items()
    }


def _with_damaged(tiers: Sequence[RootService], places: Sequence[_Place]) -> list[_Place]:
    """Return the places of a step, and those that lack some of its files, the nearest first."""
    step, known = places[0].step, {place.number for place in places}
    damaged = [
        _Place(step, number, tier, lacks_files=True)
        for number, tier in enumerate(tiers)
        if number not in known and step in _damaged(tier)
    ]
    return sorted([*places, *damaged], key=lambda place: place.number)


async def _copies_elsewhere(
    places: Sequence[_Place], own: _Place, manifest: Manifest
) -> list[StepCopy]:
    """Return the copies of a step in other places than its own, the nearest first."""
    found = []
    for place in sorted(places, key=lambda place: place.number):
        if place == own:
            continue
        # Leave out a copy that cannot be read.
        with contextlib.suppress(CheckpointError):
            copy = await _copy_at(place)
            if copy is not None and await run_in_thread(holds_the_same, manifest, copy.manifest):
                found.append(copy)
    return found


def _looking_for(step: int | None) -> Callable[[StepReader], Awaitable[Iterable[int]]]:
    return StepReader.all_steps if step is None else partial(_step_if_there, step=check_step(step))


async def _latest(reader: StepReader, *, wanted: Requirement | None = None) -> list[int]:
    step = await reader.latest_step(wanted)
    return [] if step is None else [step]


async def _step_if_there(reader: StepReader, *, step: int) -> list[int]:
    return [step] if step in await reader.all_steps() else []


def _say_next(place: _Place, error: Exception) -> None:
    logger.warning(
        "step %d of %s is passed over for the next place or step: %s",
        place.step,
        redact(place.tier.storage.location),
        error,
    )
