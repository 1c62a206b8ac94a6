"""Small frozen value objects that configure a manager."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ckpt.errors import InvalidArgumentError

__all__ = [
    "LONGEST_LEASE_SECONDS",
    "Staging",
    "StagingMode",
    "Timeouts",
    "host_memory_bytes",
]

StagingMode = Literal["auto", "copy", "view", "device"]

MIN_BUDGET_BYTES = 1 << 20
# A quarter of the machine's memory leaves room for the state itself, the input pipeline and the
# page cache that the writes go through.
_DEFAULT_SHARE = 4
# Cleaners take a lease for longer than this for somebody's mistake.
LONGEST_LEASE_SECONDS = 7 * 86400.0
_LONGEST_EXIT_SECONDS = 365 * 86400.0
_LONGEST_COORDINATION_SECONDS = 86400.0
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Return the bytes of memory that this process may have, at most."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        # In a container the machine's memory is not ours; "max" means that it is.
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return total


@dataclass(frozen=True, slots=True)
class Staging:
    """How array data gets from devices to host memory the library owns.

    Attributes:
        budget_bytes: Upper bound, in bytes, of the host memory a save may hold beyond the state
            itself. A state larger than the budget is staged as earlier parts are written, so
            `save()` returns later; it never takes more memory. None is a quarter of the machine's
            memory.
        mode: `copy` copies every array into the library's own host memory before `save()` returns,
            so that the train step may donate its buffers at full speed. `device` copies arrays
            within device memory instead, which is many times faster on accelerators and needs room
            there for a second copy until it has been written; small arrays and arrays of other
            kinds are copied to the host. `view` keeps references to the arrays of CPU devices and
            copies nothing: right for arrays that are never donated; a later donation stays safe,
            but the runtime then copies the buffer inside the train step. `auto` is `copy`. Numpy
            arrays are copied to the library's memory in every mode, since they can be changed in
            place.

    Raises:
        InvalidArgumentError: The budget is below 1 MiB or the mode is unknown.
    """

    budget_bytes: int | None = None
    mode: StagingMode = "auto"

    def __post_init__(self) -> None:
        budget = self.budget_bytes
        if budget is not None and (type(budget) is not int or budget < MIN_BUDGET_BYTES):
            raise InvalidArgumentError(
                f"Staging(budget_bytes={budget!r}): expected a whole number of bytes, at least "
                f"{MIN_BUDGET_BYTES} (1 MiB), or None for a quarter of the machine's memory"
            )
        if self.mode not in get_args(StagingMode):
            raise InvalidArgumentError(
                f"Staging(mode={self.mode!r}): expected one of {', '.join(get_args(StagingMode))}"
            )

    @property
    def effective_budget(self) -> int:
        """The budget in bytes, with the default worked out."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return max(host_memory_bytes() // _DEFAULT_SHARE, MIN_BUDGET_BYTES)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long is waited for what may never come, in seconds.

    Attributes:
        lease: How long the attempts of a writer that has vanished on another machine are left
            alone. The writer renews its lease several times in this while; one that could not for
            longer may find its attempt removed, and its save then fails.
        exit: How long interpreter exit waits for saves that nobody waited for. Those that have not
            ended by then are given up, and the program ends with an error.
        coordination: How long a process of a job waits for another that gives no sign of life: that
            neither comes to where it is waited for nor moves any bytes. One that is slow is waited
            for as long as it takes.

    Raises:
        InvalidArgumentError: One of them is no number of seconds above 0, a lease is longer than a
            week, or a wait for another process longer than a day.
    """

    lease: float = 600.0
    exit: float = 600.0
    coordination: float = 60.0

    def __post_init__(self) -> None:
        for name, most in (
            ("lease", LONGEST_LEASE_SECONDS),
            ("exit", _LONGEST_EXIT_SECONDS),
            ("coordination", _LONGEST_COORDINATION_SECONDS),
        ):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not is_number or not 0 < seconds <= most:
                shown = "a number" if is_number and seconds > most else repr(seconds)
                raise InvalidArgumentError(
                    f"Timeouts({name}={shown:.80}): expected a number of seconds above 0 and up to "
                    f"{most:.0f}"
                )
