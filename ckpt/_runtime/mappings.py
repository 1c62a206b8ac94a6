"""Mappings of memory that are made without the interpreter lock.

The address space has a lock of its own, which the system holds while it makes pages for a thread:
for milliseconds, where files are read into cold memory. `mmap.mmap` waits for that lock while it
holds the interpreter lock, so the event loop of the caller waits as well. A call through `ctypes`
releases the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref

__all__ = ["address_of", "advise", "map_memory", "system_error", "system_library"]

_READ_WRITE: int = mmap.PROT_READ | mmap.PROT_WRITE


def map_memory(
    nbytes: int, fd: int | None = None, offset: int = 0, access: int = _READ_WRITE
) -> memoryview:
    """Map memory private to this process. It is unmapped once nothing refers to it.

    Python's own `mmap` also keeps a descriptor for each mapped file, and a process may only have
    about a thousand.

    Args:
        nbytes: Number of bytes.
        fd: File whose bytes are mapped; without a file the memory is zeros, and takes no page until
            it is touched.
        offset: Offset in the file, at a whole page.
        access: `mmap.PROT_READ` and `mmap.PROT_WRITE`.

    Raises:
        OSError: The system refused it.
        OverflowError, ValueError: No process can have so much memory.
    """
    # ctypes raises if the number is too large for C.
    kind = ctypes.c_uint8 * nbytes
    library = system_library()
    size, start = ctypes.c_size_t(nbytes), ctypes.c_int64(offset)
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if fd is None else 0)
    address = library.mmap(None, size, access, flags, -1 if fd is None else fd, start)
    if address in (None, ctypes.c_void_p(-1).value):
        raise system_error()
    region = kind.from_address(address)
    # Not unmapped at exit: a thread may still read it.
    weakref.finalize(region, library.munmap, ctypes.c_void_p(address), size).atexit = False
    return memoryview(region).cast("B")


def address_of(region: memoryview) -> int:
    """Return the address of memory of `map_memory`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def advise(start: int, nbytes: int, advice: int) -> OSError | None:
    """Call `madvise`; return the error of the system, or None."""
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(nbytes)
    return system_error() if system_library().madvise(address, size, advice) else None


@functools.cache
def system_library() -> ctypes.CDLL:
    """Return the C library; cached, since loading it again would make a new class."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def system_error() -> OSError:
    """Return the error of the last call of a system function in this thread."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
