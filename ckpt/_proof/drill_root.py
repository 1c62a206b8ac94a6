"""What a manager does differently in a drill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt._settings import OpenMode
    from ckpt.keep._deletion import Deletion

    Trash = str | os.PathLike[str] | Deletion | None

# The last step that the drill looks at.
LAST_VARIABLE = "CKPT_DRILL_LAST_STEP"


def in_drill(mode: OpenMode, trash: Trash) -> tuple[OpenMode, Trash]:
    """Return mode and trash of a manager in a drill.

    A scratch root is empty at first, so it is made where `"r+"` expects one. A trash outside of the
    root is left out: steps are removed.
    """
    folder: Any = getattr(trash, "trash", trash)
    return "r" if mode == "r" else "a", None if folder and os.path.isabs(folder) else trash
