"""`PeerReplication`: copies of the snapshots of a job on the hosts of other processes.

Copies are made in rounds. In a round each process fetches the part of its ward (another process) of
the same snapshot; the next round begins when all processes have ended. So, after the first
successful round, there is always a snapshot with every part on two hosts: it stays on all of them
until a round for a newer snapshot has succeeded. The primary chooses the next snapshot; if copies
are slower than snapshots, those in between are left out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from ckpt._job.agreement.failures import beating
from ckpt._job.agreement.operation import Operation, concluded, gathered
from ckpt._job.processes import SeparateRoots
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.service import RootService
from ckpt._tiers.agent import client
from ckpt._tiers.agent.messages import (
    AgentMessage,
    ListenRequest,
    PartFetchRequest,
    PartRemovalRequest,
    PeerRefused,
)
from ckpt._tiers.peers.parts import (
    Inventory,
    Recovery,
    SnapshotPart,
    distance_between,
    has_replicas,
    part_places,
    recovery_of,
    remove_replicas,
    why_not,
)
from ckpt._tiers.peers.wire import new_key
from ckpt._tiers.settings import LOOPBACK, PeerCopies
from ckpt._tiers.shared_folder import SharedFolder, take_abandoned_of
from ckpt._tree.table import format_bytes
from ckpt.coordination._base import Coordinator
from ckpt.errors import CheckpointError
from ckpt.keep._questions import SavedStep

logger = logging.getLogger("ckpt")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CopiedSteps:
    """The keep policy of snapshots with copies: keeps the copied one and the newest.

    Attributes:
        safe: The newest snapshot of which every part is on two hosts, or None.
    """

    def __init__(self) -> None:
        self.safe: int | None = None

    def keep(self, steps: Sequence[SavedStep], now: float) -> Collection[int]:
        wanted = {self.safe, *(each.step for each in steps[-1:])}
        return [each.step for each in steps if each.step in wanted]


class PeerReplication:
    """The copies of snapshots on other hosts. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        settings: PeerCopies,
        job: Coordinator,
        service: RootService,
        folder: SharedFolder,
        steps: CopiedSteps,
        agent: client.AgentClient,
    ) -> None:
        """Copy the snapshots of `service`; do no input or output yet.

        Args:
            settings: The settings of the user.
            job: The job.
            service: The service of the root in memory.
            folder: The folder of this root.
            steps: The keep policy of this root.
            agent: Client of the agent, which fetches and serves the parts.
        """
        processes = service.root.processes
        assert isinstance(processes, SeparateRoots)
        self._settings = settings
        self._job = job
        self._service = service
        self._processes = processes
        self._folder = folder
        self._steps = steps
        self._agent = agent
        self._is_on = False
        # Values on which the processes agree when they open their memory.
        self._id, self._key, self._distance = "", "", 1
        self._folders: list[tuple[int, str]] = []
        # The address at which the agent listens, once it is published.
        self._published = ("", 0)
        # Set on the engine's loop.
        self._turn: anyio.Lock | None = None
        # The last snapshot that was committed.
        self._newest = -1
        self._said: set[str] = set()

    async def open(self, run: str, location: str) -> bool:
        """Find the newest snapshot that has all parts on some hosts, and fetch missing parts.

        Args:
            run: The id of the run.
            location: The root of the run.

        Returns:
            True if all processes have their parts of it, or if there is no such snapshot.

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
                # If the recovery is done, the parts of this folder have been copied.
                await run_in_thread(folder.remove if is_done else folder.leave)
        return is_done

    async def _recover(self, operation: Operation, parts: tuple[SnapshotPart, ...]) -> bool:
        """Agree with the other processes; return True if all have their parts now."""
        index = self._processes.process
        chosen = {"id": uuid.uuid4().hex, "key": new_key()}
        led = await operation.lead(None if index else json.dumps(chosen).encode())
        self._id, self._key = (str(json.loads(led)[name]) for name in ("id", "key"))
        async with beating(operation):
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
        # The lost host has held a part for another process, too. Copy it now: another host may be
        # lost before the next snapshot.
        if not await self._hold(operation, recovery.step, recovery.save):
            self._say(f"the snapshot of step {recovery.step} is not on peers")
        return True

    def _plan(self, every: Sequence[Any]) -> dict[str, Any]:
        """Return the plan that the primary makes from the inventories of all processes."""
        found = [msgspec.convert(each, Inventory) for each in every]
        distance = self._settings.distance or distance_between([each.machine for each in found])
        return {
            "problem": why_not(found, [_is_loopback(each.address) for each in found]),
            "distance": distance,
            "recovery": msgspec.to_builtins(recovery_of(found), str_keys=True),
        }

    async def _ready(self) -> str:
        """Publish the address of this process's agent; return why it does not listen, or "".

        A killed agent is started again, and listens at another address.
        """
        settings = self._settings
        wanted = ListenRequest(settings.address, settings.port, self._key, tuple(self._folders))
        done = await self._agent.call(wanted, again=True)
        if not done.problem and self._published != done.address:
            value = json.dumps(done.address).encode()
            await self._job.key_values().touch(self._address_key(self._processes.process), value)
            self._published = done.address
        return done.problem

    def _address_key(self, process: int) -> str:
        return f"ckpt/parts/{self._id}/{process}"

    @contextlib.asynccontextmanager
    async def in_turn(self, step: int) -> AsyncIterator[None]:
        """Run the body in the turn of a snapshot: in all processes in the order of the commits.

        If two processes had different orders, each would wait for the other.
        """
        self._newest = step
        self._turn = self._turn or anyio.Lock()
        async with self._turn:
            yield

    async def copy(self, step: int) -> None:
        """Have all parts of a snapshot copied, `in_turn`; done when all have ended or failed.

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
            # Publish before any process fetches from this agent.
            if why := await self._ready():
                self._say(f"peers cannot read from this process any more: {why}")
            found = (await self._service.root.index.refresh()).get(step)
        save = found.save if found is not None and step == self._newest else ""
        save = str(await concluded(operation, save, "begin", lambda every: every[0]))
        if not save:
            # There is a newer snapshot already, and it is next.
            return
        if await self._hold(operation, step, save):
            self._steps.safe = step

    async def _hold(self, operation: Operation, step: int, save: str) -> bool:
        """Hold the part of the ward, and nothing else, on all hosts; return True if all do."""
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
        """Have the agent fetch a part; return the reason if it could not, or an empty text."""
        address = await self._job.key_values().wait(
            self._address_key(source), client.ANSWER_SECONDS
        )
        if address is None:
            return f"process {source} has not said where it listens"
        host, port = json.loads(address)
        keep = () if self._steps.safe is None else (self._steps.safe,)
        step_dir, own = self._service.root.names.name(step), str(self._folder.path)
        what = PartFetchRequest(
            own, self._key, part, step, step_dir, save, source, host, port, is_own, keep
        )
        fetched = await self._agent.call(what)
        if not fetched.problem:
            logger.debug(
                "fetched part %d of the snapshot of step %d: %s in %.2f s",
                part,
                step,
                format_bytes(fetched.nbytes),
                fetched.seconds,
            )
        return fetched.problem

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
        message = PartRemovalRequest(str(self._folder.path), steps, after, but)
        if not any(
            isinstance(each, PartFetchRequest) and message.ends(each)
            for each in self._agent.under_way
        ) and not await run_in_thread(has_replicas, self._folder.path, message.means):
            # This is the usual case: a busy or stopped agent does not delay the next snapshot.
            return
        if (await self._agent.call(message)).problem:
            # No agent could remove them, so none fetches any longer: remove them here.
            try:
                await remove_replicas(self._folder.path, message.means)
            except CheckpointError as error:
                self._say(f"copies for peers could not be removed: {error.message}")

    def heard(self, message: AgentMessage) -> None:
        """Handle a message of the agent; called in a thread."""
        if isinstance(message, PeerRefused):
            self._say(f"a connection to its snapshots was refused: {message.problem}")

    def _say(self, problem: str) -> None:
        """Warn about a problem, once."""
        # Problems that differ only in numbers, such as steps, count as the same.
        kind = "".join(each for each in problem if not each.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s", redact(self._service.storage.location), problem)


def _parts_in(folders: Sequence[tuple[int, SharedFolder]]) -> tuple[SnapshotPart, ...]:
    """Return the parts on this host; only those in the first folder are in their place."""
    found = []
    for number, (process, folder) in enumerate(folders):
        for part, _ in part_places(folder.path, process):
            found.append(part if number == 0 else msgspec.structs.replace(part, is_own=False))
    return tuple(found)


def _machine() -> str:
    """Return an id of this machine."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address in (LOOPBACK, "localhost")
