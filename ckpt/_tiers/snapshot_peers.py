"""`SnapshotPeers`: the snapshots of a job are also on the hosts of other processes.

The copies of a snapshot are one round: all processes fetch the part of the same snapshot, each that
of its ward, and the next round begins when all of them have ended. So there is always a snapshot of
which every part is on two hosts, once there was one: it stays, on all of them, until a round for a
newer one has succeeded. The primary says which snapshot comes next; if the copies are slower than
the snapshots, those in between are left out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import msgspec

from ckpt._redaction import redact
from ckpt._runtime.futures import settled
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.processes import SeparateRoots
from ckpt._steps.service import RootService
from ckpt._tiers.keeper.client import KeeperClient
from ckpt._tiers.keeper.messages import (
    FetchPart,
    Forget,
    Gone,
    Listen,
    Listening,
    PartDone,
    Refused,
    ToKeeper,
    Told,
)
from ckpt._tiers.peers.handshake import new_key
from ckpt._tiers.peers.held import has_held, remove_held
from ckpt._tiers.peers.parts import SnapshotPart, part_places
from ckpt._tiers.peers.recovery import Inventory, Recovery, distance_between, recovery_of, why_not
from ckpt._tiers.settings import LOOPBACK, PeerCopies
from ckpt._tiers.shared_folder import SharedFolder, take_abandoned_of
from ckpt._tree.table import size_text
from ckpt.coordination._base import Coordinator
from ckpt.coordination._collectives import concluded, gathered
from ckpt.coordination._heartbeat import beating
from ckpt.coordination._operation import Operation
from ckpt.errors import CheckpointError
from ckpt.policies._context import SavedStep

logger = logging.getLogger("ckpt")

# A keeper that lives listens within milliseconds, and says each second that it fetches; a peer has
# told its address before.
_ANSWER_SECONDS = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CopiedSteps:
    """The preservation policy of snapshots with copies: what has them stays, and the newest.

    Attributes:
        safe: The newest snapshot of which every part is on two hosts, or None.
    """

    def __init__(self) -> None:
        self.safe: int | None = None

    def keep(self, steps: Sequence[SavedStep], now: float) -> Collection[int]:
        """Return the steps to keep."""
        wanted = {self.safe, *(each.step for each in steps[-1:])}
        return [each.step for each in steps if each.step in wanted]


class SnapshotPeers:
    """The copies of snapshots on other hosts. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        settings: PeerCopies,
        job: Coordinator,
        service: RootService,
        folder: SharedFolder,
        steps: CopiedSteps,
        keeper: KeeperClient,
    ) -> None:
        """Copy the snapshots of `service`; do no input or output yet.

        Args:
            settings: What the user wants.
            job: The job.
            service: The root in memory.
            folder: Where it is.
            steps: What its retention leaves.
            keeper: The process that reads and shows the parts.
        """
        processes = service.root.processes
        assert isinstance(processes, SeparateRoots)
        self._settings = settings
        self._job = job
        self._service = service
        self._processes = processes
        self._folder = folder
        self._steps = steps
        self._keeper = keeper
        self._is_on = False
        # What the processes agree on when they open their memory.
        self._id, self._key, self._distance = "", "", 1
        self._folders: list[tuple[int, str]] = []
        self._guard = threading.Lock()
        # Where the keeper that was greeted last listens, and the same once the others know it.
        self._listening: Future[Listening] = Future()
        self._published: Future[Listening] | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, Future[PartDone]] = {}
        # Also where this process does not wait for them any more.
        self._fetches: dict[int, FetchPart] = {}
        self._heard_at = 0.0
        # Made on the engine's loop.
        self._turn: anyio.Lock | None = None
        # The last snapshot that was committed.
        self._newest = -1
        self._said: set[str] = set()

    async def open(self, run: str, location: str) -> bool:
        """Find the newest snapshot of which all parts are somewhere, and fetch what is missing.

        Args:
            run: The id of the run.
            location: Its root.

        Returns:
            Whether all processes have their parts of it; true if there is none.

        Raises:
            CoordinationError: The processes cannot agree on it.
        """
        index, count = self._processes.process, self._processes.count
        abandoned: list[tuple[int, SharedFolder]] = await run_in_thread(
            take_abandoned_of, self._folder.path, run, location, count
        )
        is_done = False
        try:
            own = [(index, self._folder), *abandoned]
            self._folders = [(process, str(folder.path)) for process, folder in own]
            parts = await run_in_thread(_parts_in, own)
            what = "finding snapshots in the memory of peers"
            async with self._processes.peers.all_of("peers", what) as operation:
                is_done = await self._recover(operation, parts)
        finally:
            for _, folder in abandoned:
                # What was in it is where it belongs by now.
                await run_in_thread(folder.remove if is_done else folder.leave)
        return is_done

    async def _recover(self, operation: Operation, parts: tuple[SnapshotPart, ...]) -> bool:
        """Agree with the others; tell whether all have their parts now."""
        index = self._processes.process
        chosen = {"id": uuid.uuid4().hex, "key": new_key()}
        led = await operation.lead(None if index else json.dumps(chosen).encode())
        self._id, self._key = (str(json.loads(led)[name]) for name in ("id", "key"))
        async with beating(operation):
            # One that is started now is told by that.
            for message in self.greeting():
                self._keeper.tell(message)
            why = await self._ready()
        own = Inventory(_machine(), self._settings.address, why, parts)
        agreed = await concluded(operation, msgspec.to_builtins(own), "inventories", self._plan)
        problem, self._distance = str(agreed["problem"]), int(agreed["distance"])
        recovery = msgspec.convert(agreed["recovery"], Recovery, strict=False)
        if problem:
            self._say(f"{problem}. Training goes on without copies on peers")
            return False
        self._is_on = True
        if recovery.step < 0:
            return True
        failure = ""
        if index in recovery.fetches:
            async with beating(operation):
                failure = await self._fetch(
                    index, recovery.step, recovery.save, recovery.fetches[index], is_own=True
                )
            if failure:
                self._say(
                    f"the part of this process of the snapshot of step {recovery.step} could not "
                    f"be fetched: {failure}. The job goes on from an older one, or from its root"
                )
        failures = await gathered(operation, failure, "fetched")
        if any(failures):
            return False
        self._steps.safe = recovery.step
        # The host that was lost has held a part, too: another one may be lost before the next
        # snapshot.
        if not await self._hold(operation, recovery.step, recovery.save):
            self._say(f"the snapshot of step {recovery.step} is not on peers")
        return True

    def _plan(self, every: Sequence[Any]) -> dict[str, Any]:
        """Return what the primary makes of what all processes have."""
        found = [msgspec.convert(each, Inventory) for each in every]
        distance = self._settings.distance or distance_between([each.machine for each in found])
        return {
            "problem": why_not(found, [_is_loopback(each.address) for each in found]),
            "distance": distance,
            "recovery": msgspec.to_builtins(recovery_of(found), str_keys=True),
        }

    async def _ready(self) -> str:
        """Let the others know where the keeper of this process listens; return why it does not.

        One that was killed is started again, and listens elsewhere.
        """
        await run_in_thread(self._keeper.start)
        with self._guard:
            listening = self._listening
        with anyio.move_on_after(_ANSWER_SECONDS):
            await settled(listening)
        if not listening.done():
            await run_in_thread(self._keeper.end)
            return _silent()
        heard = listening.result()
        if not heard.problem and self._published is not listening:
            value = json.dumps([heard.host, heard.port]).encode()
            await self._job.key_values().touch(self._address_key(self._processes.process), value)
            self._published = listening
        return heard.problem

    def _address_key(self, process: int) -> str:
        return f"ckpt/parts/{self._id}/{process}"

    @contextlib.asynccontextmanager
    async def in_turn(self, step: int) -> AsyncIterator[None]:
        """Run the body in the turn of a snapshot: in all processes in the order of the commits.

        In another order on two processes, each would wait for the other.
        """
        self._newest = step
        self._turn = self._turn or anyio.Lock()
        async with self._turn:
            yield

    async def copy(self, step: int) -> None:
        """Have all parts of a snapshot copied, `in_turn`; done when all are, or have failed.

        Never raises.
        """
        if not self._is_on:
            return
        try:
            what = f"copying the snapshot of step {step} to peers"
            async with self._processes.peers.all_of(f"copies-{step}", what) as operation:
                await self._round(operation, step)
        except CheckpointError as error:
            self._say(f"the snapshot of step {step} is not on peers: {error.message}")

    async def _round(self, operation: Operation, step: int) -> None:
        async with beating(operation):
            # Before any fetches from it.
            if why := await self._ready():
                self._say(f"peers cannot read from this process any more: {why}")
            found = (await self._service.root.index.refresh()).get(step)
        save = found.save if found is not None and step == self._newest else ""
        save = str(await concluded(operation, save, "begin", lambda every: every[0]))
        if not save:
            # A newer one is there by now, and is next.
            return
        if await self._hold(operation, step, save):
            self._steps.safe = step

    async def _hold(self, operation: Operation, step: int, save: str) -> bool:
        """Hold the part of another process, and nothing else, on all hosts; tell whether all do."""
        index, count = self._processes.process, self._processes.count
        ward = (index - self._distance) % count
        async with beating(operation):
            failure = await self._fetch(ward, step, save, ward, is_own=False)
        if failure:
            self._say(
                f"the part of process {ward} of the snapshot of step {step} is not held here: "
                f"{failure}"
            )
        is_done = not any(await gathered(operation, failure, "copied"))
        if is_done:
            await self._forget(but=(ward, step))
        return is_done

    async def _fetch(self, part: int, step: int, save: str, source: int, *, is_own: bool) -> str:
        """Have the keeper fetch a part; return why it could not, or an empty text."""
        address = await self._job.key_values().wait(self._address_key(source), _ANSWER_SECONDS)
        if address is None:
            return f"process {source} has not said where it listens"
        host, port = json.loads(address)
        keep = () if self._steps.safe is None else (self._steps.safe,)
        step_dir = self._service.root.names.name(step)
        number = next(self._numbers)
        fetched = await self._answer(
            FetchPart(number, part, step, step_dir, save, source, host, port, is_own, keep)
        )
        if not fetched.problem:
            logger.debug(
                "fetched part %d of the snapshot of step %d: %s in %.2f s",
                part,
                step,
                size_text(fetched.nbytes),
                fetched.seconds,
            )
        return fetched.problem

    async def _answer(self, message: FetchPart | Forget) -> PartDone:
        """Have the keeper do something; one that does not answer is ended."""
        await run_in_thread(self._keeper.start)
        done: Future[PartDone] = Future()
        with self._guard:
            self._asked[message.number] = done
            if isinstance(message, FetchPart):
                self._fetches[message.number] = message
        try:
            self._heard_at = time.monotonic()
            self._keeper.tell(message)
            while not done.done():
                with anyio.move_on_after(_ANSWER_SECONDS):
                    await settled(done)
                if not done.done() and time.monotonic() - self._heard_at >= _ANSWER_SECONDS:
                    await run_in_thread(self._keeper.end)
                    return PartDone(message.number, problem=_silent())
        finally:
            with self._guard:
                self._asked.pop(message.number, None)
        return done.result()

    async def forget(self, *steps: int, after: int | None = None) -> None:
        """Remove copies of snapshots that were deleted, or that the run has gone back behind."""
        if after is not None:
            self._newest = min(self._newest, after)
        safe = self._steps.safe
        if safe is not None and (safe in steps or (after is not None and safe > after)):
            self._steps.safe = None
        await self._forget(steps, after)

    async def _forget(
        self,
        steps: tuple[int, ...] = (),
        after: int | None = None,
        but: tuple[int, int] | None = None,
    ) -> None:
        message = Forget(next(self._numbers), steps, after, but)
        with self._guard:
            fetches = [each for each in self._fetches.values() if not each.is_own]
        if not any(message.means(each.part, each.step) for each in fetches) and not (
            await run_in_thread(has_held, self._folder.path, message.means)
        ):
            # As a rule: a keeper that is busy, or stopped, does not hold up the next snapshot.
            return
        if (await self._answer(message)).problem:
            # There is no keeper that could do it, or that fetches any more.
            try:
                await remove_held(self._folder.path, message.means)
            except CheckpointError as error:
                self._say(f"copies for peers could not be removed: {error.message}")

    def greeting(self) -> list[ToKeeper]:
        """Return what a new keeper has to know."""
        if not self._key:
            return []
        with self._guard:
            self._listening = Future()
        settings = self._settings
        return [Listen(settings.address, settings.port, self._key, tuple(self._folders))]

    def heard(self, message: Told) -> None:
        """Take what the keeper says; called in a thread."""
        self._heard_at = time.monotonic()
        if isinstance(message, Listening):
            self._listens(message)
        elif isinstance(message, PartDone):
            with self._guard:
                self._fetches.pop(message.number, None)
                done = self._asked.pop(message.number, None)
            if done is not None:
                done.set_result(message)
        elif isinstance(message, Refused):
            self._say(f"a connection to its snapshots was refused: {message.problem}")
        elif isinstance(message, Gone):
            self._listens(Listening(problem="its keeper has ended"))
            with self._guard:
                self._fetches.clear()
                asked, self._asked = self._asked, {}
            for number, done in asked.items():
                done.set_result(PartDone(number, problem="the keeper was killed"))

    def _listens(self, message: Listening) -> None:
        with self._guard:
            if self._listening.done():
                self._listening = Future()
            self._listening.set_result(message)

    def _say(self, problem: str) -> None:
        """Say what is wrong; the same thing once."""
        # Numbers of steps make it no other problem.
        kind = "".join(each for each in problem if not each.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s", redact(self._service.storage.location), problem)


def _parts_in(folders: Sequence[tuple[int, SharedFolder]]) -> tuple[SnapshotPart, ...]:
    """Return the parts on this host; only those in the first folder are at their place."""
    found = []
    for number, (process, folder) in enumerate(folders):
        for part, _ in part_places(folder.path, process):
            found.append(part if number == 0 else msgspec.structs.replace(part, is_own=False))
    return tuple(found)


def _machine() -> str:
    """Return what tells this machine from others."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _silent() -> str:
    return f"its keeper does not answer within {_ANSWER_SECONDS:.0f} s"


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address in (LOOPBACK, "localhost")
