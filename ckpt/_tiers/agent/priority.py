"""The processor time of an agent beside the work of its trainer.

A niceness alone does little: an agent is in a session of its own, and where Linux first shares the
processors among sessions (autogroups), niceness counts only within a session. So the group gets the
same niceness.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# An agent gets about a tenth of a processor that the trainer wants, too, and all of an idle one.
NICENESS = 10


def lower_priority(pid: int) -> None:
    """Put the trainer's work before that of an agent, which was just started."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    _set_group(str(pid), NICENESS)


def restore_priority() -> None:
    """Make this agent's work count as much as the trainer's: the end is near."""
    # The niceness of a process cannot be taken back, but that of its group can.
    _set_group("self", 0)


def _set_group(pid: str, niceness: int) -> None:
    # Not every system has autogroups, and the kernel allows only a few changes per second.
    with contextlib.suppress(OSError):
        Path("/proc", pid, "autogroup").write_text(str(niceness))
