"""Verification of one checkpoint, or of all steps of a root, as records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._engine.verify.report import Problem, ReadLimits, VerifyReport
from ckpt._events import Observer
from ckpt._format.manifest_head import FILE_NAME
from ckpt._inspection.locations import Checkpoint, RunRoot, SkippedStep, locate
from ckpt._steps.opened import UnreadableStep
from ckpt._steps.path_diagnosis import diagnose
from ckpt.errors import (
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    UnsupportedFormatError,
)
from ckpt.storage._manifests import no_manifest


class Verification(Struct, frozen=True):
    """The result of a verification.

    Attributes:
        path: Path of the checkpoint or root.
        ok: True if no problem was found in the bytes that were read.
        is_root: True if the path is a root.
        deep: True if bytes were read.
        files: Number of all files.
        unread_files: Number of files that were not read.
        nbytes: Number of bytes that were read.
        unread_nbytes: Number of bytes that were not read.
        seconds: Duration of the verification.
        seed: Seed that repeats the choice of a sample; None without one.
        steps: Reports of the steps, ascending, each with `ok`.
        skipped: Steps that were not compared.
    """

    path: str
    ok: bool
    is_root: bool
    deep: bool
    files: int
    unread_files: int
    nbytes: int
    unread_nbytes: int
    seconds: float
    seed: int | None
    steps: list[dict[str, Any]]
    skipped: list[SkippedStep]


# Called with the report of each step; and before each step with its name, place and their number.
Told = Callable[[VerifyReport], None]
Next = Callable[[str, int, int], None]


async def verify_at(
    path: str, deep: bool, limits: ReadLimits, observer: Observer, told: Told, begins: Next
) -> Verification:
    """Compare a checkpoint with its manifest, or all steps of a root.

    With a time limit, the newest steps come first. Steps for which no time is left are still looked
    at without reading them, so that the report says how much was left out.

    Args:
        path: The checkpoint or root.
        deep: Read every byte; otherwise compare names, kinds and sizes.
        limits: Limits of the bytes that are read.
        observer: Receives the timed phases.
        told: Called with the report of each step.
        begins: Called before each step with its name, its place and the number of steps.

    Raises:
        NotACheckpointError: There is nothing at the path that could be compared.
        StorageError: The storage cannot be read.
    """
    began = time.monotonic()
    found = await locate(path)
    if isinstance(found, Checkpoint):
        if found.opened.foreign is not None:
            raise await diagnose(path, no_manifest(found.location))
        begins(found.opened.item or found.opened.step_dir, 1, 1)
        storage, name = found.storage, found.opened.step_dir
        report = await verify_step_dir(
            storage, name, None, deep, (observer,), limits=limits, item=found.opened.item
        )
        told(report)
        return _verification_of(found, deep, limits, [report], [], began)
    reports: list[VerifyReport] = []
    steps, skipped = await _steps_of(found)
    damaged = {each.step: each.reason for each in found.index.unreadable}
    order = list(reversed(steps)) if limits.ends_at is not None else steps
    for place, (step, name) in enumerate(order, 1):
        begins(f"step {step}", place, len(order))
        try:
            report = await verify_step_dir(
                found.storage, name, step, deep, (observer,), limits=limits
            )
        except (StepNotFoundError, StepDeletedError):
            if step not in damaged or not await found.storage.exists(name):
                skipped.append(SkippedStep(step, "it was deleted meanwhile"))
                continue
            report = _unreadable(f"{found.location}/{name}", step, deep, damaged[step])
        except (NotACheckpointError, UnsupportedFormatError) as error:
            report = _unreadable(f"{found.location}/{name}", step, deep, error.message)
        reports.append(report)
        told(report)
    reports.sort(key=lambda report: report.step or 0)
    return _verification_of(found, deep, limits, reports, skipped, began)


async def _steps_of(root: RunRoot) -> tuple[list[tuple[int, str]], list[SkippedStep]]:
    """Return the steps to compare, including damaged ones, with directories; and the others."""
    committed = await root.index.refresh()
    steps = {each.step: each.step_dir for each in committed.values() if not each.is_foreign}
    skipped = [
        SkippedStep(each.step, "Orbax wrote it, without digests")
        for each in committed.values()
        if each.is_foreign
    ]
    for each in root.index.unreadable:
        if each.step in committed:
            continue
        if each.kind in ("orbax", "other"):
            skipped.append(SkippedStep(each.step, each.reason))
        else:
            steps[each.step] = await _name_of(root, each)
    return sorted(steps.items()), sorted(skipped, key=lambda each: each.step)


async def _name_of(root: RunRoot, each: UnreadableStep) -> str:
    names = await root.index.step_dirs_of(each.step)
    return names[0] if names else root.names.name(each.step)


def _unreadable(path: str, step: int, deep: bool, message: str) -> VerifyReport:
    problem = Problem(FILE_NAME, None, None, message)
    return VerifyReport(path, step, deep, (problem,), 1, 0, 0.0)


def _verification_of(
    place: RunRoot | Checkpoint,
    deep: bool,
    limits: ReadLimits,
    reports: Sequence[VerifyReport],
    skipped: list[SkippedStep],
    began: float,
) -> Verification:
    files, unread_files, nbytes, unread_nbytes = (
        sum(getattr(report, name) for report in reports)
        for name in ("files", "unread_files", "nbytes", "unread_nbytes")
    )
    return Verification(
        place.location,
        all(report.ok for report in reports),
        isinstance(place, RunRoot),
        deep,
        files,
        unread_files,
        nbytes,
        unread_nbytes,
        time.monotonic() - began,
        limits.seed,
        [msgspec.to_builtins(report) | {"ok": report.ok} for report in reports],
        skipped,
    )
