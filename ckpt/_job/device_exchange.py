"""The exchange over devices: host bytes of every process go to all processes of its group.

The exchange is one program on the devices of all processes, an all-gather. Any thread may compile
it, but it runs on the caller's thread, as training programs do, so that all processes run their
programs in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._engine.memory.buffers import Buffers
from ckpt._job.read_groups import Grouping
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CoordinationError, CoordinationTimeoutError

T = TypeVar("T")
Array = np.ndarray[Any, Any]

_spec: Callable[..., PartitionSpec] = PartitionSpec

# CPU devices take over memory at addresses of this alignment without a copy.
_ALIGNMENT = 64


class DeviceExchange:
    """Exchanges shares of one size among the members of every group of a grouping."""

    def __init__(
        self,
        grouping: Grouping,
        process: int,
        nbytes: int,
        buffers: Buffers,
        caller: CallingThread,
        seconds: float,
    ) -> None:
        """Prepare to exchange at least `nbytes` in every group.

        Args:
            grouping: The groups; the same on all processes.
            process: Number of this process.
            nbytes: The largest number of bytes of a batch, the same on all processes.
            buffers: Source of the memory that is exchanged.
            caller: Thread that runs the program.
            seconds: Time limit of the exchange once all processes have agreed to run it.
        """
        self._grouping = grouping
        self._process = process
        self._lanes = grouping.lanes
        unit = grouping.members * self._lanes * _ALIGNMENT
        self._piece = -(-nbytes // unit) * _ALIGNMENT
        self._buffers = buffers
        self._caller = caller
        self._seconds = seconds
        self._program: Callable[[jax.Array], jax.Array] | None = None

    @property
    def share_bytes(self) -> int:
        """Bytes that every process contributes."""
        return self._piece * self._lanes

    @property
    def nbytes(self) -> int:
        """Bytes that every process receives: the shares of its group, one after the other."""
        return self.share_bytes * self._grouping.members

    def share(self) -> Array:
        """Return memory for the share of this process, with undefined content."""
        return self._buffers.empty((self.share_bytes,), np.dtype(np.uint8))

    async def prepare(self) -> None:
        """Compile the program without waiting for other processes.

        Raises:
            CoordinationError: jax cannot compile it.
        """
        self._program = await self._attempt(partial(_in_thread, self._compile))

    async def put(self, share: Array) -> jax.Array:
        """Bring the share of this process to its devices without waiting for other processes.

        `share` must not change from now on.

        Raises:
            CoordinationError: jax failed; the devices may lack the memory.
        """
        given: jax.Array = await self._attempt(partial(_in_thread, self._put, share))
        return given

    async def exchange(self, given: jax.Array) -> Array:
        """Return the shares of the group; all processes call this once all have agreed to.

        Shield this call from cancellation: the others wait for this process.

        Args:
            given: The result of `put`.

        Raises:
            CoordinationError: A process has ended, or jax failed.
            CoordinationTimeoutError: The exchange takes too long.
        """
        with anyio.move_on_after(self._seconds):
            gathered: Array = await self._attempt(partial(self._exchange, given))
            return gathered
        raise CoordinationTimeoutError(
            f"exchanging what was read over the devices: not done within {self._seconds:g} s, "
            f"though all processes were ready; process {self._process} cannot tell which one does "
            "not take part. The devices may go on to wait for it, so end all processes and start "
            "them again; raise Timeouts(coordination=...) if the network is only slow"
        )

    async def _exchange(self, given: jax.Array) -> Array:
        assert self._program is not None
        taken = await self._caller.run(partial(self._program, given))
        return await _in_thread(self._fetch, taken)

    async def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return await act()
        except (RuntimeError, ValueError) as error:
            # jax raises RuntimeError for failures of devices and programs.
            raise CoordinationError(
                f"exchanging what was read over the devices failed in process {self._process}: "
                f"{error!s:.300}. Restore without broadcast_bytes= where the devices cannot"
            ) from error

    def _shape(self) -> tuple[int, int, int, int]:
        grouping = self._grouping
        return (len(grouping.groups), grouping.members, self._lanes, self._piece)

    def _compile(self) -> Callable[[jax.Array], jax.Array]:
        apart, together = self._shardings()
        everywhere = NamedSharding(apart.mesh, _spec())
        abstract: Callable[..., Any] = jax.ShapeDtypeStruct
        given = abstract(self._shape(), np.uint8, sharding=apart)
        # Adding zero makes XLA's CPU client run the program on a thread of its own. The client
        # considers programs of less than 1,000 operations cheap (PjRtCpuExecutable in
        # xla/pjrt/cpu/cpu_client.cc) and runs them on the calling thread, which would then wait for
        # all processes.
        program = jax.jit(lambda array, zero: array + zero, out_shardings=together)
        compiled = program.lower(given, abstract((), np.uint8, sharding=everywhere)).compile()
        # Put on the devices in advance: the caller's thread may have a transfer guard.
        zeros = jax.device_put([np.uint8(0)] * self._lanes, self._places())
        zero = jax.make_array_from_single_device_arrays((), everywhere, zeros)
        return lambda array: compiled(array, zero)

    def _shardings(self) -> tuple[NamedSharding, NamedSharding]:
        grouping = self._grouping
        devices = np.empty(self._shape()[:3], dtype=object)
        for group, members in enumerate(grouping.groups):
            for member, process in enumerate(members):
                devices[group, member] = grouping.devices[process][: self._lanes]
        mesh = Mesh(devices, ("group", "member", "lane"))
        apart = NamedSharding(mesh, _spec("group", "member", "lane"))
        return apart, NamedSharding(mesh, _spec("group", None, "lane"))

    def _places(self) -> list[SingleDeviceSharding]:
        devices = self._grouping.devices[self._process][: self._lanes]
        return [SingleDeviceSharding(device) for device in devices]

    def _put(self, share: Array) -> jax.Array:
        pieces = list(share.reshape(self._lanes, 1, 1, 1, self._piece))
        apart, _ = self._shardings()
        return jax.make_array_from_single_device_arrays(
            self._shape(), apart, jax.device_put(pieces, self._places())
        )

    def _fetch(self, taken: jax.Array) -> Array:
        lanes = sorted(taken.addressable_shards, key=lambda shard: shard.index[2].start or 0)
        if len(lanes) == 1:
            return np.asarray(lanes[0].data).reshape(-1)
        shape = (self._grouping.members, self._lanes, self._piece)
        memory = self._buffers.empty(shape, np.dtype(np.uint8))
        for number, lane in enumerate(lanes):
            memory[:, number] = np.asarray(lane.data)[0, :, 0]
            # jax keeps its host copy as long as the array lives.
            lane.data.delete()
        return memory.reshape(-1)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    # The thread is abandoned on cancellation, since it may wait for devices forever.
    return await run_in_thread(partial(function, *args), abandon_on_cancel=True)
