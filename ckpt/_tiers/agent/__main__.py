"""The agent's process: `python -m ckpt._tiers.agent SOCKET ALARM`, started by the trainer."""

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
from ckpt._tiers.agent.calls import AgentCalls
from ckpt._tiers.agent.flush import JobPart, flush, flush_of_job
from ckpt._tiers.agent.messages import (
    AgentSetup,
    Call,
    CallProgress,
    CallResult,
    CloseRequest,
    FlushResult,
    FolderClaimed,
    FromAgent,
    SnapshotSettings,
    StepAtTier,
    StepInRoot,
    ToAgent,
    TransferResult,
    decode_to_agent,
    encoded,
    place_of_json,
)
from ckpt._tiers.agent.transfer_chain import TransferChain, open_chain
from ckpt._tiers.shared_folder import claim_of, take_abandoned
from ckpt.errors import CheckpointError
from ckpt.storage._base import Storage
from ckpt.storage._resolve import open_root

_PIECE = 1 << 16
# Time between two looks for a new trainer, and for the death of the old one if the system cannot
# report it.
_LOOK_SECONDS = 0.5
# Time between signs of progress during a call: without them, the agent counts as stopped.
_BEAT_SECONDS = 1.0
# Tries for a store that fails: after a death nothing else saves the snapshot.
_TRIES, _PAUSE_SECONDS = 6, 5.0
# Time between later tries, while the snapshot waits for another trainer.
_LATER_SECONDS = 60.0
# Time after which a dead trainer's output is closed, even if agents still wait for each other.
_HUSH_SECONDS = 30.0


