"""The selection of files to read: all, a random share, or as many as the time allows."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from msgspec import Struct

from ckpt._arguments import as_int, invalid, number_of_seconds
from ckpt.errors import InvalidArgumentError


class ReadLimits(Struct, frozen=True):
    """The limits of a read.

    Attributes:
        sample: The share of the files and of their bytes, from 0 to 1.
        seed: Seed of a repeatable choice; None for another choice each time.
        ends_at: Time after which no more files are begun, by `time.monotonic`; None for no limit.
    """

    sample: float = 1.0
    seed: int | None = None
    ends_at: float | None = None

    @property
    def are_set(self) -> bool:
        """True if a file may be left out."""
        return self.sample < 1 or self.ends_at is not None


NO_LIMITS = ReadLimits()


def read_limits(
    deep: bool, sample: float | None, seed: int | None, timeout: float | None
) -> ReadLimits:
    """Return the limits that the arguments of `verify` mean; the time begins now.

    Raises:
        InvalidArgumentError: An argument is invalid, or nothing would be read.
    """
    given: object = sample
    if given is not None and (
        isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1
    ):
        raise invalid("sample", sample, "the share of the files to read, above 0 and up to 1")
    if seed is not None and as_int(seed) is None:
        raise invalid("seed", seed, "a whole number")
    if timeout is not None:
        timeout = number_of_seconds("timeout", timeout, zero=True)
    if not deep and (sample is not None or timeout is not None):
        raise InvalidArgumentError(
            "sample= and timeout= say how much is read, and with deep=False nothing is. Leave "
            "them out"
        )
    ends_at = None if timeout is None else time.monotonic() + timeout
    return ReadLimits(1.0 if sample is None else float(sample), as_int(seed), ends_at)


class FileSelection:
    """The files of one step that are to be read.

    With limits they are read in random order, so that the omitted files differ from call to call.

    Attributes:
        nbytes: Bytes of the files to read.
        order: Place of each file to read in the order of reading.
        left_out: Size of each file that the limits leave out.
    """

    def __init__(self, sizes: Mapping[str, int], limits: ReadLimits, step: str) -> None:
        """Choose files.

        Args:
            sizes: The size in bytes of every file.
            limits: The limits of the read.
            step: Second input of the choice beside the seed, so that it differs between steps.
        """
        self._sizes = sizes
        self._ends_at = limits.ends_at
        # The largest first, so that no lane is busy with a large one when the others have ended.
        chosen = sorted(sizes, key=lambda path: sizes[path], reverse=True)
        if limits.are_set:
            # The choice is no secret, and has to be repeatable.
            choice = random.Random(None if limits.seed is None else f"{limits.seed} {step}")
            chosen = sorted(sizes)
            choice.shuffle(chosen)
            chosen = chosen[: self._count(chosen, limits.sample)]
        self.order = {path: place for place, path in enumerate(chosen)}
        self.nbytes = sum(sizes[path] for path in chosen)
        self.left_out = {path: size for path, size in sizes.items() if path not in self.order}
        self._begun: set[str] = set()

    def _count(self, shuffled: list[str], share: float) -> int:
        """Return the number of files that make up a share, both of all files and of their bytes."""
        wanted = share * sum(self._sizes.values())
        count = nbytes = 0
        while count < len(shuffled) and (count < share * len(shuffled) or nbytes < wanted):
            nbytes += self._sizes[shuffled[count]]
            count += 1
        return count

    def begins(self, path: str) -> bool:
        """Return True if a file is to be read now; then it counts as read."""
        if path in self._begun:
            return True
        if path not in self.order:
            return False
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.left_out[path] = self._sizes[path]
            return False
        self._begun.add(path)
        return True
