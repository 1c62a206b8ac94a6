"""Find out what is at a path where a checkpoint was expected, for the error message."""

from __future__ import annotations

import errno

from ckpt._arguments import shown
from ckpt._engine.verify.report import NO_LIMITS, ReadLimits, VerifyReport
from ckpt._events import Observer
from ckpt._format.manifest_head import FILE_NAME
from ckpt._format.step_files import BEGUN, SUCCESS, is_own_mark
from ckpt._redaction import redact
from ckpt._steps.misplaced import misplaced
from ckpt._steps.opened import OpenedStep, item_at, open_step, shortened
from ckpt.errors import CheckpointError, NotACheckpointError, StorageError, UnsupportedFormatError
from ckpt.step_names import Standard
from ckpt.storage._base import Storage
from ckpt.storage._manifests import no_manifest
from ckpt.storage._resolve import PathLike, open_root, open_step_dir

_MOST_BYTES = 16 << 20
_STANDARD = Standard()


async def opened_checkpoint(path: PathLike, storage: Storage, step_dir: str) -> OpenedStep:
    """Return the checkpoint at `path`, which is a directory of a storage.

    Raises:
        NotACheckpointError: There is no checkpoint; the message says what is there instead.
    """
    opened = await open_step(storage, step_dir)
    if opened is None:
        raise await diagnose(path, no_manifest(f"{storage.location}/{step_dir}"))
    return opened


async def verified(
    path: PathLike,
    storage: Storage,
    step_dir: str,
    deep: bool,
    observers: tuple[Observer, ...] = (),
    limits: ReadLimits = NO_LIMITS,
) -> VerifyReport:
    """Compare the checkpoint at `path`, or the item at `path`, with its manifest.

    Raises:
        NotACheckpointError: There is no checkpoint; the message says what is there instead.
    """
    # Imported here: this needs jax, which most of this module does without.
    from ckpt._engine.verify.pipeline import verify_step_dir

    try:
        return await verify_step_dir(storage, step_dir, None, deep, observers, limits=limits)
    except NotACheckpointError as error:
        found = await item_at(storage, step_dir)
        if found is None:
            raise await diagnose(path, error) from None
    return await verify_step_dir(
        found.storage, found.step_dir, None, deep, observers, limits=limits, item=found.item
    )


async def diagnose(path: PathLike, error: NotACheckpointError) -> NotACheckpointError:
    """Return an error that says what is at `path` instead of a checkpoint."""
    try:
        found = await _what_is_at(path)
    except CheckpointError:
        # The failed look was only meant to explain `error`.
        found = None
    return error if found is None else NotACheckpointError(found)


async def _what_is_at(path: PathLike) -> str | None:
    root = open_root(path, create=False)
    where = redact(root.location)
    try:
        names = await root.step_dirs()
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return f"there is no directory or file {where}"
        if error.errno != errno.ENOTDIR:
            raise
        try:
            opened = await open_step(*open_step_dir(path, follow=True))
        except (NotACheckpointError, UnsupportedFormatError) as unread:
            return unread.message
        if opened is None:
            return f"{where} is a file; a checkpoint of this library is a directory"
        return (
            f"{where} has no digests to verify; ckpt.load and ckpt.metadata read it, and what "
            "ckpt.adopt makes of it can be verified"
        )
    steps = sorted(step for name in names if (step := _STANDARD.step(name)) is not None)
    if steps:
        last = shown(f"{where}/{steps[-1]}", 1000)
        return (
            f"{where} is a root with the steps {shortened(steps)}, not one checkpoint: give one of "
            f"them, such as {last}, or use a manager"
        )
    if is_own_mark(await root.read("", SUCCESS, _MOST_BYTES)):
        return f"{where} has lost its {FILE_NAME}; copy it again, or take another step"
    if await root.read("", BEGUN, _MOST_BYTES) is not None:
        return (
            f"{where} is a checkpoint of Orbax. ckpt.load and ckpt.metadata read the items of it "
            "that they know; it has no digests to verify"
        )
    elsewhere = await misplaced(root, _STANDARD, names)
    if elsewhere is not None and elsewhere.is_read:
        return (
            f"{where} is not a checkpoint, but has {elsewhere.what}. Give the path of one of them"
        )
    return None