class SidecarAgent:
    """The agent, with the state of its trainer. Used on its event loop."""

    # event                   action
    # ----------------------  -------------------------------------------------------------------
    # `StepAtTier`            copies it on, from its tier to the next place
    # `StepInRoot`            notes which snapshots need no longer be written
    # `Call`                  does what is asked; see `AgentCalls`
    # the number of a signal  writes the last snapshot, while the trainer may be stuck
    # SIGTERM, to itself      the same
    # the trainer dies        writes the last snapshot, waits for a trainer that is started again,
    #                         releases the memory, and ends
    # `CloseRequest`          writes the last snapshot if asked, or if a signal came, and ends

    def __init__(self, setup: AgentSetup, trainer: socket.socket, alarm: socket.socket) -> None:
        """Watch the trainer of `setup`; `trainer` carries messages, and `alarm` signals."""
        self._setup = setup
        self._trainer = trainer
        self._alarm = alarm
        self._legs: TransferChain
        self._target: Storage = open_root(place_of_json(setup.root))
        # The snapshots, once the trainer owns them.
        self._snapshots: SnapshotSettings | None = None
        self._claim = ""
        self._newest = -1
        self._noticed_at: float | None = None
        self._flushing = anyio.Lock()
        self._calls = AgentCalls(setup.legs, self.tell)
        # Set when the trainer has died, and when it has closed the agent.
        self._is_over = anyio.Event()
        # The last call.
        self._close: tuple[int, CloseRequest] | None = None

    async def run(self, rest: bytes) -> None:
        """Watch until the trainer has ended, and then do the rest of the work."""
        async with (
            open_chain(self._setup.legs, self.tell) as self._legs,
            anyio.create_task_group() as beats,
        ):
            beats.start_soon(self._beat)
            await self._watch(rest)
            if self._close is None:
                await self._end_alone()
            else:
                await self._end_well(self._close[0])
            beats.cancel_scope.cancel()

    async def _beat(self) -> None:
        while True:
            await anyio.sleep(_BEAT_SECONDS)
            if self._calls.under_way or self._close is not None:
                self.tell(CallProgress())

    async def _watch(self, rest: bytes) -> None:
        # A write that is under way when the trainer ends goes on to its end.
        async with anyio.create_task_group() as writes, anyio.create_task_group() as watches:
            await watches.start(self._calls.run)
            watches.start_soon(self._watch_trainer)
            writes.start_soon(self._hear, rest)
            watches.start_soon(self._watch_alarm, writes)
            watches.start_soon(self._watch_signals, writes)
            await self._is_over.wait()
            watches.cancel_scope.cancel()

    async def _end_well(self, number: int) -> None:
        """Write the rest after the trainer has closed this agent, and waits for it."""

        async def write(ends_at: float | None) -> None:
            if self._writes_at_close:
                self.tell(await self._flush(ends_at) or FlushResult(-1))

        async with anyio.create_task_group() as tasks:
            if self._snapshots is not None and self._snapshots.is_of_job:
                # The other processes may have had no signal, and then their agents do not come.
                tasks.start_soon(write, self._ends_at())
            else:
                await write(None)
            left = await self._legs.finish(self._setup.exit_seconds)
        self.tell(CallResult(number, left=tuple(left)))

    async def _end_alone(self) -> None:
        """Write the rest after the trainer has died, and at last release its memory."""
        _restore_priority()
        snapshots = self._snapshots
        if snapshots is not None and snapshots.is_of_job:
            ends = time.monotonic() + snapshots.kept_seconds
            if await self._write_with_others(snapshots, ends):
                _close_output()
                # A snapshot that some process did not write in time is useless.
                await self._keep_memory(snapshots, ends, is_left=False)
            return
        is_left = await self._write_alone()
        # A reader of the trainer's output waits until every process has closed it.
        _close_output()
        if snapshots is not None:
            ends = time.monotonic() + snapshots.kept_seconds
            await self._keep_memory(snapshots, ends, is_left=is_left)

    async def _write_alone(self) -> bool:
        """Write the last snapshot; return True if it is still to be written."""
        done = None
        for turn in range(_TRIES):
            done = await self._flush(self._ends_at())
            if done is not None:
                self._say_written(done)
            if done is None or not done.problem:
                break
            if turn < _TRIES - 1:
                await anyio.sleep(_PAUSE_SECONDS)
        await self._finish_legs()
        return done is not None and bool(done.problem)

    async def _write_with_others(self, snapshots: SnapshotSettings, ends: float) -> bool:
        """Write the last snapshot of a job with all agents; return False if a trainer is back."""

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
            # The other processes may not end for a long time, and a reader of the output waits.
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
                works.start_soon(self._finish_legs)
            tasks.cancel_scope.cancel()
        return not is_back

    async def _keep_memory(
        self, snapshots: SnapshotSettings, ends: float, *, is_left: bool
    ) -> None:
        """Wait for a restarted trainer, and release the memory if none comes."""
        folder, next_try = Path(snapshots.folder), time.monotonic() + _LATER_SECONDS
        while time.monotonic() < ends:
            await anyio.sleep(_LOOK_SECONDS)
            if await run_in_thread(_is_owned_again, folder, self._claim):
                return
            if is_left and time.monotonic() >= next_try:
                # Try again: the store may have been away for longer.
                done = await self._flush(None)
                is_left = done is not None and bool(done.problem)
                next_try = time.monotonic() + _LATER_SECONDS
        if not is_left:
            found = await run_in_thread(take_abandoned, folder)
            if found is not None and found.note.get("pid") in (None, self._setup.trainer):
                await run_in_thread(found.remove)

    async def _finish_legs(self) -> None:
        left = await self._legs.finish(self._setup.exit_seconds)
        if left:
            _say(f"steps {', '.join(map(str, left))} were not copied on in time")

    def _say_written(self, done: FlushResult) -> None:
        if done.problem:
            which = "the last snapshot" if done.step < 0 else f"step {done.step}"
            _say(f"{which} could not be written: {done.problem}")
            return
        _say(f"wrote step {done.step} to {redact(self._target.location)}")
        if done.passed_over:
            _say(f"a newer snapshot is damaged: {done.passed_over}")

    @property
    def _writes_at_close(self) -> bool:
        wanted = self._close is not None and self._close[1].flush
        return wanted or self._noticed_at is not None

    def _ends_at(self) -> float | None:
        if self._noticed_at is None or self._snapshots is None:
            return None
        return self._noticed_at + self._snapshots.grace_seconds

    async def _flush(self, ends_at: float | None) -> FlushResult | None:
        snapshots = self._snapshots
        if snapshots is None or not snapshots.flush:
            return None
        async with self._flushing:
            try:
                done = await self._flush_now(snapshots, ends_at)
            except (CheckpointError, OSError) as error:
                return FlushResult(-1, problem=str(error))
            if done is not None and not done.problem:
                self._newest = max(self._newest, done.step)
            return done

    async def _flush_now(
        self, snapshots: SnapshotSettings, ends_at: float | None
    ) -> FlushResult | None:
        folder = Path(snapshots.folder)
        if not snapshots.is_of_job:
            return await flush(folder, self._target, self._newest)
        left = self._setup.exit_seconds if ends_at is None else ends_at - time.monotonic()
        part = JobPart(folder, *snapshots.process)
        return await flush_of_job(part, self._target, self._newest, max(left, 0.0))

    async def _notice(self) -> None:
        """Write the last snapshot after a signal, even if the trainer is stuck."""
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
            _restore_priority()
            done = await self._flush(self._ends_at())
            if done is not None:
                self.tell(done)

    async def _watch_trainer(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(self._setup.trainer)
            with contextlib.closing(os.fdopen(pidfd, "rb", buffering=0)):
                if os.getppid() == self._setup.trainer:
                    await anyio.wait_readable(pidfd)
        # Without such a descriptor, looking again from time to time is all that can be done.
        while os.getppid() == self._setup.trainer:  # noqa: ASYNC110
            await anyio.sleep(_LOOK_SECONDS)
        self._is_over.set()

    async def _hear(self, rest: bytes) -> None:
        """Handle messages of the trainer, including those that it sent before it died."""
        while True:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                await self._take(decode_to_agent(line))
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
                # The trainer has died, or has become another program (`os.execv`).
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

    async def _take(self, message: ToAgent) -> None:
        if isinstance(message, StepInRoot):
            self._newest = message.step
        elif isinstance(message, FolderClaimed):
            self._snapshots = self._setup.snapshots
            self._claim = message.claim
        elif isinstance(message, StepAtTier):
            await self._legs.add(message)
        elif isinstance(message, Call) and isinstance(message.request, CloseRequest):
            self._close = message.number, message.request
            # A signal that came just before must be taken into account.
            if self._has_noticed() and self._noticed_at is None:
                self._noticed_at = time.monotonic()
            self._is_over.set()
        elif isinstance(message, Call):
            await self._calls.take(message)

    async def _watch_alarm(self, writes: TaskGroup) -> None:
        """Act on signals to the trainer, which the kernel reports here before Python does."""
        while True:
            await anyio.wait_readable(self._alarm)
            if self._has_noticed():
                writes.start_soon(self._notice)

    def _has_noticed(self) -> bool:
        """Read the numbers of received signals; return True if one announces the end."""
        with contextlib.suppress(BlockingIOError):
            return bool(set(self._alarm.recv(_PIECE)).intersection(self._setup.signals))
        return False

    async def _watch_signals(self, writes: TaskGroup) -> None:
        # Some schedulers send the signal to every process of a job.
        with anyio.open_signal_receiver(signal.SIGTERM) as received:
            # The signal was blocked from the beginning.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            async for _ in received:
                writes.start_soon(self._notice)

    def tell(self, message: FromAgent) -> None:
        """Send a message to the trainer; if it has died, report steps that stay to the user."""
        if isinstance(message, TransferResult):
            self._note_result(message)
        is_heard = not self._is_over.is_set() or self._close is not None
        try:
            self._trainer.sendall(encoded(message))
        except OSError:
            is_heard = False
        if not is_heard and isinstance(message, TransferResult) and message.problem:
            _say(f"step {message.step} was NOT copied on: {message.problem}")

    def _note_result(self, message: TransferResult) -> None:
        """Note a step that has arrived in the root."""
        if message.leg == len(self._setup.legs) - 1 and not message.problem:
            self._newest = max(self._newest, message.step)


async def _main(trainer: socket.socket, alarm: socket.socket) -> None:
    received = b""
    while b"\n" not in received:
        await anyio.wait_readable(trainer)
        piece = trainer.recv(_PIECE)
        if not piece:
            return
        received += piece
    first, _, rest = received.partition(b"\n")
    setup = decode_to_agent(first)
    assert isinstance(setup, AgentSetup)
    await SidecarAgent(setup, trainer, alarm).run(rest)


def _is_owned_again(folder: Path, claim: str) -> bool:
    """Return True if a trainer has taken over the folder, or the folder is gone."""
    found = take_abandoned(folder)
    if found is None:
        # A job that looks for parts holds the lock for a while, and may leave the folder as it is.
        return claim_of(folder) != claim
    found.leave()
    return False


def _restore_priority() -> None:
    """Make this agent's work count as much as the trainer's: the end is near, or was."""
    # The niceness of a process cannot be taken back, but that of its group can.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("0")


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
        # All files of a part are open while peers read it.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    trainer, alarm = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    alarm.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    anyio.run(_main, trainer, alarm)
