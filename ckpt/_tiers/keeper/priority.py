"""How much processor time a keeper gets beside the work of its trainer.

A niceness alone does little: a keeper is in a session of its own, and where Linux shares the
processors among sessions first (autogroups), it counts only within one. So the group is given the
same niceness.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# About a tenth of a processor that the trainer wants, too, and all of one that it leaves idle.
NICENESS = 10


def give_way(pid: int) -> None:
    """Let the trainer's work come before that of a keeper, which was started just now."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    _set_group(str(pid), NICENESS)


def hurry() -> None:
    """Let this keeper's work count as much as the trainer's: the end is near."""
    # The niceness of a process cannot be taken back, but that of its group can.
    _set_group("self", 0)


def _set_group(pid: str, niceness: int) -> None:
    # Not there in every system, and only a few times a second.
    with contextlib.suppress(OSError):
        Path("/proc", pid, "autogroup").write_text(str(niceness))
