"""`Staging` and `Timeouts`: settings of a manager."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ckpt._arguments import instance_of, number_of_seconds, one_of, whole_number

OpenMode = Literal["a", "r+", "r"]
StagingMode = Literal["auto", "copy", "view", "device"]
BacklogPolicy = Literal["wait", "skip", "supersede"]
# Memory of restored arrays on CPU devices: jax's own, buffers that the library uses again, or the
# files themselves.
ArrayMemory = Literal["jax", "buffers", "files"]
IfExists = Literal["equal", "error", "skip", "replace"]
IfTaken = Literal["error", "replace"]

MIN_BUDGET_BYTES = 1 << 20
# A quarter of the machine's memory leaves room for the state itself, the input pipeline and the
# page cache that the writes go through.
_DEFAULT_SHARE = 4
# Longest lease that cleaners respect: a longer one must be a mistake.
LONGEST_LEASE_SECONDS = 7 * 86400.0
_LONGEST_EXIT_SECONDS = 365 * 86400.0
_LONGEST_COORDINATION_SECONDS = 86400.0
_OWN_SIZE = Path("/proc/self/statm")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Return the most bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        # The limit of a container; "max" means that there is none.
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return total


def address_space() -> tuple[int, int] | None:
    """Return the limit of this process's address space, and the rest of it, in bytes.

    None if there is no limit (RLIMIT_AS, `ulimit -v`).
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    used = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        used = int(_OWN_SIZE.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return limit, max(limit - used, 0)


@dataclass(frozen=True, slots=True)
class Staging:
    """How `save` takes a snapshot of arrays, and how much host memory it may use.

    Attributes:
        budget_bytes: The most host memory, in bytes, that saves may hold beyond the state itself. A
            larger state is staged piece by piece as earlier pieces are written: `save()` then
            returns later, but never takes more memory. None means a quarter of the machine's
            memory, or of the address space that is left if it is limited (`ulimit -v`) and less.
        mode: `copy` copies every array into host memory before `save()` returns, so that the train
            step may donate its buffers at full speed; arrays of accelerators are on their way then,
            and a step that donates them begins when they have arrived. `device` copies arrays
            within device memory instead, which needs room there for a second copy until that has
            been written; small arrays and arrays of other kinds are copied to the host. `view`
            keeps references to the arrays of CPU devices and copies nothing, which suits arrays
            that are never donated; donating one later is safe, but the runtime then copies its
            buffer inside the train step. `auto` is `copy`. Numpy arrays are copied in every mode,
            since they can be changed in place.
        backlog: What a save of a manager does while another one is under way. `wait` takes its
            snapshot meanwhile and commits after it; with two under way it first waits for the
            older. `skip` saves nothing and returns a falsy commit that says so. `supersede`
            replaces a save that has not begun to write, whose commit becomes falsy. (A save with
            `force=True` is never skipped.)

    Raises:
        InvalidArgumentError: The budget is below 1 MiB, or the mode or the backlog is unknown.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, staging=ckpt.Staging(budget_bytes=8 << 30))
        ```
    """

    budget_bytes: int | None = None
    mode: StagingMode = "auto"
    backlog: BacklogPolicy = "wait"

    def __post_init__(self) -> None:
        if self.budget_bytes is not None:
            hint = " (1 MiB), in bytes; or None for a quarter of the machine's memory"
            budget = whole_number(
                "budget_bytes", self.budget_bytes, of="Staging", least=MIN_BUDGET_BYTES, hint=hint
            )
            object.__setattr__(self, "budget_bytes", budget)
        one_of("mode", self.mode, get_args(StagingMode), of="Staging")
        one_of("backlog", self.backlog, get_args(BacklogPolicy), of="Staging")

    @property
    def effective_budget(self) -> int:
        """The budget in bytes, even if `budget_bytes` is None."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        most, space = host_memory_bytes(), address_space()
        if space is not None:
            # The budget is reserved as address space, and threads and arrays need some, too.
            most = min(most, space[1])
        return max(most // _DEFAULT_SHARE, MIN_BUDGET_BYTES)


def as_staging(given: Staging | StagingMode | None, default: StagingMode = "auto") -> Staging:
    """Return the staging that a caller passed, as such or by the name of its mode."""
    if isinstance(given, str):
        return Staging(mode=given)
    return instance_of("staging", given, Staging) or Staging(mode=default)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits, in seconds.

    Attributes:
        lease: How long the unfinished save of a process that vanished on another machine is left
            alone. Writers renew their lease several times in this time; the save of a writer that
            could not do so may be removed, and then fails.
        exit: How long interpreter exit waits for saves that are still under way. Saves that have
            not ended by then are given up, and the program ends with an error.
        coordination: How long a process of a job waits for another one that shows no sign of life,
            that is, neither arrives where it is expected nor moves any bytes. A process that is
            merely slow is waited for as long as it takes.
        restore: How long a restore waits for saves of the same manager that are under way.

    Raises:
        InvalidArgumentError: A limit is not a number of seconds above 0, `lease` is longer than a
            week, or `coordination` is longer than a day.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, timeouts=ckpt.Timeouts(coordination=300))
        ```
    """

    lease: float = 600.0
    exit: float = 600.0
    coordination: float = 60.0
    restore: float = 600.0

    def __post_init__(self) -> None:
        for name, most in (
            ("lease", LONGEST_LEASE_SECONDS),
            ("exit", _LONGEST_EXIT_SECONDS),
            ("coordination", _LONGEST_COORDINATION_SECONDS),
            ("restore", _LONGEST_EXIT_SECONDS),
        ):
            number_of_seconds(name, getattr(self, name), of="Timeouts", most=most)
