"""The steps of all tiers of a run, read as if they were in one root: each from the nearest one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from msgspec import Struct

from ckpt._arguments import check_step, one_of, true_or_false
from ckpt._conversion.copies.place import holds_the_same
from ckpt._engine.restore.step_files import StepCopy
from ckpt._engine.verify.report import VerifyReport
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory, VerifyMode, checks_devices
from ckpt._steps.index import PassedOver
from ckpt._steps.reader import Elsewhere, StepReader, check_one_step, rank
from ckpt._steps.restores.step_choice import RunStart
from ckpt._steps.step_metadata import StepMetadata
from ckpt._steps.unreadable import shortened
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ItemDroppedError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
)
from ckpt.policies._context import SavedStep
from ckpt.policies._health import Healthy, check_healthy
from ckpt.policies._ranking import Metric, Mode
from ckpt.storage._resolve import PathLike

logger = logging.getLogger("ckpt")

# Steps that come and go while they are looked for: then something else is wrong.
_MOST_GONE = 20

_Load = Callable[[StepReader, int, Elsewhere], Awaitable[tuple[int | None, Any]]]


class TierSteps(Struct, frozen=True):
    """A tier, as it is read.

    Attributes:
        location: Where it is.
        reader: Reads its steps.
        may_fail: Whether the run goes on without it where it cannot be listed.
    """

    location: str
    reader: StepReader
    may_fail: bool


class _Place(Struct, frozen=True):
    """A step in a tier.

    Attributes:
        step: The step.
        number: The number of the tier; 0 is the nearest one.
        lacks_files: Whether files of it are missing or too short, so that it is in no list.
        is_behind: Whether the run went back behind it, and this is of a branch that was given up.
    """

    step: int
    number: int
    lacks_files: bool = False
    is_behind: bool = False


class TieredReader:
    """Reads what `StepReader` reads, from several tiers. Used on the engine's loop."""

    def __init__(self, find_tiers: Callable[[], Awaitable[Sequence[TierSteps]]]) -> None:
        """Read from the tiers that `find_tiers` opens, the nearest first, the root last."""
        self._find_tiers = find_tiers
        # What was said of tiers that cannot be listed.
        self._said: set[str] = set()

    async def _listed(
        self, look: Callable[[StepReader], Awaitable[Iterable[int]]], *, ranks: bool = True
    ) -> tuple[Sequence[TierSteps], list[_Place]]:
        """Return the tiers, and where `look` finds steps: the newest first, then the nearest.

        Without `ranks` it does not matter which of the steps is the newest.
        """
        tiers = await self._find_tiers()
        places: list[_Place] = []
        for number, tier in enumerate(tiers):
            try:
                steps = await tier.reader.agreed(partial(look, tier.reader))
                behind = await tier.reader.agreed(tier.reader.choice.left_behind) if ranks else ()
                places += [_Place(step, number, is_behind=step in behind) for step in steps]
            except StorageError as error:
                if not tier.may_fail:
                    raise
                if tier.location not in self._said:
                    self._said.add(tier.location)
                    logger.warning("the steps of a tier are left out: %s", error)
        # What the run has left behind comes last, in case all others are gone.
        return tiers, sorted(places, key=lambda it: (it.is_behind, -it.step, it.number))

    async def all_steps(self) -> list[int]:
        """Return the steps of all tiers, ascending."""
        _, places = await self._listed(StepReader.all_steps, ranks=False)
        return sorted({place.step for place in places})

    async def latest_step(self, healthy: bool | Healthy = False) -> int | None:
        """Return the latest step of all tiers, or the latest healthy one."""
        _, places = await self._listed(partial(_latest, healthy=healthy))
        return places[0].step if places else None

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, of all tiers."""
        found: dict[int, SavedStep] = {}
        tiers, _ = await self._listed(_no_steps, ranks=False)
        for tier in reversed(tiers):
            found |= await tier.reader.saved_steps()
        steps = [found[step] for step in sorted(found)]
        return await run_in_thread(rank, steps, metric, mode, tiers[-1].reader.ranking)

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of a step, with the tiers that have it."""
        tiers, places, found = await self._looked_at(
            step, lambda reader, number, _: reader.metadata(number)
        )
        where = tuple(tiers[place.number].location for place in places)
        assert isinstance(found, StepMetadata)
        return replace(found, info=replace(found.info, tiers=where))

    async def holders(self, step: int | None) -> tuple[int, list[int]]:
        """Return a step, or the newest one, and the places that have it as it was saved last.

        Returns:
            The step, and how far from the end of all places those are, the nearest first: -1 is
            the root.

        Raises:
            StepNotFoundError: There is no such step.
        """
        tiers, places = await self._places_of(step, whole=True)
        same = await _saved_last(tiers, places)
        found = [place.number - len(tiers) for place in places if same.get(place, False)]
        return places[0].step, found

    async def verify(
        self,
        step: int | None,
        deep: bool,
        sample: float | None = None,
        seed: int | None = None,
        deadline: float | None = None,
    ) -> VerifyReport:
        """Compare a step with its manifest in all tiers that have it.

        Returns:
            The report of the first tier where something is wrong, or else of the last one.
        """
        limits = deep, sample, seed, deadline
        tiers, places = await self._listed(_looking_for(step), ranks=False)
        if not places:
            # One whose manifest is damaged is not listed, and the root reports that.
            return await tiers[-1].reader.verify(step, *limits)

        async def look(reader: StepReader, number: int, _: object = None) -> VerifyReport:
            report = await reader.verify(number, *limits)
            if not report.ok:
                raise _Damaged(report)
            return report

        try:
            tiers, places, report = await self._looked_at(step, look, whole=False)
            for place in places[1:]:
                report = await look(tiers[place.number].reader, place.step)
        except _Damaged as found:
            report = found.report
        assert isinstance(report, VerifyReport)
        return report

    async def start_of_run(self, healthy: bool | Healthy) -> RunStart:
        """Return whether a run begins here: no tier has a step."""
        check_healthy(healthy)
        tiers, places = await self._listed(partial(_latest, healthy=False))
        for tier in tiers:
            with contextlib.suppress(StorageError):
                tier.reader.choice.pass_over_all(await tier.reader.choice.left_behind())
        if places:
            return RunStart(is_fresh=False)
        # The root says what else is in it.
        return await tiers[-1].reader.start_of_run(healthy)

    async def begin_from(
        self,
        source: PathLike,
        target: Any,
        named: bool,
        adapt: Adapt | Mapping[str, Adapt] | None,
    ) -> Any:
        """Return what a checkpoint of another run holds, which this run begins from."""
        tiers = await self._find_tiers()
        return await tiers[-1].reader.begin_from(source, target, named, adapt)

    async def resume(
        self,
        start: RunStart,
        target: Any,
        named: bool,
        adapt: Adapt | Mapping[str, Adapt] | None,
        fallback: bool,
        healthy: bool | Healthy,
        caller: CallingThread,
    ) -> tuple[int, Any]:
        """Return the step after the newest one, and what that one holds."""
        true_or_false("fallback", fallback)

        async def load(
            reader: StepReader, step: int, elsewhere: Elsewhere
        ) -> tuple[int | None, Any]:
            like, items = (None, target) if named else (target, None)
            return await reader.load(
                step, like, items, None, adapt, None, caller, elsewhere=elsewhere
            )

        wanted = check_healthy(healthy)
        step, found = await self._newest(load, fallback, wanted, goes_back=True)
        return check_step(step) + 1, found

    async def restore(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        at: str | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
        broadcast_bytes: int | None,
        fallback: bool,
        healthy: bool | Healthy,
        memory: ArrayMemory,
        verify: VerifyMode | None,
        caller: CallingThread,
    ) -> Any:
        """Load a step from the nearest tier that has it; see `StepReader.restore`.

        What is damaged there is read from the next ones.
        """
        true_or_false("fallback", fallback)
        wanted = check_healthy(healthy)
        one_of("memory", memory, get_args(ArrayMemory))
        is_checked = checks_devices(verify)
        items = list(items) if isinstance(items, Iterator) else items

        async def load(
            reader: StepReader, number: int, elsewhere: Elsewhere
        ) -> tuple[int | None, Any]:
            return await reader.load(
                number,
                like,
                items,
                at,
                adapt,
                broadcast_bytes,
                caller,
                memory,
                is_checked,
                elsewhere=elsewhere,
            )

        if step is None:
            return (await self._newest(load, fallback, wanted))[1]
        step = check_one_step(step, fallback, wanted)
        tiers, places = await self._places_of(step, whole=False)
        return (await self._first_of(tiers, places, load))[1]

    async def _places_of(
        self, step: int | None, *, whole: bool
    ) -> tuple[Sequence[TierSteps], list[_Place]]:
        """Return the tiers, and where a step, or the newest one, is: what was saved last first.

        Args:
            step: The step.
            whole: Whether places are left out that lack files of it.

        Raises:
            StepNotFoundError: There is no such step.
        """
        tiers, places = await self._listed(_looking_for(step), ranks=step is None)
        if not places:
            steps = await self.all_steps()
            if step is not None and steps:
                where = redact(tiers[-1].location)
                raise StepNotFoundError(
                    f"there is no such step; {where} and its tiers have steps {shortened(steps)}",
                    step=step,
                )
            # Says what else the root has.
            await tiers[-1].reader.metadata(step)
            raise StepNotFoundError("it was written just now; look again", step=step)
        top = [place for place in places if place.step == places[0].step]
        return tiers, await _latest_first(tiers, top if whole else _with_damaged(tiers, top))

    async def _looked_at(
        self,
        step: int | None,
        look: Callable[[StepReader, int, Elsewhere], Awaitable[Any]],
        *,
        whole: bool = True,
    ) -> tuple[Sequence[TierSteps], list[_Place], Any]:
        """Return what `look` finds at the first place of a step, with all places of it.

        The newest step of all may be replaced by a newer one meanwhile: then that is looked at.
        """
        for turn in range(_MOST_GONE):
            tiers, places = await self._places_of(step, whole=whole)
            try:
                return tiers, places, await self._first_of(tiers, places, look)
            except StepNotFoundError:
                if step is not None or turn == _MOST_GONE - 1:
                    raise
        raise AssertionError

    async def _first_of(
        self, tiers: Sequence[TierSteps], places: Sequence[_Place], load: Callable[..., Any]
    ) -> Any:
        """Return what the nearest place gives; one that is damaged or gone is named."""
        for place in places[:-1]:
            elsewhere = partial(_copies, tiers, places, place)
            try:
                return await load(tiers[place.number].reader, place.step, elsewhere)
            except (CorruptCheckpointError, StepNotFoundError, StorageError) as error:
                _say_next(place, tiers, error)
        last = places[-1]
        elsewhere = partial(_copies, tiers, places, last)
        return await load(tiers[last.number].reader, last.step, elsewhere)

    async def _newest(
        self, load: _Load, fallback: bool, wanted: Healthy | None, *, goes_back: bool = False
    ) -> tuple[int | None, Any]:
        """Load the newest step, from the nearest tier that has it whole; see `StepReader`.

        Each copy and each step that is passed over is named in a warning.
        """
        look = partial(_latest, healthy=False) if wanted is None else StepReader.all_steps
        tried: set[_Place] = set()
        first: Exception | None = None
        top: int | None = None
        gone = 0
        while True:
            tiers, places = await self._listed(look)
            if wanted is not None:
                places = await self._healthy(tiers, places, wanted, goes_back=goes_back)
            left = [place for place in places if place not in tried]
            if top is not None and not fallback:
                left = [place for place in left if place.step == top]
            if not left and look is not StepReader.all_steps and (tried or not places):
                # Listing every step takes long in a large root, and is seldom needed.
                look = StepReader.all_steps
                continue
            if not left:
                if first is None:
                    await tiers[-1].reader.metadata(None)
                    raise StepNotFoundError("a step was written just now; look again")
                raise first
            same = _with_damaged(tiers, [p for p in places if p.step == left[0].step])
            place = (await _latest_first(tiers, [p for p in same if p not in tried]))[0]
            reader = tiers[place.number].reader
            try:
                return await load(reader, place.step, partial(_copies, tiers, same, place))
            except (StepDeletedError, StepNotFoundError) as error:
                gone += 1
                first = first or error
                if gone == _MOST_GONE:
                    raise
            except (CorruptCheckpointError, ItemDroppedError, StorageError) as error:
                if isinstance(error, StorageError) and not tiers[place.number].may_fail:
                    raise
                first = first or error
                top = place.step if top is None else top
                if isinstance(error, CorruptCheckpointError):
                    await reader.choice.pass_over(place.step, error.message)
                _say_next(place, tiers, error)
            tried.add(place)
            look = StepReader.all_steps

    async def _healthy(
        self,
        tiers: Sequence[TierSteps],
        places: Sequence[_Place],
        wanted: Healthy,
        *,
        goes_back: bool,
    ) -> list[_Place]:
        """Return the places of healthy steps; newer ones are passed over, and named.

        Raises:
            StepNotFoundError: There are steps, and none is healthy.
        """
        reasons = [await tier.reader.choice.judged(wanted) for tier in tiers]
        healthy = [p for p in places if reasons[p.number].get(p.step, "gone") is None]
        if places and not healthy:
            # The root, or the nearest tier with steps, says what is wrong with them.
            number = max(place.number for place in places)
            await tiers[number].reader.choice.step_for_all(wanted, (), goes_back=goes_back)
        newest = healthy[0].step if healthy else -1
        everywhere: dict[int, PassedOver] = {}
        for number, tier in enumerate(tiers):
            passed = {
                step: why
                for step, why in reasons[number].items()
                if why is not None and step > newest
            }
            tier.reader.choice.say_passed(newest, passed)
            everywhere |= passed
        if goes_back:
            # A keeper may be writing one of memory to the root just now.
            for tier in tiers:
                tier.reader.choice.pass_over_all(everywhere)
        return healthy


