"""The scratch root of a drill: what managers use in the place of their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt._format.manifest_head import digest

if TYPE_CHECKING:
    from ckpt.keep._deletion import Deletion

# The folder of all scratch roots of a run, and the last step that the drill looks at.
ROOT_VARIABLE, LAST_VARIABLE = "CKPT_DRILL_ROOT", "CKPT_DRILL_LAST_STEP"


def in_scratch(
    root: Any, mode: str, trash: str | os.PathLike[str] | Deletion | None, tiers: Sequence[Any]
) -> tuple[Any, Any, Any, list[Any]]:
    """Return root, mode, trash and tiers of a manager in a drill, which harms none of them.

    Args:
        root: The root, as it was given: a path, a URL or a store.
        mode: How it is opened. With `"r"`, it is the scratch root if the program has made one, and
            else the real one.
        trash: The trash. One outside of the root is left out: steps are removed.
        tiers: The tiers; those on a storage are scratch folders, too.
    """
    near = [
        dataclasses.replace(each, path=_scratch(each.path)) if hasattr(each, "path") else each
        for each in tiers
    ]
    folder: Any = getattr(trash, "trash", trash)
    own = None if folder and os.path.isabs(folder) else trash
    scratch = _scratch(root)
    if mode == "r":
        return (scratch if scratch.exists() else root), mode, own, near
    return scratch, "a", own, near


def _scratch(place: Any) -> Path:
    """Return the scratch folder for a place; the same one in each run of the program."""
    names = [name for name in ("url", "location", "path") if hasattr(place, name)]
    text = str(getattr(place, names[0]) if names else os.fspath(place))
    if "://" not in text:
        text = os.path.abspath(text)
    name = text.rstrip("/").rpartition("/")[2] or "root"
    return Path(os.environ[ROOT_VARIABLE], f"{name}-{digest(text.encode())[:8]}")
