"""`Staging` and `Timeouts`: settings of a manager."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ckpt._arguments import instance_of, invalid, number_of_seconds, one_of, whole_number

StagingMode = Literal["auto", "copy", "view", "device"]
# Whose memory restored arrays have on CPU devices: jax's own, buffers that the library uses again,
# or the files themselves.
ArrayMemory = Literal["jax", "buffers", "files"]
# Whether vital signs are taken, and where: those of arrays on accelerators there, and all others on
# the host; all on the host; those of large arrays on their devices, on CPUs, too.
VitalSignsMode = bool | Literal["host", "device"]

# What a restore verifies beside the digests of what it reads.
VerifyMode = Literal["device"]

MIN_BUDGET_BYTES = 1 << 20
# A quarter of the machine's memory leaves room for the state itself, the input pipeline and the
# page cache that the writes go through.
_DEFAULT_SHARE = 4
# Cleaners ignore a longer lease: it must be a mistake.
LONGEST_LEASE_SECONDS = 7 * 86400.0
_LONGEST_EXIT_SECONDS = 365 * 86400.0
_LONGEST_COORDINATION_SECONDS = 86400.0
_OWN_SIZE = Path("/proc/self/statm")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Return how many bytes of memory this process may use at most."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        # The limit of a container; "max" means that there is none.
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    return total


def address_space() -> tuple[int, int] | None:
    """Return the limit of this process's address space and what is left of it, in bytes.

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
        budget_bytes: The most host memory, in bytes, that saves may hold beyond the state itself.
            A larger state is staged piece by piece as earlier pieces are written: `save()` then
            returns later, but never takes more memory. None is a quarter of the machine's memory,
            or of the address space that is left where that is limited (`ulimit -v`) and less.
        mode: `copy` copies every array into host memory before `save()` returns, so that the train
            step may donate its buffers at full speed; arrays of accelerators are on their way then,
            and a step that donates them begins when they have arrived. `device` copies arrays
            within device memory instead, which needs room there for a second copy until that has
            been written; small arrays and arrays of other kinds are copied to the host. `view`
            keeps references to the arrays of CPU devices and copies nothing, which suits arrays
            that are never donated; donating one later is safe, but the runtime then copies its
            buffer inside the train step. `auto` is `copy`. Numpy arrays are copied in every mode,
            since they can be changed in place.

    Raises:
        InvalidArgumentError: The budget is below 1 MiB, or the mode is unknown.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, staging=ckpt.Staging(budget_bytes=8 << 30))
        ```
    """

    budget_bytes: int | None = None
    mode: StagingMode = "auto"

    def __post_init__(self) -> None:
        if self.budget_bytes is not None:
            hint = " (1 MiB), in bytes; or None for a quarter of the machine's memory"
            budget = whole_number(
                "budget_bytes", self.budget_bytes, of="Staging", least=MIN_BUDGET_BYTES, hint=hint
            )
            object.__setattr__(self, "budget_bytes", budget)
        one_of("mode", self.mode, get_args(StagingMode), of="Staging")

    @property
    def effective_budget(self) -> int:
        """The budget in bytes, also where `budget_bytes` is None."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        most, space = host_memory_bytes(), address_space()
        if space is not None:
            # The budget is reserved as address space, and threads and arrays need some, too.
            most = min(most, space[1])
        return max(most // _DEFAULT_SHARE, MIN_BUDGET_BYTES)


def check_vital_signs(value: object) -> None:
    """Check that `value` is a `VitalSignsMode`."""
    if not isinstance(value, bool) and value not in ("host", "device"):
        raise invalid("vital_signs", value, "True, False, 'host' or 'device'")


def checks_devices(verify: object) -> bool:
    """Check that `verify` is None or a `VerifyMode`; return whether devices are checked."""
    if verify not in (None, *get_args(VerifyMode)):
        what = "'device' or None; digests are always compared"
        raise invalid("verify", verify, what)
    return verify is not None


def as_staging(given: Staging | StagingMode | None, default: StagingMode = "auto") -> Staging:
    """Return the staging that a caller means, also by the name of its mode alone."""
    if given is None or isinstance(given, str):
        return Staging(mode=given or default)
    staging = instance_of("staging", given, Staging)
    assert staging is not None
    return staging


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits, in seconds.

    Attributes:
        lease: How long the unfinished save of a process that vanished on another machine is left
            alone. Writers renew their lease several times in this time; the save of one that could
            not do so may be removed, and then fails.
        exit: How long interpreter exit waits for saves that are still under way. Those that have
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
