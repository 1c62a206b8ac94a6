"""Uninitialized arrays: jax arrays on CPU devices whose content is still to be written.

jax donates only memory that it has allocated itself. Host memory can be copied into such memory,
which takes as long as touching both. A blank array is such memory before its first use, and files
are read straight into it. A compiled program with one custom call that does nothing returns it,
made with the public `jax.ffi`. Compiling takes about 20 ms for a hundred arrays, once in a process;
running takes less than 1 ms, since no memory is touched.

The interface of the call is in `xla/ffi/api/c_api.h`, which jaxlib ships. This module uses only the
start of a call frame, which has been the same since version 0.1 of that interface.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

logger = logging.getLogger("ckpt")

Shape = tuple[int, ...]
Devices = tuple[jax.Device, ...]
Blank = tuple[Shape, np.dtype[Any]]
Memory = np.ndarray[Any, np.dtype[np.uint8]]

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
