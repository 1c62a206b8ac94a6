"""Memory of arrays that are being read, and the copies of stored chunks into it.

Uninitialized arrays: jax arrays on CPU devices whose content is still to be written. jax donates
only memory that it has allocated itself. Host memory can be copied into such memory, which takes as
long as touching both. A blank array is such memory before its first use, and files are read
straight into it. A compiled program with one custom call that does nothing returns it, made with
the public `jax.ffi`. Compiling takes about 20 ms for a hundred arrays, once in a process; running
takes less than 1 ms, since no memory is touched.

The interface of the call is in `xla/ffi/api/c_api.h`, which jaxlib ships. This module uses only the
start of a call frame, which has been the same since version 0.1 of that interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct

from ckpt._engine.codecs import decode_chunk
from ckpt._engine.memory.arena import Buffers, choose_pages
from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest_head import digest
from ckpt._format.regions import Region, addressable_regions, whole
from ckpt._plan.chunk_reads import ChunkRead, ChunkUse, ReadRequest
from ckpt._plan.slices import copy_strided, is_one_run
from ckpt._plan.targets import ArrayRead, ArrayTarget, default_device
from ckpt._settings import ArrayMemory
from ckpt.errors import CorruptCheckpointError

logger = logging.getLogger("ckpt")
Shape = tuple[int, ...]
Devices = tuple[jax.Device, ...]
Blank = tuple[Shape, np.dtype[Any]]
Memory = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]
_MOST_ERRORS = 1000


class DamagedLeaves:
    """Collects damage while reading goes on, so that one broken leaf does not hide the others."""

    def __init__(self) -> None:
        self._errors: list[CorruptCheckpointError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the damage that the body raises, alone or in a group, and continue after it."""
        try:
            yield
        except* CorruptCheckpointError as group:
            for error in _flattened(group):
                self.note(error)

    def note(self, error: CorruptCheckpointError) -> None:
        """Note one error; errors beyond a limit are dropped."""
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append(error)

    def raise_if_any(self) -> None:
        """Raise the noted errors, if there are any.

        Raises:
            ExceptionGroup: A group of `CorruptCheckpointError`s.
        """
        if self._errors:
            raise ExceptionGroup("what is stored is damaged", self._errors)


