"""The keeper's process: `python -m ckpt._tiers.keeper SOCKET ALARM`, started by the trainer."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.keeper.flush import Hurry, flush
from ckpt._tiers.keeper.flush_of_job import JobPart, flush_of_job
from ckpt._tiers.keeper.links import Links, linked
from ckpt._tiers.keeper.messages import (
    Claimed,
    Close,
    Closed,
    Closing,
    Fetch,
    FetchPart,
    Flushed,
    Forget,
    FromKeeper,
    Listen,
    Moved,
    Saved,
    Setup,
    Snapshots,
    Step,
    ToKeeper,
    encoded,
    for_keeper,
    place_of_json,
)
from ckpt._tiers.keeper.peers import PeerParts
from ckpt._tiers.keeper.priority import hurry
from ckpt._tiers.shared_folder import claim_of, take_abandoned
from ckpt.errors import CheckpointError
from ckpt.storage._base import Storage
from ckpt.storage._resolve import open_root

_PIECE = 1 << 16
# Where the system cannot say when a process dies, and between two looks for a new trainer.
_LOOK_SECONDS = 0.5
# A store that fails is tried again; after a death nothing else saves the snapshot.
_TRIES, _PAUSE_SECONDS = 6, 5.0
# So often while the snapshot waits for another trainer.
_LATER_SECONDS = 60.0
# After this the output of a trainer is closed, though keepers still wait for each other.
_HUSH_SECONDS = 30.0


class Keeper:
    """What the keeper knows. Used on its event loop."""

    # what comes                       what it does
    # -------------------------------  ----------------------------------------------------------
    # `Step`                           copies it on, from its tier to the next place
    # `Fetch`                          copies it to the nearest tier, from a farther place
    # `Saved`                          notes which snapshots need not be written any more
    # `Listen`, `FetchPart`, `Forget`  see `PeerParts`
    # the number of a signal           writes the last snapshot, while the trainer may be stuck
    # SIGTERM, to itself               the same
    # the trainer dies                 writes the last snapshot, waits for a trainer that is
    #                                  started again, gives the memory back, and ends
    # `Close`                          writes the last snapshot if that is asked for, or if a
    #                                  signal came, and ends

    def __init__(
        self, setup: Setup, trainer: socket.socket, alarm: socket.socket, links: Links
    ) -> None:
        """Watch the trainer of `setup`, which is told things over a socket; `alarm` has signals."""
        self._setup = setup
        self._trainer = trainer
        self._alarm = alarm
        self._links = links
        self._target: Storage = open_root(place_of_json(setup.root))
        # The snapshots, once the trainer owns them.
        self._snapshots: Snapshots | None = None
        self._claim = ""
        self._newest = -1
        self._rate: float | None = None
        self._noticed_at: float | None = None
        self._flushing = anyio.Lock()
        self._peers = PeerParts(self.tell)
        # Set when the trainer has died, and when it has closed the keeper.
        self._is_over = anyio.Event()
        self._close: Close | None = None

    async def run(self, rest: bytes) -> None:
        """Watch until the trainer has ended, and do what is left then."""
        # What is being written when the trainer ends is written to its end.
        async with anyio.create_task_group() as writes, anyio.create_task_group() as watches:
            await watches.start(self._peers.run)
            watches.start_soon(self._watch_trainer)
            writes.start_soon(self._hear, rest)
            watches.start_soon(self._watch_alarm, writes)
            watches.start_soon(self._watch_signals, writes)
            await self._is_over.wait()
            watches.cancel_scope.cancel()
        if self._close is None:
            await self._end_alone()
        else:
            await self._end_well()

    async def _end_well(self) -> None:
        """The trainer has closed this keeper: write what is left while it waits for that."""

        async def write(ends_at: float | None) -> None:
            if self._writes_at_close:
                self.tell(await self._flush(ends_at) or Flushed(-1))

        async with anyio.create_task_group() as tasks:
            if self._snapshots is not None and self._snapshots.is_of_job:
                # The other processes may have had no signal, and their keepers do not come.
                tasks.start_soon(write, self._ends_at())
            else:
                await write(None)
            left = await self._links.finish(self._setup.exit_seconds)
        self.tell(Closed(tuple(left)))

    async def _end_alone(self) -> None:
        """The trainer has died: write what is left, and give its memory back in the end."""
        snapshots = self._snapshots
        if snapshots is not None and snapshots.is_of_job:
            ends = time.monotonic() + snapshots.kept_seconds
            if await self._write_with_others(snapshots, ends):
                _close_output()
                # What not all have written in this time is of no use any more.
                await self._keep_memory(snapshots, ends, is_left=False)
            return
        is_left = await self._write_alone()
        # A reader of the trainer's output waits until every process has closed it.
        _close_output()
        if snapshots is not None:
            ends = time.monotonic() + snapshots.kept_seconds
            await self._keep_memory(snapshots, ends, is_left=is_left)

    async def _write_alone(self) -> bool:
        """Write the last snapshot; tell whether that is still to be done."""
        done = None
        for turn in range(_TRIES):
            done = await self._flush(self._ends_at())
            if done is not None:
                self._say_written(done)
            if done is None or not done.problem:
                break
            if turn < _TRIES - 1:
                await anyio.sleep(_PAUSE_SECONDS)
        await self._finish_links()
        return done is not None and bool(done.problem)

    async def _write_with_others(self, snapshots: Snapshots, ends: float) -> bool:
        """Write the last snapshot of a job with all keepers; False if a trainer is back."""

        async def write() -> None:
            said = ""
            while True:
                done = await self._flush(ends)
                if done is None:
                    return
                if done.problem != said or not done.problem:
                    self._say_written(done)
                said = done.problem
                if not said or time.monotonic() + _PAUSE_SECONDS >= ends:
                    return
                # A storage that fails is tried again.
                await anyio.sleep(_PAUSE_SECONDS)

        async def hush() -> None:
            # The others may not end for a long time, and a reader of the output waits.
            await anyio.sleep(_HUSH_SECONDS)
            _close_output()

        is_back = False

        async def look() -> None:
            nonlocal is_back
            while not is_back:
                await anyio.sleep(_LOOK_SECONDS)
                is_back = await run_in_thread(_is_owned_again, Path(snapshots.folder), self._claim)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hush)
            tasks.start_soon(look)
            async with anyio.create_task_group() as works:
                works.start_soon(write)
                works.start_soon(self._finish_links)
            tasks.cancel_scope.cancel()
        return not is_back

    async def _keep_memory(self, snapshots: Snapshots, ends: float, *, is_left: bool) -> None:
        """Wait for a trainer that is started again, and give the memory back if none comes."""
        folder, next_try = Path(snapshots.folder), time.monotonic() + _LATER_SECONDS
        while time.monotonic() < ends:
            await anyio.sleep(_LOOK_SECONDS)
            if await run_in_thread(_is_owned_again, folder, self._claim):
                return
            if is_left and time.monotonic() >= next_try:
                # Of a store that was away for longer.
                done = await self._flush(None)
                is_left = done is not None and bool(done.problem)
                next_try = time.monotonic() + _LATER_SECONDS
        if not is_left:
            found = await run_in_thread(take_abandoned, folder)
            if found is not None and found.note.get("pid") in (None, self._setup.trainer):
                await run_in_thread(found.remove)

    async def _finish_links(self) -> None:
        left = await self._links.finish(self._setup.exit_seconds)
        if left:
            _say(f"steps {', '.join(map(str, left))} were not copied on in time")

    def _say_written(self, done: Flushed) -> None:
        if done.problem:
            which = "the last snapshot" if done.step < 0 else f"step {done.step}"
            _say(f"{which} could not be written: {done.problem}")
            return
        _say(f"wrote step {done.step} to {redact(self._target.location)}")
        if done.passed_over:
            _say(f"a newer snapshot is damaged: {done.passed_over}")

    @property
    def _writes_at_close(self) -> bool:
        wanted = self._close is not None and self._close.flush
        return wanted or self._noticed_at is not None

    def _ends_at(self) -> float | None:
        if self._noticed_at is None or self._snapshots is None:
            return None
        return self._noticed_at + self._snapshots.grace_seconds

    async def _flush(self, ends_at: float | None) -> Flushed | None:
        snapshots = self._snapshots
        if snapshots is None or not snapshots.flush:
            return None
        async with self._flushing:
            try:
                done = await self._flush_now(snapshots, ends_at)
            except (CheckpointError, OSError) as error:
                return Flushed(-1, problem=str(error))
            if done is not None and not done.problem:
                self._newest = max(self._newest, done.step)
            return done

    async def _flush_now(self, snapshots: Snapshots, ends_at: float | None) -> Flushed | None:
        folder = Path(snapshots.folder)
        if not snapshots.is_of_job:
            hurry = Hurry(ends_at, self._rate, snapshots.first)
            return await flush(folder, self._target, self._newest, hurry)
        left = self._setup.exit_seconds if ends_at is None else ends_at - time.monotonic()
        part = JobPart(folder, *snapshots.process)
        return await flush_of_job(part, self._target, self._newest, max(left, 0.0))

    async def _notice(self) -> None:
        """A signal came: write what there is, whatever the trainer is doing."""
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
            hurry()
            done = await self._flush(self._ends_at())
            if done is not None:
                self.tell(done)

    async def _watch_trainer(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(self._setup.trainer)
            with contextlib.closing(os.fdopen(pidfd, "rb", buffering=0)):
                if os.getppid() == self._setup.trainer:
                    await anyio.wait_readable(pidfd)
        # Without such a descriptor there is nothing to wait for but the time of the next look.
        while os.getppid() == self._setup.trainer:  # noqa: ASYNC110
            await anyio.sleep(_LOOK_SECONDS)
        self._is_over.set()

    async def _hear(self, rest: bytes) -> None:
        """Take what the trainer says, also what it has said before it died."""
        while True:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                await self._take(for_keeper(line))
            try:
                piece = self._trainer.recv(_PIECE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                # Forked workers may keep the socket open.
                if self._is_over.is_set():
                    return
                await self._readable_or_over()
                continue
            except OSError:
                piece = b""
            if not piece:
                # It has died, or has become another program (`os.execv`).
                self._is_over.set()
                return
            rest += piece

    async def _readable_or_over(self) -> None:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                await self._is_over.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait)
            await anyio.wait_readable(self._trainer)
            tasks.cancel_scope.cancel()

    async def _take(self, message: ToKeeper) -> None:
        if isinstance(message, Saved):
            self._newest = message.step
            self._rate = message.bytes_per_second or self._rate
        elif isinstance(message, Claimed):
            self._snapshots = self._setup.snapshots
            self._claim = message.claim
        elif isinstance(message, Step):
            await self._links.add(message)
        elif isinstance(message, Fetch):
            self._links.fetch(message)
        elif isinstance(message, Listen | FetchPart | Forget):
            await self._peers.take(message)
        elif isinstance(message, Close):
            self._close = message
            # What came just before must be known.
            if self._has_noticed() and self._noticed_at is None:
                self._noticed_at = time.monotonic()
            self.tell(Closing(self._writes_at_close or bool(self._setup.links)))
            self._is_over.set()

    async def _watch_alarm(self, writes: TaskGroup) -> None:
        """The kernel runs the trainer's handler at once, which writes here before Python does."""
        while True:
            await anyio.wait_readable(self._alarm)
            if self._has_noticed():
                writes.start_soon(self._notice)

    def _has_noticed(self) -> bool:
        """Read the numbers of signals that have come; tell whether one announces the end."""
        with contextlib.suppress(BlockingIOError):
            return bool(set(self._alarm.recv(_PIECE)).intersection(self._setup.signals))
        return False

    async def _watch_signals(self, writes: TaskGroup) -> None:
        # Some schedulers tell every process of a job.
        with anyio.open_signal_receiver(signal.SIGTERM) as received:
            # It was blocked from the beginning on.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            async for _ in received:
                writes.start_soon(self._notice)

    def moved(self, message: Moved) -> None:
        """Note a step that is in the root now."""
        if message.link == len(self._setup.links) - 1 and not message.problem:
            self._newest = max(self._newest, message.step)
            if message.nbytes and message.seconds:
                self._rate = message.nbytes / message.seconds

    def tell(self, message: FromKeeper) -> None:
        """Tell the trainer something; of one that has died, the user is told of steps that stay."""
        is_heard = not self._is_over.is_set() or self._close is not None
        try:
            self._trainer.sendall(encoded(message))
        except OSError:
            is_heard = False
        if not is_heard and isinstance(message, Moved) and message.problem:
            _say(f"step {message.step} was NOT copied on: {message.problem}")


