"""A save that all processes of a job make together, as one of them sees it.

The primary begins the attempt and tells the others its id; every process writes the chunks that are
its own; the primary gathers what was written where, writes the manifest over all of it, publishes,
and tells the others how that ended. So a process waits at most twice: the primary for the reports,
the others for the id of the attempt and for the outcome.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from ckpt._format.manifest import (
    FileEntry,
    ItemEntry,
    Manifest,
    decode,
    encode,
)
from ckpt._plan.multihost.write_reports import ProcessReport, pack, unpack
from ckpt._plan.ownership import ProcessGroup
from ckpt.coordination._beats import beating
from ckpt.coordination._operation import Operation
from ckpt.coordination._single import SingleProcess
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    CoordinationTimeoutError,
    located,
)

__all__ = ["MultihostSave", "WriteReport", "same_items"]

logger = logging.getLogger("ckpt")


@dataclass(slots=True)
class WriteReport:
    """What one process has written of a step.

    Attributes:
        entries: What the handlers made of its items, by name.
        trees: Of the items that are trees which chunks it has written where, by name.
        files: Size and digest of every file that it has written.
    """

    entries: dict[str, ItemEntry] = field(default_factory=dict)
    trees: dict[str, ProcessReport] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


class MultihostSave:
    """A save of all processes of a job. With one process nothing here waits."""

    def __init__(
        self,
        operation: Operation,
        team: ProcessGroup,
        budget_bytes: int,
        advance: Callable[[int], None] | None = None,
        then: Operation | None = None,
    ) -> None:
        """Save together with the processes that take part in `operation`.

        Args:
            operation: What they do together.
            team: Which of them this is.
            budget_bytes: The staging budget that all of them have.
            advance: Called with the bytes that were written; None tells `operation` alone.
            then: The part of it in which each publishes on a disk of its own.
        """
        self._then = then
        self.whole = operation
        self.operation = operation
        self.team = team
        self.budget_bytes = budget_bytes
        self.advance = advance or operation.advance
        self._begun: dict[str, Any] | None = None
        self._settled: BaseException | None = None
        self._telling = False
        self._decided = False
        self._hearing = anyio.Lock()

    @classmethod
    def alone(cls, budget_bytes: int) -> MultihostSave:
        """Return the save of a process that has no others."""
        operation = Operation(SingleProcess().key_values(), 0, 1, "", "", 0.0)
        return cls(operation, ProcessGroup(0, 1), budget_bytes)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.team.count == 1

    @property
    def leads(self) -> bool:
        """Whether this process decides for all."""
        return self.team.index == 0

    @property
    def own_disks(self) -> bool:
        """Whether every process has a root of its own."""
        return not self.is_alone and self.team.mode == "local"

    @property
    def publishes(self) -> bool:
        """Whether this process begins an attempt, and publishes it."""
        return self.leads or self.own_disks

    @contextlib.asynccontextmanager
    async def watched(self, *, hears: bool = False) -> AsyncIterator[None]:
        """Run the body, and cancel it as soon as another process has failed.

        Args:
            hears: Whether the body is going to ask for `refusal`: it is waited for from now on.

        Raises:
            CheckpointError: What the other process has failed with.
        """
        if self.is_alone:
            yield
            return
        with located():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                if hears and not self.leads:
                    tasks.start_soon(self._hear)
                yield
                tasks.cancel_scope.cancel()

    async def _hear(self) -> None:
        try:
            await self.refusal()
        except CheckpointError as error:
            # First, since the body only hears that it is cancelled.
            await self.settle(error)
            raise

    async def _watch(self) -> None:
        try:
            await self.operation.watch()
        except CheckpointError as error:
            if self._telling:
                # The save has failed here, and what is heard may be that; it ends with its own.
                await anyio.sleep_forever()
            if not isinstance(error, CoordinationError):
                raise
            if not self._decided:
                # First, since the rest of the save only hears that it is cancelled.
                await self.settle(error)
                raise
            # It is going to be published, whatever becomes of the others.
            logger.warning("the other processes cannot be reached any more: %s", error)
            await anyio.sleep_forever()

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Let the others know that this process lives while it moves no bytes, for a while."""
        if self.is_alone:
            yield
            return
        async with beating(self.operation, self.advance):
            yield

    async def refuse(self, reason: str) -> None:
        """Tell the others that there is no save."""
        if not self.is_alone:
            await self._lead({"refusal": reason})
            # Nobody waits any more for what goes wrong.
            await self.operation.decide()

    async def begin(self, attempt: str, created_ns: int) -> None:
        """Tell the others the id of the attempt, and when the save began."""
        if not self.is_alone:
            await self._lead({"attempt": attempt, "created": created_ns})

    async def _lead(self, begun: dict[str, Any]) -> None:
        await self.operation.lead(json.dumps(begun).encode())

    async def refusal(self) -> str | None:
        """Return why the primary does not save, or None if it does; waits for it."""
        async with self._hearing:
            if self._begun is None:
                self._begun = json.loads(await self.operation.lead(None))
        found: str | None = self._begun.get("refusal")
        return found

    async def begun(self) -> tuple[str, int]:
        """Return the id of the attempt that the primary has begun, and when; waits for it.

        Raises:
            CoordinationError: The primary does not save.
        """
        refusal = await self.refusal()
        if refusal is not None:
            raise CoordinationError(
                f"process {self.team.index} saves this step, and process 0 does not: {refusal}. "
                "Give all processes the same policy, and the same force="
            )
        assert self._begun is not None
        return str(self._begun["attempt"]), int(self._begun["created"])

    async def report(self, own: WriteReport) -> list[WriteReport] | None:
        """Tell the primary what this process has written, or is ready to publish.

        Returns:
            On the primary what every process has written, by number; elsewhere None.
        """
        if self.is_alone:
            return [own]
        packed = await anyio.to_thread.run_sync(_pack, own)
        every = await self.operation.report(packed)
        if every is None:
            return None
        return await anyio.to_thread.run_sync(lambda: [_unpack(each) for each in every])

    async def settle(self, error: BaseException) -> BaseException:
        """Tell the others that this process has failed; return what all of them raise. Idempotent.

        A cancellation stays what it is here.
        """
        if self._settled is None:
            self._telling = True
            told: BaseException = error
            if not isinstance(error, Exception):
                told = CommitCancelledError("the save was cancelled")
            found = await self.operation.settle(told)
            if self._then is not None and self.whole.is_decided and self.operation is self.whole:
                # The others are about to publish, or have: they would wait for this process.
                await self._then.fail(told)
            self._settled = error if found is told else found
        return self._settled if isinstance(error, Exception) else error

    async def decide(self) -> None:
        """Say that the step is going to be published; no other process can prevent it any more.

        Raises:
            CheckpointError: What another process has failed with before.
        """
        await self.operation.decide()
        self._decided = True

    async def ready(self) -> None:
        """Wait until all processes are ready to publish, each on its own disk.

        Raises:
            CheckpointError: What another process has failed with.
            CoordinationTimeoutError: One gives no sign of life.
        """
        assert self._then is not None
        if self.leads:
            await self.operation.decide()
        await self.operation.conclude(b"" if self.leads else None)
        # Whoever fails from here on fails this.
        self.operation = self._then

    async def published(self) -> None:
        """Say that this process has published, and wait until all have.

        Raises:
            CheckpointError: What another process has failed with.
            CoordinationTimeoutError: One gives no sign of life.
        """
        async with self.watched():
            if await self.operation.report(b"") is not None:
                await self.operation.decide()
            await self.operation.conclude(b"" if self.leads else None)

    async def conclude(self, manifest: Manifest) -> None:
        """Tell the others that the step is published; that it cannot be told, does not undo it."""
        if self.is_alone:
            return
        try:
            await self.operation.conclude(encode(_summary(manifest)))
        except CoordinationError as error:
            logger.warning("step %s is saved, and the others do not know: %s", manifest.step, error)

    async def outcome(self) -> Manifest:
        """Return what the primary has published, without leaves and files; waits for it.

        Cancellation: ends the save of all processes, unless the primary is publishing it; then that
        is waited for.
        """
        try:
            told = await self.operation.conclude(None)
        except anyio.get_cancelled_exc_class():
            if self._settled is not None:
                raise
            with anyio.CancelScope(shield=True):
                if await self.operation.fail(CommitCancelledError("the save was cancelled")):
                    raise
                told = await self.operation.conclude(None)
        except CoordinationTimeoutError as error:
            if 0 in error.missing:
                error.add_note("the step may be there all the same: look for it after a restart")
            raise
        return decode(told, where="the outcome")


