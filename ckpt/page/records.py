"""The data of the page as records; the data of a step that was read once is kept."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.leaf_records import LeafRecord, leaf_records
from ckpt._inspection.listed_steps import list_root
from ckpt._inspection.locations import Checkpoint, RunRoot
from ckpt._inspection.norms import NormReader
from ckpt._inspection.summary import summarize
from ckpt.errors import CheckpointError, StorageError

# Number of the newest steps for which the page shows the times of the save.
_MOST_TIMED = 100
# Limits of the steps and layers in the chart and the table of norms.
_MOST_NORM_STEPS, _MOST_LAYERS = 64, 200
# Longer for stores, since a bucket charges for every list.
_POLL_SECONDS, _POLL_SECONDS_OF_STORES = 2.0, 20.0


class RunRecord(Struct, frozen=True):
    """A run in the form of the page.

    Numbers of steps are texts, also in the listing: a browser has no integers above 2^53.

    Attributes:
        listing: Its steps: a `RootListing`.
        statistics: Seconds that the newest saves spent on each activity, by step.
        poll_seconds: Interval at which the page asks again; 0 for a page that does not change.
    """

    listing: dict[str, Any]
    statistics: dict[str, dict[str, float]]
    poll_seconds: float


class StepRecord(Struct, frozen=True):
    """One step in the form of the page.

    Attributes:
        summary: Summary of the step: a `CheckpointSummary`, with its metadata as JSON.
        leaves: Its leaves.
    """

    summary: dict[str, Any]
    leaves: list[LeafRecord]


class NormsRecord(Struct, frozen=True):
    """The norms of layers over steps in the form of the page.

    Attributes:
        table: A `NormTable`, with only the first of its layers.
        layers: Number of all layers.
    """

    table: dict[str, Any]
    layers: int


class RunReader:
    """Reads one root for the page. Its coroutines may run on any event loop, one at a time."""

    def __init__(self, root: RunRoot) -> None:
        self._root = root
        # By step directory and time of commit, since a step may be saved again.
        self._statistics: dict[tuple[str, object], dict[str, float]] = {}
        self._norms = NormReader(root, most=_MOST_NORM_STEPS)

    @property
    def location(self) -> str:
        """Path or URL of the root."""
        return self._root.location

    async def run(self, *, is_live: bool = True) -> RunRecord:
        """Return the run as it is now.

        Raises:
            StorageError: The root cannot be read, or is gone.
        """
        with self._saying_gone():
            listing = await list_root(self._root)
        timed: dict[str, dict[str, float]] = {}
        known: dict[tuple[str, object], dict[str, float]] = {}
        for each in reversed(listing.steps[-_MOST_TIMED:]):
            key = (each.name, each.committed)
            found = self._statistics.get(key)
            if found is None:
                found = await self._statistics_of(each.step)
            known[key] = timed[str(each.step)] = found
        self._statistics = known
        is_store = "://" in self._root.location
        poll = _POLL_SECONDS_OF_STORES if is_store else _POLL_SECONDS
        shown = msgspec.to_builtins(listing)
        _write_out(shown["steps"], shown["unreadable"], shown["attempts"])
        return RunRecord(shown, timed, poll if is_live else 0.0)

    async def step(self, number: int) -> StepRecord:
        """Return one step.

        Raises:
            StepNotFoundError: There is no such step.
            CorruptCheckpointError: Its manifest is damaged.
        """
        opened = await self._root.index.found(number)
        checkpoint = Checkpoint(self._root.storage, opened)
        summary = msgspec.to_builtins(summarize(checkpoint))
        _write_out([summary])
        if summary["metadata"] is not None:
            # As text: its numbers may be as large, and its texts may be anything that JSON has.
            summary["metadata"] = json.dumps(
                summary["metadata"], ensure_ascii=False, separators=(",", ":")
            )
        return StepRecord(summary, list(leaf_records(opened.manifest)))

    async def norms(self) -> NormsRecord:
        """Return the norms of layers over steps, evenly chosen steps if there are many.

        Raises:
            StorageError: The root cannot be read, or is gone.
        """
        with self._saying_gone():
            found = await self._norms.read()
        shown = msgspec.to_builtins(replace(found, layers=found.layers[:_MOST_LAYERS]))
        for name in ("steps", "unknown", "unreadable", "nonfinite"):
            shown[name] = [str(step) for step in shown[name]]
        return NormsRecord(shown, len(found.layers))

    @contextlib.contextmanager
    def _saying_gone(self) -> Iterator[None]:
        """Raise an error that says that the root is gone, if that is the reason."""
        try:
            yield
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise StorageError(
                f"{self.location} is gone: it was deleted, moved or renamed since this page was "
                "opened. If it comes back, the page goes on",
                errno=errno.ENOENT,
            ) from error

    async def _statistics_of(self, number: int) -> dict[str, float]:
        try:
            return dict((await self._root.index.found(number)).manifest.statistics)
        except CheckpointError:
            # The step was deleted or damaged after the listing; the next one shows it.
            return {}


def _write_out(*lists: Sequence[dict[str, Any]]) -> None:
    """Convert the numbers of steps to texts."""
    for records in lists:
        for each in records:
            each["step"] = str(each["step"])