def _flattened(group: BaseExceptionGroup[Any]) -> Iterator[CorruptCheckpointError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flattened(error)
        else:
            yield error


def damaged_chunks(request: ReadRequest, error: Exception) -> list[ChunkRead] | None:
    """Return the chunks of a request that could not be read, as the error names them.

    A group names each leaf with a damaged chunk; any other error concerns all chunks.

    Returns:
        The chunks; None if the failure is not one of a storage or its bytes.
    """
    if not isinstance(error, ExceptionGroup):
        return list(request.chunks)
    errors = list(_flattened(error))
    if not all(isinstance(each, CorruptCheckpointError) for each in errors):
        return None
    leaves = {each.leaf for each in errors}
    if None in leaves:
        return list(request.chunks)
    return [chunk for chunk in request.chunks if chunk.leaf.name in leaves]


def damage_of(error: Exception, chunks: Sequence[ChunkRead]) -> Exception:
    """Return `error` reduced to `chunks`, the only ones that no copy could supply."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = {chunk.leaf.name for chunk in chunks}
    left = error.subgroup(lambda each: getattr(each, "leaf", None) in {*leaves, None})
    return left or error


def check_chunk(entry: LeafEntry, number: int, data: memoryview) -> None:
    """Check chunk `number` of a leaf against its digest, if it has one.

    `data` are the bytes of its elements in C order.

    Raises:
        CorruptCheckpointError: The bytes differ from those that were saved; names the leaf.
    """
    if entry.digests[number] == UNCHECKED:
        return
    found = digest(data)
    if found != entry.digests[number]:
        raise CorruptCheckpointError(
            f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
            f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
            "restore another step",
            leaf=entry.name,
        )


_TARGET = "ckpt_blank_arrays"
# Type of the call-frame extension in which the runtime asks a handler for its interface version.
_METADATA = 1


def uninitialized_arrays(wanted: Sequence[Blank], devices: Devices) -> list[list[jax.Array]] | None:
    """Return for each of `wanted` one array on each device; None if jax cannot make them.

    Every array has memory of its own, on its one device. The content is undefined.

    Args:
        wanted: Shape and dtype of the arrays. With several devices, each has at least one
            dimension.
        devices: CPU devices of this process.
    """
    try:
        made = _program(tuple(wanted), devices)()
        for array in made:
            array.block_until_ready()
        parts = [_by_device(array, devices) for array in made]
    except Exception as error:
        # jax may raise any error here; the arrays are then copied from host memory.
        _say_once(f"{error!s:.200}")
        return None
    for (shape, dtype), arrays in zip(wanted, parts, strict=True):
        if any(array.shape != shape or array.dtype != dtype for array in arrays):
            _say_once(f"jax made {arrays[0].dtype} for {dtype}")
            return None
    return parts


def memory_of(array: jax.Array) -> Memory:
    """Return the bytes of a blank array, which keep it alive. Writing to them fills the array."""
    block: Any = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    block.owner = array
    return np.frombuffer(block, np.uint8)


def _by_device(array: jax.Array, devices: Devices) -> list[jax.Array]:
    if len(devices) == 1:
        return [array]
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    return [parts[device] for device in devices]


@functools.lru_cache(maxsize=32)
def _program(wanted: tuple[Blank, ...], devices: Devices) -> Any:
    """Return a compiled program that makes arrays; for several devices as shards of larger ones."""
    _register()

    def make() -> Any:
        result: Any = jax.ShapeDtypeStruct
        return jax.ffi.ffi_call(_TARGET, [result(shape, dtype) for shape, dtype in wanted])()

    if len(devices) == 1:
        with jax.default_device(devices[0]):
            return jax.jit(make).lower().compile()
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    spec: Any = jax.P("device")  # type: ignore[no-untyped-call]
    on_each = jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)
    return jax.jit(on_each).lower().compile()


class _Extension(ctypes.Structure):
    """`XLA_FFI_Extension_Base`; `metadata` exists only if the type is `_METADATA`."""


class _ApiVersion(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", _ApiVersion),
        ("traits", ctypes.c_uint32),
    )


_Extension._fields_ = (
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.c_void_p),
    ("metadata", ctypes.POINTER(_Metadata)),
)


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version", _ApiVersion),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
    )


def _do_nothing(pointer: Any) -> None:
    """Handle a call: if the runtime asks for the interface version, answer with its own."""
    frame = pointer.contents
    if frame.extension_start and frame.extension_start.contents.type == _METADATA:
        metadata = frame.extension_start.contents.metadata.contents
        metadata.version.major = frame.api.contents.version.major
        metadata.version.minor = frame.api.contents.version.minor
        metadata.traits = 0


# A module attribute, since the runtime keeps a pointer to the handler.
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(_do_nothing)


@functools.cache
def _register() -> None:
    capsule: Any = jax.ffi.pycapsule(_HANDLER)  # type: ignore[no-untyped-call]
    jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu")


@functools.cache
def _say_once(reason: str) -> None:
    logger.debug("jax makes no blank arrays here (%s); restored arrays are copied", reason)


# Bytes of the largest array whose buffer is reused; jax may take over larger buffers.
MOST_LENT = 64 << 20
# Below this size, the compiler that makes blank arrays costs more time and memory than copies.
LEAST_BLANK = 128 << 20
# Dtypes of which numpy stores one value per byte, and jax may store more.
_LESS_THAN_A_BYTE = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
# Stands for a part of a file that is not mapped yet.
_NOTHING = np.empty(0, np.uint8)


# gc=False: thousands of destinations, which form no cycles, would set off full collections.
class Destination(Struct, gc=False):
    """The memory of one array while it is read.

    Attributes:
        read: The read that fills it.
        packed: True for a packed leaf, which is read as one region.
        memory: Owner of the array's memory on CPU devices; `files` only if all its regions can be
            parts of files.
        left: Number of chunks still to be read.
        regions: The distinct regions that this process needs, each with its memory, as `open` makes
            them; a packed leaf has none.
        box: The region that a packed leaf was read as.
        packed_data: The elements of a packed leaf, once it is read.
        blanks: A blank array for each device, which the regions are read into; empty if they are
            read into host buffers.
        vanished: Number of values that a cast has made 0.
    """

    read: ArrayRead
    packed: bool
    memory: ArrayMemory = "jax"
    left: int = 0
    regions: Sequence[tuple[Region, Array]] = ()
    box: Region | None = None
    packed_data: Array | None = None
    blanks: Sequence[jax.Array] = ()
    vanished: int = 0

    @property
    def filled(self) -> Sequence[tuple[Region, Array]]:
        """The regions that were read, each with its memory."""
        if self.box is None or self.packed_data is None:
            return self.regions
        return ((self.box, self.packed_data),)

    @property
    def is_lent(self) -> bool:
        """True if its buffers are reused once the array has been placed.

        On CPU devices, an array that took over such a buffer could not be donated: the first step
        after a restore would allocate the state a second time. A copy costs less, and the buffer is
        warm for the next array. A large array is not copied, since a copy would take its memory
        twice.
        """
        if self.memory != "jax":
            # Packed leaves are read into the arena, whose memory is reused.
            return self.packed and self.memory == "buffers"
        nbytes = math.prod(self.read.shape) * parse_dtype(self.read.stored).itemsize
        return self.packed or (nbytes <= MOST_LENT and _is_on_cpu(self.read.target))

    @property
    def is_placed(self) -> bool:
        """True if, once filled, it is already the wanted array."""
        return len(self.blanks) == 1 and self.read.target.sharding is None

    @property
    def is_padded(self) -> bool:
        """True if the pieces leave gaps, which are filled with zeros."""
        filled = sum(piece.size for piece in self.read.pieces)
        return self.read.leaf is None and filled < math.prod(self.read.shape)

    def open(self, buffers: Buffers) -> bool:
        """Make the buffers; return True if they have to be zeroed before use."""
        if self.regions or self.packed:
            return False
        value = self.read.value
        if value is not None:
            self.regions = [(region, _view(value, region)) for region in self.read.regions]
            return False
        kind = parse_dtype(self.read.stored)
        if self.memory == "files":
            self.regions = [(region, _NOTHING) for region in self.read.regions]
            return False
        if self.blanks:
            held = addressable_regions(self.read.target.sharding, self.read.shape)
            self.regions = [
                (region, memory_of(self.blanks[first]).view(kind).reshape(region.shape))
                for region, (first, *_) in held
            ]
            return self.is_padded
        self.regions = [(region, buffers.empty(region.shape, kind)) for region in self.read.regions]
        return self.is_padded

    def clear(self) -> None:
        for _, buffer in self.regions:
            buffer.reshape(-1).view(np.uint8)[...] = 0

    def put(self, use: ChunkUse, data: Array) -> None:
        """Copy a box of a chunk, whose elements are `data`, to its place."""
        if self.packed:
            # The leaf is placed before the memory of the request is reused.
            self.box, self.packed_data = use.target, data
            return
        if self.memory == "files":
            self.regions = [
                (region, data if number == use.region else buffer)
                for number, (region, buffer) in enumerate(self.regions)
            ]
            return
        _, buffer = self.regions[use.region]
        if use.strides:
            copy_strided(data, use.source.offset, buffer, use.target.offset, use.strides)
            return
        view = _view(buffer, use.target)
        view[...] = data[use.source.slices].reshape(view.shape)


def add_blanks(destinations: Sequence[Destination]) -> None:
    """Let large arrays on CPU devices be read straight into memory of jax's own.

    The first step after a restore can donate such memory, and nothing is copied into it.
    """
    groups: dict[Devices, list[tuple[Destination, Blank]]] = {}
    nbytes = 0
    for each in destinations:
        found = None if each.packed or each.memory != "jax" else _blank_of(each.read)
        if found is not None:
            devices, (shape, dtype) = found
            groups.setdefault(devices, []).append((each, (shape, dtype)))
            nbytes += len(devices) * math.prod(shape) * dtype.itemsize
    if nbytes < LEAST_BLANK:
        return
    for devices, members in groups.items():
        made = uninitialized_arrays([blank for _, blank in members], devices)
        if made is not None:
            choose_pages([memory_of(array) for arrays in made for array in arrays])
            for (each, _), arrays in zip(members, made, strict=True):
                each.blanks = arrays


def map_files(destinations: Sequence[Destination], chunks: Sequence[ChunkRead]) -> None:
    """Let an array be a part of its files if each of its regions is one unencoded chunk."""
    whole_chunks: set[int] = set()
    others: set[int] = set()
    for chunk in chunks:
        for use in chunk.uses:
            destination = destinations[use.read]
            is_part = chunk.is_plain and use.source.shape == chunk.covered.shape
            if not destination.packed and is_part:
                region = destination.read.regions[use.region]
                is_part = use.target.shape == region.shape
            (whole_chunks if is_part else others).add(use.read)
    for number in whole_chunks - others:
        if destinations[number].read.leaf is not None:
            destinations[number].memory = "files"


def _blank_of(read: ArrayRead) -> tuple[Devices, Blank] | None:
    """Return the devices of an array, and the blank array for each of them; None if impossible."""
    target, dtype = read.target, parse_dtype(read.stored)
    if (
        target.kind != "jax"
        or target.weak_type
        or target.dtype != dtype
        or dtype.name in _LESS_THAN_A_BYTE
        or read.value is not None
        or not math.prod(read.shape)
    ):
        return None
    sharding = target.sharding
    if sharding is None:
        free = default_device()
        return None if free.platform != "cpu" else ((free,), (read.shape, dtype))
    devices: tuple[Any, ...] = tuple(sharding.addressable_devices_indices_map(read.shape))
    if not devices or not read.shape or any(device.platform != "cpu" for device in devices):
        return None
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return None
    return devices, (sharding.shard_shape(read.shape), dtype)


def _is_on_cpu(target: ArrayTarget) -> bool:
    if target.kind not in ("jax", "key"):
        return False
    device = default_device() if target.sharding is None else next(iter(target.sharding.device_set))
    return str(device.platform) == "cpu"


def _direct_view(chunk: ChunkRead, destinations: Sequence[Destination]) -> Array | None:
    """Return the place of a chunk in the single buffer that wants all of it, or None."""
    if len(chunk.uses) != 1:
        return None
    (use,) = chunk.uses
    destination = destinations[use.read]
    has_buffers = not destination.packed and destination.memory != "files"
    if not has_buffers or use.source.shape != chunk.covered.shape:
        return None
    region, buffer = destination.regions[use.region]
    if use.strides:
        if not is_one_run(use.strides, chunk.covered.shape, region.shape):
            return None
        first = int(np.ravel_multi_index(use.target.offset, region.shape))
        run: Array = buffer.reshape(-1)[first : first + chunk.covered.size]
        return run.reshape(chunk.covered.shape)
    if not use.target.is_contiguous_in(region.shape):
        return None
    return _view(buffer, use.target).reshape(chunk.covered.shape)


def direct_memory(request: ReadRequest, destinations: Sequence[Destination]) -> Array | None:
    """Return the memory that a request can be read straight into, or None."""
    chunk = request.chunks[0]
    if len(request.chunks) > 1 or not chunk.is_plain:
        return None
    view = _direct_view(chunk, destinations)
    return None if view is None else view.reshape(-1).view(np.uint8)


def deliver(
    request: ReadRequest,
    memory: Array,
    destinations: Sequence[Destination],
    buffers: Buffers,
    in_place: bool,
) -> None:
    """Check the chunks of a request, whose bytes are in `memory`, and copy them to their places.

    Args:
        request: The request.
        memory: Bytes of the request.
        destinations: The arrays that are read.
        buffers: Source of memory for chunks that are encoded or padded.
        in_place: True if the memory is the place of the only chunk, so that nothing is copied.

    Raises:
        ExceptionGroup: One `CorruptCheckpointError` for every chunk whose bytes were changed.
    """
    damage = DamagedLeaves()
    block, first = memory.data, request.source.start
    for chunk in request.chunks:
        start, end = chunk.start - first, chunk.end - first
        try:
            if chunk.is_plain:
                check_chunk(chunk.leaf, chunk.number, block[start:end])
                done = in_place
                dtype = parse_dtype(chunk.leaf.dtype)
                data = np.ndarray(chunk.covered.shape, dtype, memory, start)
            else:
                stored = memory[start:end]
                view = _direct_view(chunk, destinations)
                done = view is not None
                data = _elements(chunk, stored, view, buffers)
                check_chunk(chunk.leaf, chunk.number, data.reshape(-1).view(np.uint8).data)
        except CorruptCheckpointError as error:
            damage.note(error)
            continue
        if not done:
            for use in chunk.uses:
                destinations[use.read].put(use, data)
    damage.raise_if_any()


def _elements(chunk: ChunkRead, stored: Array, view: Array | None, buffers: Buffers) -> Array:
    """Return the elements of an encoded or padded chunk, in `view` if it is given."""
    leaf, covered = chunk.leaf, chunk.covered.shape
    dtype = parse_dtype(leaf.dtype)
    if view is None:
        view = buffers.empty(covered, dtype)
    padded = view
    if leaf.codec is None:
        padded = stored.view(dtype).reshape(leaf.chunks)
    elif covered != tuple(leaf.chunks):
        padded = buffers.empty(leaf.chunks, dtype)
    if leaf.codec is not None:
        decode_chunk(leaf, stored, padded.reshape(-1).view(np.uint8))
    if padded is not view:
        view[...] = padded[whole(covered).slices]
    return view


def _view(buffer: Array, region: Region) -> Array:
    # With the ellipsis, indexing an array without axes gives a view, not a value.
    index: tuple[Any, ...] = (*region.slices, ...)
    view: Array = buffer[index]
    return view
