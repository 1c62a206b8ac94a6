"""Checkpoints of a root that has no steps: under other names, or one folder further down.

A run that mistook such a root for a new one would begin again from scratch, beside its own steps.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence

from msgspec import Struct

from ckpt._arguments import shown
from ckpt._redaction import redact
from ckpt._steps.index import StepIndex
from ckpt._steps.opened import shortened
from ckpt.errors import CheckpointError
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._resolve import open_beside

logger = logging.getLogger("ckpt")

_NUMBERED = re.compile(r"^(?:([A-Za-z][A-Za-z0-9_.-]*?)([_-]))?([0-9]{1,19})\Z")
# Words with which programs name steps, even in formats that are unknown here.
_STEP_WORDS = ("checkpoint", "ckpt", "epoch", "global_step", "iter", "step")
# The largest number of folders to look into: each takes a request to a store.
_MOST_FOLDERS = 16


def convention(name: str) -> Standard | None:
    """Return the naming convention if `name` can be the name of a step, or None."""
    found = _NUMBERED.match(name)
    if found is None:
        return None
    prefix, separator, number = found.groups()
    digits = len(number) if number[0] == "0" and len(number) > 1 else 0
    return Standard(prefix or "", digits, separator or "_")


class Misplaced(Struct, frozen=True):
    """The contents of a root without steps.

    Attributes:
        what: A description for messages: "2 checkpoints, such as 'step_20'".
        advice: Advice for the user of a manager.
        is_read: True if parts of the contents can be read.
    """

    what: str
    advice: str
    is_read: bool = True


async def say_misplaced(storage: Storage, index: StepIndex, *, raises: bool = False) -> None:
    """Warn once about the contents of a root without steps, and record them in `index`.

    Raises:
        StepNotFoundError: There are such contents, and `raises` is set.
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
    """Return the contents of a root in which nothing is a step; None if nothing looks like one.

    Args:
        storage: The root.
        names: The configured naming of its steps.
        step_dirs: The directories in the root.
    """
    folders = sorted(name for name in step_dirs if names.step(name) is None)
    named: dict[Standard, list[str]] = {}
    for name in folders:
        if (found := convention(name)) is not None:
            named.setdefault(found, []).append(name)
    for kind, each in sorted(named.items(), key=lambda item: -len(item[1])):
        if any(await StepIndex(storage, kind).looked_at(each[-_MOST_FOLDERS:])):
            return Misplaced(_list_names(each), f"To go on from there, {_advice(kind)}")
    roots = await _roots_in(storage, [name for name in folders if convention(name) is None])
    if roots:
        what = f"roots of steps in it: {'; '.join(roots)}"
        return Misplaced(what, "Give the path of one of them")
    odd = [each for kind, each in named.items() if kind.prefix in _STEP_WORDS]
    if odd:
        what = f"entries that are named like steps, such as {shown(odd[0][-1], 200)}"
        return Misplaced(what, "They hold no checkpoint that is read here", is_read=False)
    return None


def _list_names(names: list[str]) -> str:
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


async def _roots_in(storage: Storage, folders: list[str]) -> list[str]:
    """Return the folders that are roots of steps, as texts that name the steps."""
    found = []
    for name in [each for each in folders if each != "metadata"][:_MOST_FOLDERS]:
        # A folder that cannot be listed belongs to somebody else.
        with contextlib.suppress(CheckpointError):
            root = open_beside(storage, f"{storage.location.rstrip('/')}/{name}")
            steps = sorted(int(each) for each in await root.step_dirs() if each.isdecimal())
            some = [str(step) for step in steps[-_MOST_FOLDERS:]]
            if any(await StepIndex(root).looked_at(some)):
                found.append(f"{shown(name, 200)} with {shortened(steps)}")
    return found
