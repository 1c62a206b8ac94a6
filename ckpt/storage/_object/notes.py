"""Notes in an object store: small objects beside the entries, in folders of the root."""

from __future__ import annotations

import re
import secrets

from ckpt.errors import InvalidArgumentError
from ckpt.storage._object.client import MISSING, ObjectClient
from ckpt.storage._object.concurrency import each
from ckpt.storage._object.leases import Sightings

__all__ = ["ages", "check_name", "drop", "put", "touch"]

_PART = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.=+,@-]{0,199}\Z")
_NONCE_BITS = 64


def check_name(name: str) -> str:
    """Return the key of a note.

    Raises:
        InvalidArgumentError: It is none.
    """
    folder, _, file = name.partition("/")
    if any(part in (".", "..") or not _PART.match(part) for part in (folder, file)):
        raise InvalidArgumentError(f"note {name!r:.120}: expected a folder and a name in it")
    return name


async def put(keys: ObjectClient, name: str, data: bytes, *, replace: bool) -> bool:
    """Write a note; False if it exists and is not to be replaced."""
    key = check_name(name)
    if replace:
        await keys.put(key, data)
        return True
    return (await keys.swap(key, data, MISSING)).generation is not None


async def ages(keys: ObjectClient, folder: str, sightings: Sightings) -> dict[str, float]:
    """Return for how long each note of a folder has been seen unchanged, in seconds, by name."""
    check_name(f"{folder}/any")
    names = [name for name in await keys.list(f"{folder}/") if "/" not in name]
    sightings.keep(folder, {f"{folder}/{name}" for name in names})
    found: dict[str, float] = {}

    async def look(name: str) -> None:
        first = await keys.first(f"{folder}/{name}")
        if first is not None:
            found[name] = sightings.age(f"{folder}/{name}", first.generation)

    await each(look, names)
    return found


async def touch(keys: ObjectClient, name: str) -> bool:
    """Write a note anew, so that it is seen to have changed; False if it is not there.

    What it says stays: white space at its end is what changes, to something that was never there.
    """
    key = check_name(name)
    while (found := await keys.get(key)) is not None:
        bits = f"{secrets.randbits(_NONCE_BITS):0{_NONCE_BITS}b}"
        data = found.data.rstrip(b" \t") + bits.replace("0", " ").replace("1", "\t").encode()
        if (await keys.swap(key, data, found.generation)).generation is not None:
            return True
    return False


async def drop(keys: ObjectClient, name: str) -> bool:
    """Remove a note; False if it is not there."""
    key = check_name(name)
    if await keys.first(key) is None:
        return False
    await keys.delete(key)
    return True
