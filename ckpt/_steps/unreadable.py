"""Unreadable steps: directories that are named like steps and are no committed steps.

Such steps are never passed over in silence: a run that took a root of damaged steps, or of another
library's steps, for an empty one would begin again from scratch.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES
from ckpt.errors import CorruptCheckpointError, StorageError, UnsupportedFormatError
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._manifests import read_manifest

# Kinds of such a directory: a damaged step of this library, a step of a later version, one without
# read permission, a step that Orbax began and did not finish, or something else.
Kind = Literal["damaged", "later", "forbidden", "orbax", "other"]

# Orbax puts the first file into every step, and writes the whole path of the step into the second.
_ORBAX_METADATA = "_CHECKPOINT_METADATA"
_SUCCESS = "commit_success.txt"
# Part of the names of steps and items that Orbax has not finished.
BEGUN = ".orbax-checkpoint-tmp"
_MOST_BYTES = 16 << 20
_SHOWN = 12


class UnreadableStep(Struct, frozen=True):
    """A directory that is named like a step and is no committed step.

    Attributes:
        step: The step number in the name of the directory.
        kind: Kind of the directory.
        reason: Reason why it cannot be read.
    """

    step: int
    kind: Kind
    reason: str


async def look_closely(storage: Storage, step_dir: str, step: int) -> UnreadableStep | None:
    """Find out why a directory is no committed step; None if it is gone, or is a step now."""
    where = f"{storage.location}/{step_dir}"
    try:
        if await storage.read(step_dir, FILE_NAME, MAX_BYTES) is not None:
            manifest = await read_manifest(storage, step_dir, step=step)
            cut = await storage.cut_files({step_dir: manifest.sizes})
            if step_dir not in cut or not await storage.exists(step_dir):
                return None
            reason = f"{where}/{cut[step_dir]}; a copy of it is not complete, or it was damaged"
            return UnreadableStep(step, "damaged", reason)
        success = await storage.read(step_dir, _SUCCESS, _MOST_BYTES)
        if success is not None and success.endswith(f" {step_dir}".encode()):
            return UnreadableStep(step, "damaged", f"{where} has lost {FILE_NAME}")
        is_begun = await storage.read(step_dir, _ORBAX_METADATA, _MOST_BYTES) is not None
        if not is_begun:
            # In an object store, the objects of a save under way have names like this, too.
            if not isinstance(storage, HasDirectories) or not await storage.exists(step_dir):
                return None
            is_begun = any(BEGUN in path for path in await storage.files(step_dir))
        if is_begun:
            reason = f"Orbax never finished {where}, or its {_ORBAX_METADATA} is damaged"
            return UnreadableStep(step, "orbax", reason)
    except CorruptCheckpointError as error:
        return UnreadableStep(step, "damaged", error.message.rstrip("."))
    except UnsupportedFormatError as error:
        return UnreadableStep(step, "later", error.message.rstrip("."))
    except StorageError as error:
        # ENOTDIR: the name belongs to a file.
        if error.errno != errno.ENOTDIR:
            raise
    return UnreadableStep(step, "other", f"{where} has no {FILE_NAME}")


def described(found: Sequence[UnreadableStep]) -> list[str]:
    """Return a sentence for each kind of unreadable step, for messages."""
    texts = []
    for each in found:
        if each.kind != "other":
            problem = "is damaged" if each.kind == "damaged" else "cannot be read"
            texts.append(f"step {each.step} {problem} and is left out: {each.reason}")
    steps = sorted({each.step for each in found if each.kind == "other"})
    if steps:
        what = "a step" if len(steps) == 1 else f"{len(steps)} steps"
        are = "it is" if len(steps) == 1 else "they are"
        texts.append(
            f"it holds {what} of another program ({shortened(steps)}), without a {FILE_NAME}; "
            f"{are} left out"
        )
    return texts


def shortened(steps: Sequence[int]) -> str:
    """Return ascending steps as text; a long list is cut to the first and the last ones."""
    shown = [str(step) for step in (steps if len(steps) <= _SHOWN else [*steps[:3], *steps[-8:]])]
    if len(steps) > _SHOWN:
        shown.insert(3, "...")
    return ", ".join(shown)