class _Damaged(Exception):
    """Ends the look at further places of a step."""

    def __init__(self, report: VerifyReport) -> None:
        self.report = report


async def _latest_first(tiers: Sequence[TierSteps], places: list[_Place]) -> list[_Place]:
    """Return the places of a step: first those of what was saved last, the nearest first.

    A step may have been saved anew in one of them, with other contents.
    """
    if len(places) < 2:
        return places
    is_last = await _saved_last(tiers, places)
    left = [place for place in places if is_last.get(place, False) or not place.lacks_files]
    return sorted(left, key=lambda place: not is_last.get(place, False))


async def _saved_last(
    tiers: Sequence[TierSteps], places: Sequence[_Place]
) -> Mapping[_Place, bool]:
    """Return whether the places of a step have it as it was saved last, where that is known."""
    found: dict[_Place, Manifest] = {}
    for place in places:
        # What is wrong with it is said when it is read.
        with contextlib.suppress(CheckpointError):
            found[place] = await tiers[place.number].reader.manifest(place.step)
    if not found:
        return {}
    last = max(found.values(), key=lambda manifest: manifest.created_ns)
    return {
        place: await run_in_thread(holds_the_same, last, manifest)
        for place, manifest in found.items()
    }


def _with_damaged(tiers: Sequence[TierSteps], places: Sequence[_Place]) -> list[_Place]:
    """Return the places of a step with those that lack some of its files, the nearest first."""
    step, known = places[0].step, {place.number for place in places}
    damaged = [
        _Place(step, number, lacks_files=True)
        for number, tier in enumerate(tiers)
        if number not in known and step in tier.reader.damaged
    ]
    return sorted([*places, *damaged], key=lambda place: place.number)


