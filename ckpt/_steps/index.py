"""`StepIndex`: the committed steps of a root, for lists, lookups and policies.

The index remembers each manifest for as long as its file stays the same, which the store shows
without a read of the file. The store is asked every time, so the index misses no change by others:
with 10,000 steps the first look takes about 0.2 s, and every later one 0.06 s.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from msgspec import Struct

from ckpt._arguments import check_step
from ckpt._format.manifest_head import (
    FILE_NAME,
    HEAD_BYTES,
    MAX_BYTES,
    WENT_BACK_NOTE,
    Aside,
    DroppedItem,
    Summary,
    flat_metrics,
    grouped_metrics,
    left_behind,
    peek,
)
from ckpt._format.step_files import UNFINISHED, is_item_name
from ckpt._redaction import redact
from ckpt._steps.opened import (
    OpenedStep,
    UnreadableStep,
    described,
    look_closely,
    open_step,
    shortened,
)
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepNotFoundError,
    StorageError,
)
from ckpt.keep._questions import LeafNotes, notes_in
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

T = TypeVar("T")
# The meaning of a root that does not exist.
MissingRoot = Literal["error", "empty", "awaited"]
_PLAIN = Standard()
# The largest number of directories that are no steps to be described: each takes a few reads.
_MOST_CLOSE_LOOKS = 24
# The largest number of files of a step to be checked: its largest files, whose copy takes longest.
_MOST_FILES = 256
# Marks the stamps of steps that another library wrote.
_FOREIGN = "foreign"
_BEHIND = (
    "%s: step %d is the latest, because the run went back. It left steps %s behind: restore one by "
    "its number to take it up again"
)
# Errors that are about one step, not about the whole root.
_FORBIDDEN = (errno.EACCES, errno.EPERM)


class IndexedStep(Struct, frozen=True):
    """A committed step, as its manifest describes it.

    Attributes:
        step: The step.
        step_dir: Name of its directory.
        attempt: Random id of the attempt that wrote it.
        created_ns: Time at which its save began, in Unix nanoseconds.
        committed_ns: Time of its commit, in Unix nanoseconds.
        metrics: Its metrics by name, or None.
        save: See `Manifest`.
        stored_bytes: Bytes of its files with the manifest; None for a step of another library.
        library: The other library that wrote it, `orbax` or `flax`; empty for this one.
        notes: What extensions have noted about its leaves, without their names.
        left_behind: See `Manifest`.
        items: Names of its items; empty if they are unknown.
        dropped: The items that were taken out of it after its commit.
        groups: See `SavedStep`.
    """

    step: int
    step_dir: str
    attempt: str
    created_ns: int
    committed_ns: int
    metrics: Mapping[str, float] | None
    save: str = ""
    stored_bytes: int | None = None
    library: str = ""
    notes: LeafNotes = LeafNotes()
    left_behind: Sequence[int] = ()
    items: tuple[str, ...] = ()
    dropped: tuple[DroppedItem, ...] = ()
    groups: Mapping[str, Any] | None = None

    @property
    def is_foreign(self) -> bool:
        return bool(self.library)


class PassedOver(Struct, frozen=True):
    """A step that a restore has passed over, though its manifest is whole.

    Attributes:
        attempt: The attempt that wrote it; a step of another attempt may be whole.
        reason: The fault of the step.
        state: `damaged`; `abandoned` if the run had gone back behind it; or the opposite of what
            steps were required to be. A save of the same number moves it to a folder of this name.
    """

    attempt: str
    reason: str
    state: Aside = "damaged"


class StepIndex:
    """The committed steps of one root. Its coroutines run on one event loop.

    Attributes:
        passed_over: Steps that a restore has passed over; a save of the same number replaces them.
        begun: Names of directories that Orbax has not finished, or is writing.
        elsewhere: What a root without steps holds, for people; None before anybody has looked.
        storage: The root.
        names: Naming of the step directories.
        places: All places of the run, with or without this one.
        went_back: True if the run is known to have gone back, in any of them.
    """

    def __init__(
        self,
        storage: Storage,
        names: StepNames = _PLAIN,
        *,
        missing: MissingRoot = "error",
        places: Collection[StepIndex] = (),
    ) -> None:
        """Make an index of the steps in `storage`.

        Args:
            storage: The root.
            names: Naming of the step directories.
            missing: Meaning of a root that does not exist: an error, a root without steps (with one
                warning), or a root that will be created.
            places: See the attributes.
        """
        self.storage = storage
        self.names = names
        self._missing = missing
        self._known: dict[str, tuple[Hashable, IndexedStep | None]] = {}
        # Directories that are named like steps and cannot be read as steps, by name; each gets one
        # warning.
        self._unreadable: dict[str, UnreadableStep | None] = {}
        # Reasons for which the storage refused to read step directories, by name.
        self._refused: dict[str, str] = {}
        # The last list of steps, by name.
        self._listed: dict[str, int] = {}
        self.passed_over: dict[int, PassedOver] = {}
        self.begun: list[str] = []
        self.elsewhere: str | None = None
        self.places = places
        self._is_missing = False
        self.went_back: bool = False
        self._said_behind: set[int] = set()

    @property
    def unreadable(self) -> list[UnreadableStep]:
        """Known directories that are named like steps and cannot be read as steps."""
        return [each for each in self._unreadable.values() if each is not None]

    @property
    def unfinished(self) -> list[str]:
        """Names of directories that Orbax seems not to have finished, as far as known."""
        left = [name for name, each in self._unreadable.items() if each and each.kind == "orbax"]
        return self.begun + left

    @property
    def known(self) -> list[int]:
        """The committed steps that were seen so far, ascending; does not look for others."""
        found = (each for _, each in self._known.copy().values())
        return sorted({each.step for each in found if each is not None})

    @property
    def greatest(self) -> int:
        """The greatest step that was seen so far, even a damaged one; -1 if there is none."""
        return max([*self._listed.values(), *self.known], default=-1)

    @property
    def location(self) -> str:
        """Path of the root, for messages."""
        return self.storage.location

    def forget(self) -> None:
        """Forget every manifest, so that the next look reads it again."""
        self._known.clear()

    async def overview(self) -> tuple[int, int | None]:
        """Return the number of steps and the greatest step; reads few manifests."""
        latest = await self.latest()
        if latest is None:
            return 0, None
        steps = {step for name, step in self._listed.items() if name not in self._unreadable}
        return len(steps), latest.step

    async def refresh(self) -> dict[int, IndexedStep]:
        """Return the committed steps, ascending; warns once about each directory left out."""
        found: dict[int, IndexedStep] = {}
        left_out: list[str] = []

        async def look(candidates: Sequence[str]) -> bool | None:
            found.clear()
            looked = await self.looked_at(candidates)
            left_out[:] = [
                name for name, each in zip(candidates, looked, strict=True) if each is None
            ]
            for each in looked:
                # If a step has several names, the first of the candidates counts.
                if each is not None:
                    found.setdefault(each.step, each)
            for name in self._known.keys() - set(candidates):
                del self._known[name]
            return True if None not in looked else None

        await self._first_answer(look)
        await self._say_left_out(left_out)
        return dict(sorted(found.items()))

    async def everywhere(self) -> list[IndexedStep]:
        """Return the steps of this place, and of the other places that can be listed."""
        found = list((await self.refresh()).values())
        for each in {*self.places} - {self}:
            with contextlib.suppress(StorageError):
                found += (await each.refresh()).values()
        return found

    async def left_behind(self) -> dict[int, IndexedStep]:
        """Return the steps of a branch that was given up, according to any of the places.

        This takes one small read in each place, until a run is known to have gone back.
        """
        for each in dict.fromkeys((self, *self.places)):
            # Errors of other places are reported when these are listed.
            with contextlib.suppress(*(() if each is self else (StorageError,))):
                if not self.went_back:
                    note = await each.storage.read("", WENT_BACK_NOTE, MAX_BYTES)
                    self.went_back = note is not None
        if not self.went_back:
            return {}
        behind, own = left_behind(await self.everywhere()), await self.refresh()
        return {step: each for step, each in own.items() if each.created_ns in behind}

    def _say_behind(self, newest: int, behind: Collection[int]) -> None:
        """Warn once about the greater steps that a run has left behind."""
        greater = {step for step in behind if step > newest}
        if not greater <= self._said_behind:
            where = redact(self.storage.location)
            logger.warning(_BEHIND, where, newest, shortened(sorted(greater)))
        self._said_behind |= greater

    async def latest(self) -> IndexedStep | None:
        """Return the greatest committed step of the newest branch, or None.

        Reads as few manifests as possible: those of all steps only if a run went back.
        """
        left_out: list[str] = []
        behind = await self.left_behind()

        async def look(candidates: Sequence[str]) -> IndexedStep | None:
            left_out.clear()
            for name in candidates:
                (found,) = await self.looked_at([name])
                if found is not None:
                    self._say_behind(found.step, behind)
                    return found
                left_out.append(name)
            return None

        latest = await self._first_answer(look, behind)
        await self._say_left_out(left_out)
        return latest

    async def _say_left_out(self, names: Sequence[str]) -> None:
        """Warn once about each directory that is named like a step and cannot be read."""
        for name in list(self._unreadable):
            # The directory is a step now, or gone: if it is damaged again, warn again.
            if name not in self._listed or self._known.get(name, (None, None))[1] is not None:
                del self._unreadable[name]
        new = [name for name in names if name not in self._unreadable]
        # Set before the first await: another call may find the same directories meanwhile.
        self._unreadable |= dict.fromkeys(new)
        found = []
        for name in new[:_MOST_CLOSE_LOOKS]:
            step = check_step(self.names.step(name))
            if name in self._refused:
                self._unreadable[name] = UnreadableStep(step, "forbidden", self._refused[name])
            else:
                self._unreadable[name] = await look_closely(self.storage, name, step)
            found.append(self._unreadable[name])
        told = [each for each in found if each is not None]
        for text in described(told):
            logger.warning("%s: %s", redact(self.storage.location), text)
        if told and len(new) > _MOST_CLOSE_LOOKS:
            logger.warning(
                "%s: %d more directories are named like steps and are left out: %s, ...",
                redact(self.storage.location),
                len(new) - _MOST_CLOSE_LOOKS,
                new[_MOST_CLOSE_LOOKS],
            )

    async def found(self, step: int | None) -> OpenedStep:
        """Open `step`, or the latest one.

        Raises:
            StepNotFoundError: There is no such step; the message lists the steps.
        """
        if step is None:
            latest = await self.open_latest()
            if latest is None:
                raise self.no_step()
            return latest
        step = check_step(step)
        # The directory that counts comes first; among damaged or foreign ones, the first raises.
        for step_dir in await self.step_dirs_of(step):
            opened = await open_step(self.storage, step_dir, step)
            if opened is not None:
                return opened
        raise await self.not_found(step)

    async def open_latest(self) -> OpenedStep | None:
        """Open the step of `latest`; None if there is none. Reads its manifest once.

        Raises:
            CorruptCheckpointError: The step is committed, but its manifest contradicts itself.
            UnsupportedFormatError: The step has a later format.
        """
        left_out: list[str] = []
        behind = await self.left_behind()

        async def look(candidates: Sequence[str]) -> OpenedStep | None:
            left_out.clear()
            for name in candidates:
                step = check_step(self.names.step(name))
                try:
                    opened = await open_step(self.storage, name, step)
                    if opened is not None and await self._counts(opened):
                        self._say_behind(step, behind)
                        return opened
                except NotACheckpointError:
                    pass
                except CorruptCheckpointError:
                    if (await self.looked_at([name]))[0] is not None:
                        raise
                left_out.append(name)
            return None

        latest = await self._first_answer(look, behind)
        await self._say_left_out(left_out)
        return latest

    async def _counts(self, opened: OpenedStep) -> bool:
        """Return True if an opened step is committed and looks whole, by the rules of lists."""
        name = opened.step_dir
        if name in self._known:
            return True
        if opened.foreign is not None:
            return await self.look(name) is not None
        # The manifest was just read: it is read again only if files are missing or short.
        sizes = {name: _largest(opened.manifest.sizes)}
        return not await self.storage.cut_files(sizes) or await self.look(name) is not None

    async def step_dirs_of(self, step: int) -> list[str]:
        """Return the names of all directories that may be `step`, even damaged ones.

        The directory that counts comes first: among committed ones, the one with the written name.

        Raises:
            InvalidArgumentError: `names` gives no name to the step.
        """
        written = self.names.name(step)
        if isinstance(self.names, Standard):
            # Standard has one name for a step, so nothing needs to be listed.
            return [written] if await self.storage.exists(written) else []
        names = [name for name in await self._candidates() if self.names.step(name) == step]
        committed = await self.looked_at(names)
        pairs = list(zip(names, committed, strict=True))
        # Damaged directories come after the others, which keep their order.
        return [name for name, each in sorted(pairs, key=lambda pair: pair[1] is None)]

    async def look(self, step_dir: str) -> IndexedStep | None:
        """Return the current step in a directory; None if it is not a committed step."""
        return (await self.looked_at([step_dir]))[0]

    async def not_found(self, step: int) -> CheckpointError:
        """Return an error that lists the existing steps, or says what this step has lost."""
        found = await self.refresh()
        if step in found and found[step].is_foreign:
            where = f"{self.storage.location}/{found[step].step_dir}"
            return CorruptCheckpointError(f"{where} has lost the files of its items", step=step)
        listed = f"steps {shortened(list(found))}" if found else "no committed step"
        return StepNotFoundError(
            f"there is no such step; {self.storage.location} has {listed}", step=step
        )

    def no_step(self) -> StepNotFoundError:
        """Return the error for a root without steps; the message describes its contents."""
        where = self.storage.location
        if self._is_missing:
            return StepNotFoundError(f"there is no directory {where}, and so no step")
        if self.elsewhere:
            return StepNotFoundError(self.elsewhere)
        why = "; ".join(described(self.unreadable)) or "save one first"
        return StepNotFoundError(f"{where} has no committed step; {why}")

    async def _candidates(self) -> list[str]:
        """Return the names of possible steps: greatest step first, its written name first."""
        found = []
        names = await self.step_dirs()
        self.begun = sorted(name for name in names if UNFINISHED in name)
        for name in names:
            step = self.names.step(name)
            if step is not None:
                found.append((-step, name != self.names.name(step), name))
        self._listed = {name: -step for step, _, name in found}
        own = None if found else await self.storage.read("", FILE_NAME, MAX_BYTES)
        # A file of this name may be something else.
        if own is not None and peek(own) is not None:
            raise InvalidArgumentError(
                f"{self.storage.location} is itself a checkpoint, not a root of steps. Pass the "
                "directory above it, or read this one with ckpt.load"
            )
        return [name for _, _, name in sorted(found)]

    async def step_dirs(self) -> list[str]:
        """Return the names of the directories and files of the root."""
        try:
            found = await self.storage.step_dirs()
        except StorageError as error:
            if self._missing == "error" or error.errno != errno.ENOENT:
                raise
            if self._missing == "empty" and not self._is_missing:
                where = redact(self.storage.location)
                logger.warning("there is no directory %s; it is read as having no steps", where)
            self._is_missing = True
            return []
        self._is_missing = False
        return found

    async def looked_at(self, names: Sequence[str]) -> list[IndexedStep | None]:
        """Return the step in each of these directories; None for one without a committed step."""
        # Stamps are taken before the reads: a change in between is read again the next time.
        for name in names:
            self._refused.pop(name, None)
        stamps = await self._readable(names, lambda some: self.storage.stamps(some, FILE_NAME))
        # The answers belong to this call: other calls may change `_known` meanwhile.
        found: dict[str, IndexedStep | None] = {}
        new = []
        without = [name for name, stamp in zip(names, stamps, strict=True) if stamp is None]
        if without:
            found |= await self._look_at_foreign(without)
        for name, stamp in zip(names, stamps, strict=True):
            known = self._known.get(name)
            if stamp is None:
                continue
            if known is not None and known[0] == stamp:
                found[name] = known[1]
            else:
                new.append((name, stamp))
        read = await self._readable(
            [name for name, _ in new],
            lambda some: self.storage.read_each(some, FILE_NAME, MAX_BYTES, HEAD_BYTES, peek),
        )
        # Remember a step only after its files were seen, too; another call may look meanwhile.
        sizes = {}
        for (name, _), summary in zip(new, read, strict=True):
            found[name] = self._indexed(name, summary)
            if summary is not None and found[name] is not None:
                sizes[name] = _largest(summary.sizes)
        cut = await self.storage.cut_files(sizes) if sizes else {}
        self._known |= {name: (stamp, found[name]) for name, stamp in new if name not in cut}
        if cut:
            found |= await self._looked_again({name: stamp for name, stamp in new if name in cut})
        return [found[name] for name in names]

    async def _look_at_foreign(self, names: Sequence[str]) -> dict[str, IndexedStep | None]:
        """Return the steps of other libraries in these directories, which have no manifest."""
        # Imported here, since most programs never need it.
        from ckpt._interop.files import heads_of, stamps_of

        stamps = await self._readable(names, partial(stamps_of, self.storage))
        found: dict[str, IndexedStep | None] = dict.fromkeys(names)
        new = {}
        for name, stamp in zip(names, stamps, strict=True):
            known = self._known.get(name)
            if known is not None and known[0] == (_FOREIGN, stamp):
                found[name] = known[1]
            elif stamp is not None:
                new[name] = stamp
        heads = await self._readable(list(new), partial(heads_of, self.storage, new))
        for (name, stamp), head in zip(new.items(), heads, strict=True):
            if head is not None:
                step = check_step(self.names.step(name))
                found[name] = IndexedStep(
                    step,
                    name,
                    head.attempt,
                    head.created_ns,
                    head.committed_ns,
                    None if head.metrics is None else flat_metrics(head.metrics),
                    library=head.library,
                    groups=head.metrics,
                )
            self._known[name] = ((_FOREIGN, stamp), found[name])
        return found

    async def _looked_again(self, cut: Mapping[str, Hashable]) -> Mapping[str, IndexedStep | None]:
        """Return the state of directories with a missing or short file: no steps, or replaced.

        `cut` has the stamps of their manifests, as they were read, by name.
        """
        stamps = await self.storage.stamps(list(cut), FILE_NAME)
        replaced = [name for name, now in zip(cut, stamps, strict=True) if now != cut[name]]
        again = await self.looked_at(replaced) if replaced else []
        return dict.fromkeys(cut) | dict(zip(replaced, again, strict=True))

    async def _readable(
        self, names: Sequence[str], ask: Callable[[Sequence[str]], Awaitable[list[T | None]]]
    ) -> list[T | None]:
        """Return the answers about step directories; None for a directory without permission.

        Missing permission for one step is no reason not to list the others.
        """
        try:
            return await ask(names)
        except StorageError as error:
            if error.errno not in _FORBIDDEN:
                raise
            if len(names) == 1:
                self._refused[names[0]] = error.message
                return [None]
        return [(await self._readable([name], ask))[0] for name in names]

    def _indexed(self, name: str, summary: Summary | None) -> IndexedStep | None:
        # A step is committed if and only if its manifest is there, whole, and its own. The manifest
        # of a one-shot checkpoint has no number: the name of its directory decides.
        step = self.names.step(name)
        if summary is None or step is None or summary.step not in (None, step):
            return None
        return IndexedStep(
            step,
            name,
            summary.attempt,
            summary.created_ns,
            summary.committed_ns,
            None if summary.metrics is None else flat_metrics(summary.metrics),
            summary.save,
            summary.manifest_bytes + sum(each.size for each in summary.files.values()),
            notes=notes_in(summary),
            left_behind=tuple(summary.left_behind),
            items=tuple(sorted(filter(is_item_name, {*summary.tops, *summary.fileless}))),
            dropped=tuple(summary.dropped),
            groups=grouped_metrics(summary.metrics),
        )

    async def _first_answer(
        self, look: Callable[[Sequence[str]], Awaitable[T | None]], last: Collection[int] = ()
    ) -> T | None:
        """Ask `look` about possible steps until it answers, or until the names stay the same.

        A writer that keeps one step commits the next and then deletes the one before. A reader that
        lists before that and looks afterwards finds nothing, though there always was a step.

        Args:
            look: Returns its answer about the candidates, descending; None to list again.
            last: Steps that come after all others.
        """
        known: list[str] | None = None
        while (candidates := await self._candidates()) != known:
            answer = await look(sorted(candidates, key=lambda name: self.names.step(name) in last))
            if answer is not None:
                return answer
            known = candidates
        return None


def _largest(sizes: dict[str, int]) -> dict[str, int]:
    return dict(heapq.nlargest(_MOST_FILES, sizes.items(), key=lambda each: each[1]))
