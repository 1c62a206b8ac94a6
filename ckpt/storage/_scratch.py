"""Scratch folders: in a drill, they take the place of all that a program opens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

# The folder of all scratch folders of a run; the path of a place is repeated below it.
ROOT_VARIABLE = "CKPT_DRILL_ROOT"

Place = TypeVar("Place")


def in_scratch(place: Place, *, reads: bool) -> Place | Path:
    """Return where a place is opened in a drill: its scratch folder.

    Args:
        place: A path, or a store with its `url`, `text` or `location`.
        reads: True for a place that is only read: it is the real one until the program has written
            to its scratch folder.
    """
    top = os.environ[ROOT_VARIABLE]
    if isinstance(place, Path):
        text = os.path.abspath(place)
        if Path(text).is_relative_to(top):
            return place
        scheme = "file"
    else:
        names = [name for name in ("url", "text", "location") if hasattr(place, name)]
        scheme, _, text = str(getattr(place, names[0])).rpartition("://")
    keys = [key for key in text.split("/") if key not in ("", ".", "..")]
    scratch = Path(top, scheme or "store", *keys)
    return place if reads and not scratch.exists() else scratch