async def _main(trainer: socket.socket, alarm: socket.socket) -> None:
    received = b""
    while b"\n" not in received:
        await anyio.wait_readable(trainer)
        piece = trainer.recv(_PIECE)
        if not piece:
            return
        received += piece
    first, _, rest = received.partition(b"\n")
    setup = for_keeper(first)
    assert isinstance(setup, Setup)
    keepers: list[Keeper] = []

    def told(message: FromKeeper) -> None:
        for keeper in keepers:
            if isinstance(message, Moved):
                keeper.moved(message)
            keeper.tell(message)

    async with linked(setup.links, told) as links:
        keepers.append(Keeper(setup, trainer, alarm, links))
        await keepers[0].run(rest)


def _is_owned_again(folder: Path, claim: str) -> bool:
    """Tell whether a trainer has taken the folder over, or it is gone."""
    found = take_abandoned(folder)
    if found is None:
        # A job that looks for parts has the lock for a while, and may leave the folder as it is.
        return claim_of(folder) != claim
    found.leave()
    return False


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"ckpt: the trainer has ended: {text}\n")
        sys.stderr.flush()


def _close_output() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


if __name__ == "__main__":
    with contextlib.suppress(OSError, ValueError):
        # A part that peers read is open, file by file.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    told, alarmed = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    alarmed.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    anyio.run(_main, told, alarmed)