async def _copies(
    tiers: Sequence[TierSteps], places: Sequence[_Place], own: _Place, manifest: Manifest
) -> list[StepCopy]:
    """Return the copies of a step in other places than its own, the nearest first."""
    found = []
    for place in sorted(places, key=lambda place: place.number):
        if place == own:
            continue
        # One that cannot be read either is no help.
        with contextlib.suppress(CheckpointError):
            copy = await tiers[place.number].reader.copy(place.step)
            if copy is not None and await run_in_thread(holds_the_same, manifest, copy.manifest):
                found.append(copy)
    return found


def _looking_for(step: int | None) -> Callable[[StepReader], Awaitable[Iterable[int]]]:
    return StepReader.all_steps if step is None else partial(_one, step=check_step(step))


async def _latest(reader: StepReader, *, healthy: bool | Healthy) -> list[int]:
    step = await reader.latest_step(healthy)
    return [] if step is None else [step]


async def _one(reader: StepReader, *, step: int) -> list[int]:
    return [step] if step in await reader.all_steps() else []


async def _no_steps(reader: StepReader) -> list[int]:
    return []


def _say_next(place: _Place, tiers: Sequence[TierSteps], error: Exception) -> None:
    logger.warning(
        "step %d of %s is passed over for the next place or step: %s",
        place.step,
        redact(tiers[place.number].location),
        error,
    )
