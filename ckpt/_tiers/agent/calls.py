"""`AgentCalls`: what the trainer asks of its agent and waits for, at its end excepted.

The agent copies steps back to the nearest tier, lets other agents of the job read the parts of
snapshots on this host, and fetches and removes their parts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import anyio.abc
from msgspec.structs import replace

from ckpt._conversion.copies.step_copy import ByteCounter, StepCopier
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import CopyRules, copy_step
from ckpt._tiers.agent.messages import (
    Call,
    CallResult,
    CloseRequest,
    FromAgent,
    ListenRequest,
    PartFetchRequest,
    PartRemovalRequest,
    PeerRefused,
    Request,
    StepFetchRequest,
    TransferLeg,
    place_of_json,
)
from ckpt._tiers.peers.parts import STEPS, remove_replicas, replica_root, replica_storage
from ckpt._tiers.peers.remote_part import Peer, fetch_part
from ckpt._tiers.peers.server import serving
from ckpt._tiers.peers.wire import PartOpenRequest
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._resolve import open_root


class AgentCalls:
    """The calls under way. Used on the agent's loop."""

    def __init__(self, legs: Sequence[TransferLeg], tell: Callable[[FromAgent], None]) -> None:
        """Work at the places of `legs`; `tell` sends messages to the trainer."""
        self._legs = legs
        self._tell = tell
        self._tasks: anyio.abc.TaskGroup | None = None
        # A part that is fetched is given up if its snapshot is no longer wanted.
        self.under_way: dict[Call, anyio.CancelScope] = {}
        self._turn = anyio.Lock()
        # The address at which this agent listens.
        self._address: tuple[str, int] | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Do the work that `take` begins, until cancelled: the trainer has ended."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    async def take(self, call: Call) -> None:
        """Begin a call; parts to be removed are gone when this returns."""
        if isinstance(call.request, PartRemovalRequest):
            await self._answer(call)
        elif self._tasks is not None:
            self._tasks.start_soon(self._answer, call)

    async def _answer(self, call: Call) -> None:
        began = time.monotonic()
        done = CallResult(problem="it is not wanted any more")
        with anyio.CancelScope() as scope:
            self.under_way[call] = scope
            try:
                done = await self._result_of(call.request)
            except CheckpointError as error:
                number = error.errno if isinstance(error, StorageError) else None
                done = CallResult(problem=error.message, errno=number)
            except OSError as error:
                done = CallResult(problem=str(error), errno=error.errno)
            finally:
                self.under_way.pop(call, None)
        self._tell(replace(done, number=call.number, seconds=time.monotonic() - began))

    async def _result_of(self, request: Request) -> CallResult:
        match request:
            case StepFetchRequest():
                async with self._turn:
                    return await self._fetch_step(request)
            case PartFetchRequest():
                return CallResult(nbytes=await self._fetch_part(request))
            case PartRemovalRequest():
                for call, scope in self.under_way.items():
                    if isinstance(call.request, PartFetchRequest) and request.ends(call.request):
                        scope.cancel()
                await remove_replicas(Path(request.folder), request.means)
                return CallResult()
            case ListenRequest():
                if self._address is None:
                    assert self._tasks is not None
                    self._address = await self._tasks.start(self._serve, request)
                return CallResult(address=self._address)
            case CloseRequest():
                raise AssertionError(request)

    async def _fetch_step(self, wanted: StepFetchRequest) -> CallResult:
        """Copy a step, unless every byte of it is there; a damaged step is replaced."""
        source = open_root(place_of_json(self._legs[wanted.place - 1].target))
        target = open_root(place_of_json(self._legs[0].source))
        await target.prepare()
        with contextlib.closing(StepCopier(ByteCounter())) as copier:
            copied = await copy_step(
                copier,
                StepLocation(source, wanted.step_dir),
                wanted.step,
                StepLocation(target, wanted.step_dir),
                # Only an existing step is compared with jax, whose import takes a moment.
                CopyRules(verify=True),
            )
        return CallResult(outcome=copied.outcome, nbytes=copied.nbytes, problem=copied.reason or "")

    async def _fetch_part(self, wanted: PartFetchRequest) -> int:
        own = Path(wanted.folder)
        place = own / STEPS if wanted.is_own else replica_root(own, wanted.part)
        if not wanted.is_own:
            # Remove first: memory is short.
            kept = {*wanted.keep, wanted.step}
            await remove_replicas(own, lambda part, step: part == wanted.part and step not in kept)
        return await fetch_part(
            Peer(wanted.process, wanted.host, wanted.port),
            wanted.key,
            PartOpenRequest(wanted.part, wanted.step, wanted.save),
            replica_storage(place),
            wanted.step_dir,
        )

    async def _serve(
        self, wanted: ListenRequest, *, task_status: anyio.abc.TaskStatus[tuple[str, int]]
    ) -> None:
        refused: set[str] = set()

        def say(problem: str) -> None:
            # Report each problem once, and a limited number of them.
            if problem not in refused and len(refused) < 8:
                refused.add(problem)
                self._tell(PeerRefused(problem))

        folders = [(part, Path(folder)) for part, folder in wanted.folders]
        address, port = wanted.address, wanted.port
        try:
            async with serving(address, port, wanted.key, lambda: folders, say) as server:
                task_status.started(server.address)
                await anyio.sleep_forever()
        except OSError as error:
            where = f"{address}:{port}" if port else address
            raise StorageError(f"it cannot listen at {where}: {error.strerror or error}") from error