def _summary(manifest: Manifest) -> Manifest:
    items = {
        name: ItemEntry(handler=item.handler, nbytes=item.nbytes)
        for name, item in manifest.items.items()
    }
    return manifest.model_copy(update={"items": items, "files": {}})


def _pack(report: WriteReport) -> bytes:
    trees = {name: pack(tree) for name, tree in report.trees.items()}
    head = {
        "entries": {name: each.model_dump(mode="json") for name, each in report.entries.items()},
        "files": {path: [each.size, each.digest] for path, each in report.files.items()},
        "trees": {name: len(data) for name, data in trees.items()},
    }
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *trees.values()))


def _unpack(data: bytes) -> WriteReport:
    """Return the report whose bytes are `data`.

    Raises:
        CoordinationError: It is not understood.
        CorruptCheckpointError: The report on a tree in it is not whole.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        head = json.loads(data[8:start])
        entries = {name: ItemEntry.model_validate(each) for name, each in head["entries"].items()}
        files = {
            path: FileEntry(size=size, digest=text) for path, (size, text) in head["files"].items()
        }
        lengths = {name: int(length) for name, length in head["trees"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CoordinationError(
            f"what a process tells of its save is not understood ({data[8:88]!r}); all processes of"
            " a job have to run the same version of this library"
        ) from error
    trees = {}
    for name, length in lengths.items():
        trees[name] = unpack(data[start : start + length])
        start += length
    return WriteReport(entries, trees, files)


def same_items(reports: Sequence[WriteReport]) -> None:
    """Raise unless all processes have saved the same items.

    Raises:
        CoordinationError: They have not; says which process has which.
    """
    first = _handlers(reports[0])
    for index, report in enumerate(reports):
        if _handlers(report) != first:
            raise CoordinationError(
                f"process 0 saved the items {_listed(first)}, and process {index} "
                f"{_listed(_handlers(report))}: all processes must save the same items"
            )


def _handlers(report: WriteReport) -> Mapping[str, str]:
    """Return by which handler each item was saved, and whether as a tree."""
    return {
        name: entry.handler + ", a tree" * (name in report.trees)
        for name, entry in report.entries.items()
    }


def _listed(handlers: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({handler:.60})" for name, handler in handlers.items()) or "none"
