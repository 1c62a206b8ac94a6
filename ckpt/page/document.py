"""The page: its data as records, and its document, in parts or as one file."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.json_values import json_text
from ckpt._inspection.leaf_records import summarize
from ckpt._inspection.listed_steps import RootLister
from ckpt._inspection.locations import Checkpoint, RunRoot
from ckpt._inspection.norms import NormReader
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
    leaves: list[Any]


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
        self._lister = RootLister(root)
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
            listing = await self._lister.read()
        timed: dict[str, dict[str, float]] = {}
        known: dict[tuple[str, object], dict[str, float]] = {}
        for each in reversed(listing.steps[-_MOST_TIMED:]):
            key = (each.name, each.committed)
            found = self._statistics.get(key)
            if found is None:
                found = await self._statistics_of(each.step)
            known[key] = timed[str(each.step)] = found
        self._statistics = known
        poll = _POLL_SECONDS_OF_STORES if "://" in self._root.location else _POLL_SECONDS
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
        return StepRecord(summary, summary.pop("leaves"))

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

    async def _statistics_of(self, number: int | None) -> dict[str, float]:
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


# In the order of execution: the last script shows the page.
SCRIPTS = ("norms.js", "page.js")
ASSETS = {"page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


class StaticData(msgspec.Struct, frozen=True):
    """The data of a page without a server.

    Attributes:
        run: The run.
        steps: The contents of some of its steps, by number.
        norms: The norms of its layers.
    """

    run: RunRecord
    steps: Mapping[str, StepRecord]
    norms: NormsRecord


def asset(name: str) -> str:
    """Return a file of the page."""
    return resources.files("ckpt.page").joinpath("assets", name).read_text(encoding="utf-8")


def served_page() -> str:
    """Return the page that requests its parts and data from a server."""
    parts = ['<link rel="stylesheet" href="page.css">']
    parts += [f'<script src="{name}" defer></script>' for name in SCRIPTS]
    return asset("page.html").replace("<!-- parts -->", "\n".join(parts))


def single_page(data: StaticData) -> str:
    """Return the page as one file, which needs neither a server nor a network."""
    style, scripts = asset("page.css"), [asset(name) for name in SCRIPTS]
    # In a script element, only "<" could end the data; the escape has the same meaning in JSON.
    encoded = json_text(data).replace("<", "\\u003c")
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src {allowed}"
    parts = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="data">{encoded}</script>\n'
    )
    page = asset("page.html").replace("<!-- parts -->", parts)
    elements = "".join(f"<script>{script}</script>\n" for script in scripts)
    return page.replace("</body>", f"{elements}</body>")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
