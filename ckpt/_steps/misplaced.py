"""Checkpoints of a root that has no steps: under other names, in files, or one folder further down.

A run that took such a root for a new one would begin again from scratch, beside its own steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Sequence

from msgspec import Struct

from ckpt._arguments import shown
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import StepIndex
from ckpt._steps.unreadable import shortened
from ckpt.errors import CheckpointError
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._resolve import open_beside

logger = logging.getLogger("ckpt")

_NUMBERED = re.compile(r"^(?:([A-Za-z][A-Za-z0-9_.-]*?)([_-]))?([0-9]{1,19})\Z")
# What programs call steps whose format may not be known here.
_STEP_WORDS = ("checkpoint", "ckpt", "epoch", "global_step", "iter", "step")
# So many folders are looked into: each takes a request of a store.
_MOST_FOLDERS = 16


def convention(name: str) -> Standard | None:
    """Return how a step is named if this is the name of one; None if it is no such name."""
    found = _NUMBERED.match(name)
    if found is None:
        return None
    prefix, separator, number = found.groups()
    digits = len(number) if number[0] == "0" and len(number) > 1 else 0
    return Standard(prefix or "", digits, separator or "_")


class Misplaced(Struct, frozen=True):
    """What a root has instead of steps.

    Attributes:
        what: It, for messages: "2 checkpoints, such as 'step_20'".
        advice: What to do with a manager.
        is_read: Whether parts of it can be read.
    """

    what: str
    advice: str
    is_read: bool = True


async def say_misplaced(storage: Storage, index: StepIndex, *, raises: bool = False) -> None:
    """Warn once of what a root without steps has instead; `index` knows of it from then on.

    Raises:
        StepNotFoundError: There is something, and that is an error.
    """
    if index.elsewhere is None:
        found = await misplaced(storage, index.names, await index.step_dirs())
        index.elsewhere = ""
        if found is not None:
            index.elsewhere = f"{storage.location} has no steps, but {found.what}. {found.advice}"
            if raises:
                raise index.no_step()
            logger.warning("%s", redact(index.elsewhere))


async def misplaced(
    storage: Storage, names: StepNames, step_dirs: Sequence[str]
) -> Misplaced | None:
    """Return what a root has in which nothing is a step; None if that is nothing.

    Args:
        storage: The root.
        names: How its steps would be named.
        step_dirs: The directories in it.
    """
    folders = sorted(name for name in step_dirs if names.step(name) is None)
    named: dict[Standard, list[str]] = {}
    for name in folders:
        if (found := convention(name)) is not None:
            named.setdefault(found, []).append(name)
    for kind, each in sorted(named.items(), key=lambda item: -len(item[1])):
        if any(await StepIndex(storage, kind).looked_at(each[-_MOST_FOLDERS:])):
            return Misplaced(_listed(each), f"To go on from there, {_advice(kind)}")
    files = await run_in_thread(_files_of_flax, storage.location)
    if files:
        return Misplaced(
            f"{_listed(files)}, as files of Flax",
            "A manager reads none: ckpt.load does, and resume(source=...) begins a run from one",
        )
    roots = await _roots_in(storage, [name for name in folders if convention(name) is None])
    if roots:
        what = f"roots of steps in it: {'; '.join(roots)}"
        return Misplaced(what, "Give the path of one of them")
    odd = [each for kind, each in named.items() if kind.prefix in _STEP_WORDS]
    if odd:
        what = f"directories that are named like steps, such as {shown(odd[0][-1], 200)}"
        return Misplaced(what, "They hold no checkpoint that is read here", is_read=False)
    return None


def _listed(names: list[str]) -> str:
    last = max(names, key=lambda name: int(name[len(name.rstrip("0123456789")) :]))
    many = f"{len(names)} checkpoints, such as " if len(names) > 1 else "the checkpoint "
    return f"{many}{shown(last, 200)}"


def _advice(kind: Standard) -> str:
    if kind == Standard():
        return "leave step_names out"
    given = [repr(kind.prefix)] if kind.prefix else []
    given += [f"digits={kind.digits}"] if kind.digits else []
    given += [f"separator={kind.separator!r}"] if kind.separator != "_" else []
    return f"pass step_names=ckpt.step_names.Standard({', '.join(given)})"


def _files_of_flax(location: str) -> list[str]:
    # Only here, since most programs never need it.
    from ckpt._interop.flax.checkpoint import is_named_like_flax

    try:
        with os.scandir(location) as found:
            files = [each.name for each in found if each.is_file()]
    except OSError:
        # It is a store.
        return []
    return [name for name in files if is_named_like_flax(name) and convention(name) is not None]


async def _roots_in(storage: Storage, folders: list[str]) -> list[str]:
    """Return which of these folders are roots, each with its steps."""
    found = []
    for name in [each for each in folders if each != "metadata"][:_MOST_FOLDERS]:
        # What cannot be listed is somebody else's.
        with contextlib.suppress(CheckpointError):
            root = open_beside(storage, f"{storage.location.rstrip('/')}/{name}")
            steps = sorted(int(each) for each in await root.step_dirs() if each.isdecimal())
            some = [str(step) for step in steps[-_MOST_FOLDERS:]]
            if any(await StepIndex(root).looked_at(some)):
                found.append(f"{shown(name, 200)} with {shortened(steps)}")
    return found
