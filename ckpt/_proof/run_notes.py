"""Notes on the run of a step, which are true of whatever is made of the step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger("ckpt")

CONTRACT_NOTE = "contract"
_OF_RUNS = frozenset({CONTRACT_NOTE})


def notes_on_run(noted: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return the notes that stay with what is made of a step; warn of those that do not.

    Args:
        noted: What extensions have said of the step.
        known: Extensions that say it anew.
    """
    lost = sorted(noted.keys() - {*known, *_OF_RUNS})
    if lost:
        logger.warning(
            "what the extension %s has noted of the step is not in the new one, whose leaves are "
            "written anew or are not the same",
            " and ".join(f"{name!r:.60}" for name in lost[:3]),
        )
    return {name: note for name, note in noted.items() if name in _OF_RUNS}
