"""`ckpt cp`: copy of a checkpoint, a step or a whole root from one place to another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

import anyio
import click
from msgspec import Struct, field

from ckpt._inspection.locations import (
    Checkpoint,
    RunRoot,
    locate,
    open_as_root,
    refuse_doubled,
    step_path_of,
)
from ckpt._redaction import redact
from ckpt._tree.table import format_bytes
from ckpt.cli import exit_status, options
from ckpt.cli.output import count_text, note, printable, show, show_lines
from ckpt.cli.progress import ProgressLine, progress
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._resolve import local_path, open_root, open_step_dir

if TYPE_CHECKING:
    from ckpt._conversion.copies.step_location import StepLocation
    from ckpt._conversion.copies.steps import CopiedStep, CopyRules

_SHOWN = 3
# Pause between two looks whether a run has begun.
_PAUSE_SECONDS = 0.5


class _Copied(Struct, frozen=True):
    """The result of a copy.

    Attributes:
        source: The copied checkpoint, step or root.
        target: The place of the copy.
        ok: True if no step is left out because it, or the step in its place, is damaged.
        nbytes: Bytes that were copied.
        steps: Outcomes of the steps.
        skipped: Steps that another library wrote.
    """

    source: str
    target: str
    ok: bool
    nbytes: int
    steps: list[CopiedStep]
    skipped: list[int]


@click.command()
@click.argument("source", type=options.PATH)
@click.argument("target", type=options.PATH)
@click.option("--overwrite", is_flag=True, help="Replace other steps of the same names.")
@click.option("--whole", is_flag=True, help="Copy the arrays of virtual steps, too.")
@click.option(
    "--select",
    metavar="PATTERN",
    multiple=True,
    help="Copy only leaves and items that fit, such as 'params'. Several add up.",
)
@click.option("--verify", is_flag=True, help="Read what is there already, and replace damage.")
@click.option("--follow", is_flag=True, help="Go on with the steps that a live run saves.")
@click.option(
    "--until", type=click.IntRange(0), metavar="STEP", help="End --follow after this step."
)
@options.as_json
def cp(
    source: str,
    target: str,
    overwrite: bool,
    whole: bool,
    select: tuple[str, ...],
    verify: bool,
    follow: bool,
    until: int | None,
    as_json: bool,
) -> int:
    """Copy a checkpoint, a step or a whole root between disks and stores.

    Every file is compared with its digest on the way. Each step appears when all of it is there;
    those that are there already are passed over, so a copy that was interrupted is continued by the
    same command. A TARGET that is a directory, or ends with '/', gets a step under its own name.
    """
    from ckpt._conversion.copies.steps import CopyRules

    if until is not None and not follow:
        raise click.UsageError("--until is for --follow.")
    if (local := local_path(target)) is not None and not os.path.realpath(local).strip("/"):
        raise InvalidArgumentError(f"{target} is the root of the disk. Choose a place on it")
    rules = CopyRules(overwrite, whole, select, verify)
    with progress("copy") as line:
        work = _Copy(source, target, rules, line, as_json)
        copied = work.follow(until) if follow else work.once()
    show(copied, _summary, as_json=as_json)
    return exit_status.OK if copied.ok else exit_status.FOUND


class _Copy(Struct):
    _source: str
    _target: str
    _rules: CopyRules
    _line: ProgressLine
    _as_json: bool
    # Messages about all steps that were shown already, since they are shown once.
    _said: set[str] = field(default_factory=set)

    def once(self) -> _Copied:
        """Copy the existing steps."""
        from ckpt._runtime.loop import call_once

        return call_once(self._once)

    def follow(self, until: int | None) -> _Copied:
        """Copy the existing steps, and those that are saved later."""
        import ckpt.sync
        from ckpt._runtime.loop import call_once

        root = call_once(self._begun_root)
        steps: list[CopiedStep] = []
        skipped: list[int] = []
        target = open_root(self._target).location
        with ckpt.sync.watch(self._source, until=until, step_names=root.names, pin=False) as found:
            while True:
                try:
                    info = next(found)
                except StopIteration:
                    break
                except (CorruptCheckpointError, UnsupportedFormatError) as error:
                    # The watch continues with the next step.
                    steps.append(self._left(error.step, target, error.message))
                    continue
                assert info.step is not None
                done = call_once(partial(self._one_of_root, info.step))
                steps += done.steps
                skipped += done.skipped
        known = {each.step for each in steps}
        steps += call_once(partial(self._lost_at_last, target, known))
        return _result(root.location, target, steps, skipped)

    async def _begun_root(self) -> RunRoot:
        """Return the root once it has a step, whose name shows the naming scheme."""
        while True:
            # A run that has not begun has no directory, or an empty one.
            with contextlib.suppress(NotACheckpointError, StepNotFoundError):
                found = await locate(self._source)
                if isinstance(found, Checkpoint):
                    raise InvalidArgumentError(
                        f"--follow is for a root of steps; {found.location} is one"
                    )
                if await found.index.latest() is not None:
                    return found
            await anyio.sleep(_PAUSE_SECONDS)

    async def _one_of_root(self, step: int) -> _Copied:
        # Opened again, since each call has its own event loop.
        root = await open_as_root(self._source)
        names = await root.index.step_dirs_of(step)
        return await self._root(root, {step: names[0]} if names else {}, [])

    async def _once(self) -> _Copied:
        from ckpt._conversion.copies.steps import committed_steps

        found = await locate(self._source)
        if isinstance(found, Checkpoint):
            return await self._checkpoint(found)
        await refuse_doubled(found)
        steps, skipped = await committed_steps(found.index)
        for step in skipped:
            self._say(f"step {step} was not copied: Orbax wrote it; 'ckpt convert' takes it")
        copied = await self._root(found, steps, skipped)
        copied.steps.extend(self._lost(found, copied.target))
        return _result(found.location, copied.target, copied.steps, skipped)

    def _lost(
        self, root: RunRoot, target: str, known: Collection[int | None] = ()
    ) -> list[CopiedStep]:
        """Report unreadable directories with names of steps; a warning has given the reasons."""
        lost = [each for each in root.index.unreadable if each.kind not in ("orbax", "other")]
        return [
            self._left(each.step, target, each.reason) for each in lost if each.step not in known
        ]

    async def _lost_at_last(self, target: str, known: Collection[int | None]) -> list[CopiedStep]:
        # Reported only at the end: an unreadable step may have been a copy in progress.
        root = await open_as_root(self._source)
        await root.index.refresh()
        return self._lost(root, target, known)

    def _left(self, step: int | None, target: str, reason: str) -> CopiedStep:
        """Report a step that cannot be read, and return its outcome."""
        from ckpt._conversion.copies.steps import CopiedStep

        left = CopiedStep(step, f"{target}/{step}", "damaged", reason=reason)
        self._told(left)
        return left

    async def _root(self, root: RunRoot, steps: dict[int, str], skipped: list[int]) -> _Copied:
        from ckpt._conversion.copies.steps import StepsToCopy, copy_steps, refuse_same

        target = open_root(self._target)
        refuse_same(root.storage, target)
        place = await _place_at(self._target)
        if isinstance(place, Checkpoint):
            raise InvalidArgumentError(
                f"{place.location} is a checkpoint, and {root.location} a root of steps. Give "
                "another target"
            )
        done = 0

        def told(copied: CopiedStep) -> None:
            nonlocal done
            done += 1
            self._told(copied)
            self._line.name(f"copy ({done} of {len(steps)})")

        copied = await copy_steps(
            StepsToCopy(root.storage, steps, target), self._rules, self._line, told
        )
        return _result(root.location, target.location, copied, skipped)

    async def _checkpoint(self, found: Checkpoint) -> _Copied:
        from ckpt._conversion.copies.step_location import StepLocation
        from ckpt._conversion.copies.steps import copy_checkpoint

        name, step = found.opened.step_dir, found.opened.manifest.step
        if found.opened.foreign is not None:
            raise InvalidArgumentError(
                f"{found.location} was written by another library, without digests: "
                "'ckpt convert' takes it"
            )
        if found.opened.item:
            raise InvalidArgumentError(
                f"{found.location} is an item of a checkpoint, and no checkpoint by itself: "
                "'ckpt convert' makes one of it"
            )
        target = await self._place_for(name)
        if step is not None:
            await self._check_name(target, step)
        source = StepLocation(found.storage, name)
        copied = await copy_checkpoint(source, target, self._rules, self._line)
        self._told(copied)
        return _result(found.location, target.location, [copied], [])

    async def _check_name(self, target: StepLocation, step: int) -> None:
        """Raise if a step would get the name of another, or be in a root twice."""
        place = step_path_of(target.location)
        if place is not None and place.step != step:
            raise InvalidArgumentError(
                f"{target.location}: step {step} cannot have the name of step {place.step}. "
                "'ckpt convert --step' gives it another number"
            )
        committed: list[str] = []
        # A root that does not exist yet has no steps.
        with contextlib.suppress(StepNotFoundError, StorageError):
            root = await open_as_root(target.storage.location)
            others = [name for name in await root.index.step_dirs_of(step) if name != target.name]
            committed = [name for name in others if await root.index.look(name) is not None]
        if place is not None and committed:
            raise InvalidArgumentError(
                f"{target.storage.location} has step {step} already, as {committed[0]}. Copy it to "
                "that name"
            )

    async def _place_for(self, name: str) -> StepLocation:
        from ckpt._conversion.copies.step_location import StepLocation

        try:
            place = None if self._target.endswith("/") else await _place_at(self._target)
        except CorruptCheckpointError:
            # The damaged checkpoint is in the place of the copy, and may be a leftover of a copy.
            return StepLocation(*open_step_dir(self._target))
        local = local_path(self._target)
        is_folder = place is None and local is not None and local.is_dir()
        if self._target.endswith("/") or isinstance(place, RunRoot) or is_folder:
            return StepLocation(open_root(self._target), name)
        return StepLocation(*open_step_dir(self._target))

    def _told(self, copied: CopiedStep) -> None:
        if copied.others:
            shown = ", ".join(copied.others[:_SHOWN])
            self._say_once(f"files that are not of the steps are not copied, such as {shown}")
        if copied.left_out:
            shown = ", ".join(copied.left_out[:_SHOWN])
            more = ", ..." if len(copied.left_out) > _SHOWN else ""
            self._say_once(f"left out, since not selected: {shown}{more}")
        if copied.is_reshaped:
            self._say_once(
                "lists, tuples and objects that lost a part of their leaves are dicts in the copy"
            )
        if not self._as_json:
            show_lines(_line(copied))

    def _say_once(self, text: str) -> None:
        """Show a message about many steps once, with the names in the first one."""
        about = text.partition(":")[0].partition(",")[0]
        if about not in self._said:
            self._said.add(about)
            self._say(text)

    def _say(self, text: str) -> None:
        note(f"ckpt: {text}")


async def _place_at(path: str) -> RunRoot | Checkpoint | None:
    """Return the root with steps or the checkpoint at a target; None if there is neither."""
    with contextlib.suppress(NotACheckpointError, StepNotFoundError):
        return await locate(path)
    return None


def _result(source: str, target: str, steps: list[CopiedStep], skipped: list[int]) -> _Copied:
    ok = all(each.outcome not in ("damaged", "blocked") for each in steps)
    nbytes = sum(each.nbytes for each in steps)
    return _Copied(redact(source), redact(target), ok, nbytes, steps, skipped)


def _line(copied: CopiedStep) -> Iterator[str]:
    path = printable(redact(copied.path))
    virtual = "; virtual: its arrays stay where they are" if copied.is_virtual else ""
    if copied.outcome == "copied":
        yield f"{path}: copied, {format_bytes(copied.nbytes)}{virtual}"
    elif copied.outcome == "there":
        yield f"{path}: already there{virtual}"
    else:
        yield click.style(f"{path}: not copied: {printable(copied.reason or '')}", bold=True)


def _summary(copied: _Copied) -> Iterator[str]:
    count = sum(each.outcome == "copied" for each in copied.steps)
    there = sum(each.outcome == "there" for each in copied.steps)
    left = len(copied.steps) - count - there
    parts = [
        f"{count_text(count, 'step')} copied, {format_bytes(copied.nbytes)}",
        *([f"{there:,} already there"] if there else []),
        *([f"{left:,} not copied"] if left else []),
    ]
    if len(copied.steps) != 1 or left:
        yield click.style(f"{printable(copied.target)}: {', '.join(parts)}", dim=not left)
