"""The directory at the end of a zip archive: which member is where. Pure.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. Readers of zip disagree about
archives that contradict themselves. Here, as few are let through as numpy and the like write:
nothing before the first member or behind the directory, no comment, no two members at one place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError, located
from ckpt.storage._base import UNKNOWN_SIZE

# The records at the end, from which the directory is found: 64-bit ones, their locator, the end.
END_BYTES = 56 + 20 + 22
_MOST_DIRECTORY_BYTES = 256 << 20
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_EXTRA = struct.Struct("<2H")
_ZIP_64 = 1
# What stands in a short field whose value is in a longer one elsewhere.
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _UTF_8 = 1 << 0, 1 << 11
_STORED, _DEFLATED = 0, 8
# Deflate makes at most so many bytes of one.
_MOST_RATIO = 1032


class DirectoryPlace(Struct, frozen=True):
    """Where the directory of an archive is.

    Attributes:
        offset: Its first byte.
        nbytes: Its bytes.
        count: How many members it lists.
    """

    offset: int
    nbytes: int
    count: int


class ZipMember(Struct, frozen=True):
    """A member of an archive.

    Attributes:
        name: Its name.
        raw_name: That in bytes.
        method: How it is compressed.
        packed: Its bytes in the archive.
        nbytes: Its bytes.
        crc: The CRC-32 of these.
        start: Where its own header begins.
        end: Where it ends at the latest: there the next one begins, or the directory.
    """

    name: str
    raw_name: bytes
    method: int
    packed: int
    nbytes: int
    crc: int
    start: int
    end: int = 0

    @property
    def is_deflated(self) -> bool:
        """Whether it is compressed."""
        return self.method == _DEFLATED


def directory_place(tail: bytes, size: int) -> DirectoryPlace:
    """Return where the directory is, from the last `END_BYTES` of an archive.

    Args:
        tail: These bytes, or all of a shorter archive.
        size: The size of the archive; `UNKNOWN_SIZE` if that is not known.

    Raises:
        CorruptCheckpointError: It does not end like an archive, or contradicts itself.
    """
    if len(tail) < _END.size or tail[-_END.size : -_END.size + 4] != b"PK\5\6":
        raise CorruptCheckpointError(
            "it does not end like a zip archive: it was cut, or is something else"
        )
    _, disk, first_disk, here, count, nbytes, offset, comment = _END.unpack(tail[-_END.size :])
    records = _END.size
    if len(tail) >= END_BYTES and tail[-42:-38] == b"PK\6\7":
        _, disk_64, records_offset, disks = _LOCATOR.unpack(tail[-42:-22])
        mark, length, _, _, disk, first_disk, here, count, nbytes, offset = _END_64.unpack(
            tail[-END_BYTES:-42]
        )
        records = END_BYTES
        if (mark, length, disk_64) != (b"PK\6\6", _END_64.size - 12, 0) or disks > 1:
            raise _damaged("its 64-bit records contradict each other")
        if records_offset != offset + nbytes:
            raise _damaged("its 64-bit records are not where it says")
    if disk or first_disk or here != count or comment:
        raise _damaged("it is said to be one of several, or to have a comment behind it")
    if nbytes > _MOST_DIRECTORY_BYTES:
        raise _damaged(f"it is said to have {nbytes} bytes")
    if size not in (UNKNOWN_SIZE, offset + nbytes + records):
        raise _damaged(
            f"by it the archive has {offset + nbytes + records} bytes, and the file has {size}"
        )
    return DirectoryPlace(offset, nbytes, count)


def parse_directory(data: bytes, place: DirectoryPlace) -> Sequence[ZipMember]:
    """Return the members that a directory lists, in the order of their places.

    Raises:
        CorruptCheckpointError: It is damaged, or contradicts itself; names the member.
        UnsupportedFormatError: A member is encrypted, or compressed in a way that is not read;
            names it.
    """
    found: dict[str, ZipMember] = {}
    at = 0
    for _ in range(place.count):
        member, at = _member(data, at)
        with located(leaf=member.name):
            if member.name in found:
                raise CorruptCheckpointError("two members of the archive have this name")
            if member.start + _LOCAL.size + len(member.raw_name) + member.packed > place.offset:
                raise CorruptCheckpointError("the directory of the archive says that it is outside")
        found[member.name] = member
    if at != len(data):
        raise _damaged(f"{len(data) - at} bytes of it belong to no member")
    members = sorted(found.values(), key=lambda member: member.start)
    starts = [*(member.start for member in members), place.offset]
    return [replace(member, end=starts[number + 1]) for number, member in enumerate(members)]


def _member(data: bytes, at: int) -> tuple[ZipMember, int]:
    """Return the member whose entry begins at an offset of a directory, and where it ends."""
    if at + _ENTRY.size > len(data) or data[at : at + 4] != b"PK\1\2":
        raise _damaged("it ends early, or has something else in it")
    _, _, _, flags, method, _, _, crc, packed, nbytes, *lengths, disk, _, _, start = (
        _ENTRY.unpack_from(data, at)
    )
    at += _ENTRY.size
    fields: list[bytes] = []
    for length in lengths:
        fields.append(data[at : at + length])
        at += length
    if at > len(data):
        raise _damaged("it ends early")
    raw_name, extra, _ = fields
    name = _text(raw_name, is_utf_8=bool(flags & _UTF_8))
    with located(leaf=name):
        nbytes, packed, start = _long_values(extra, (nbytes, packed, start))
        if flags & _ENCRYPTED:
            raise UnsupportedFormatError("it is encrypted, which is not read here")
        if method not in (_STORED, _DEFLATED):
            raise UnsupportedFormatError(
                f"it is compressed by method {method} of zip, which is not read here: save it with "
                "numpy.savez or numpy.savez_compressed"
            )
        if disk not in (0, _FULL_16) or (
            packed != nbytes if method == _STORED else nbytes > packed * _MOST_RATIO
        ):
            raise CorruptCheckpointError(
                f"the directory of the archive is damaged: {packed} bytes cannot hold {nbytes}"
            )
    return ZipMember(name, raw_name, method, packed, nbytes, crc, start), at


def _text(raw: bytes, *, is_utf_8: bool) -> str:
    try:
        name = raw.decode("utf-8" if is_utf_8 else "cp437")
    except UnicodeDecodeError:
        raise _damaged(f"the name {raw!r:.120} is not valid text") from None
    if not name or "\0" in name:
        raise _damaged(f"a member cannot have the name {name!r:.120}")
    return name


def _long_values(extra: bytes, short: Sequence[int]) -> Sequence[int]:
    """Return values of which those that are too long for their field are in the extra one."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        body = extra[at + _EXTRA.size : at + _EXTRA.size + length]
        at += _EXTRA.size + length
        if kind == _ZIP_64:
            break
    else:
        body = b""
    values = []
    for value in short:
        if value == _FULL_32:
            if len(body) < 8:
                raise CorruptCheckpointError(
                    "the directory of the archive is damaged: a 64-bit value is missing"
                )
            value, body = int.from_bytes(body[:8], "little"), body[8:]
        values.append(value)
    return values


def content_offset(member: ZipMember, head: bytes) -> int:
    """Return where the bytes of a member begin, from its own header.

    Args:
        member: The member.
        head: The first bytes at its place.

    Raises:
        CorruptCheckpointError: Another member is there, or none, or it does not fit there.
    """
    known = _LOCAL.size + len(member.raw_name)
    if len(head) < known or head[:4] != b"PK\3\4":
        raise CorruptCheckpointError("it is not where the directory of the archive says")
    _, _, _, method, *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
    if (method, head[_LOCAL.size : _LOCAL.size + name_bytes]) != (member.method, member.raw_name):
        raise CorruptCheckpointError("the archive has another member in its place")
    start = member.start + known + int(extra_bytes)
    if start + member.packed > member.end:
        raise CorruptCheckpointError("the archive has not as many bytes for it as it says")
    return start


def _damaged(why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the directory of the archive is damaged: {why}")
