"""Which files of a step are read: all, a random share of them, or what the time allows."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from msgspec import Struct

from ckpt._arguments import as_int, invalid, number_of_seconds
from ckpt.errors import InvalidArgumentError


class ReadLimits(Struct, frozen=True):
    """How much is read.

    Attributes:
        sample: The share of the files and of their bytes, from 0 to 1.
        seed: Makes the choice repeatable; None for another one each time.
        ends_at: When no more files are begun, by `time.monotonic`; None for never.
    """

    sample: float = 1.0
    seed: int | None = None
    ends_at: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether anything may be left out."""
        return self.sample < 1 or self.ends_at is not None


NO_LIMITS = ReadLimits()


def read_limits(
    deep: bool, sample: float | None, seed: int | None, deadline: float | None
) -> ReadLimits:
    """Return the limits that the arguments of `verify` amount to; the time begins now.

    Raises:
        InvalidArgumentError: One of them is invalid, or nothing is to be read.
    """
    given: object = sample
    if given is not None and (
        isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1
    ):
        raise invalid("sample", sample, "the share of the files to read, above 0 and up to 1")
    if seed is not None and as_int(seed) is None:
        raise invalid("seed", seed, "a whole number")
    if deadline is not None:
        deadline = number_of_seconds("deadline", deadline, zero=True)
    if not deep and (sample is not None or deadline is not None):
        raise InvalidArgumentError(
            "sample= and deadline= say how much is read, and with deep=False nothing is. Leave "
            "them out"
        )
    ends_at = None if deadline is None else time.monotonic() + deadline
    return ReadLimits(1.0 if sample is None else float(sample), as_int(seed), ends_at)


class FileSelection:
    """The files of one step that are to be read.

    With limits, they are read in random order, so that what is left out differs from call to call.

    Attributes:
        nbytes: The bytes of those that are to be read.
        order: Their places in the order in which they are read.
        left_out: The size of each that the limits leave out.
    """

    def __init__(self, sizes: Mapping[str, int], limits: ReadLimits, step: str) -> None:
        """Choose files.

        Args:
            sizes: The size in bytes of every file.
            limits: How much is read.
            step: What the choice depends on beside the seed: of many steps, not the same files.
        """
        self._sizes = sizes
        self._ends_at = limits.ends_at
        # The largest first, so that no lane is busy with a large one when the others have ended.
        chosen = sorted(sizes, key=lambda path: sizes[path], reverse=True)
        if limits.are_set:
            # No secret: a choice that can be repeated.
            choice = random.Random(None if limits.seed is None else f"{limits.seed} {step}")
            chosen = sorted(sizes)
            choice.shuffle(chosen)
            chosen = chosen[: self._count(chosen, limits.sample)]
        self.order = {path: place for place, path in enumerate(chosen)}
        self.nbytes = sum(sizes[path] for path in chosen)
        self.left_out = {path: size for path, size in sizes.items() if path not in self.order}
        self._begun: set[str] = set()

    def _count(self, shuffled: list[str], share: float) -> int:
        """Return how many files are that share, both of the files and of their bytes."""
        wanted = share * sum(self._sizes.values())
        count = nbytes = 0
        while count < len(shuffled) and (count < share * len(shuffled) or nbytes < wanted):
            nbytes += self._sizes[shuffled[count]]
            count += 1
        return count

    def begins(self, path: str) -> bool:
        """Tell whether a file is read now; if so, it counts as read."""
        if path in self._begun:
            return True
        if path not in self.order:
            return False
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.left_out[path] = self._sizes[path]
            return False
        self._begun.add(path)
        return True
