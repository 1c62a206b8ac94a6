"""Notes in an object store: small objects in folders of the root, beside the step directories."""

from __future__ import annotations

import secrets

from ckpt._runtime.futures import for_each
from ckpt.storage._base import note_parts
from ckpt.storage._object.leases import Sightings
from ckpt.storage._store import Store

_NONCE_BITS = 64


async def put(keys: Store, name: str, data: bytes, *, replace: bool) -> bool:
    """Write a note; False if it exists and may not be replaced."""
    note_parts(name)
    if replace:
        await keys.put(name, data)
        return True
    return (await keys.swap(name, data, None)).generation is not None


async def ages(keys: Store, folder: str, sightings: Sightings) -> dict[str, float]:
    """Return for how long each note of a folder has been seen unchanged, in seconds, by name."""
    note_parts(f"{folder}/any")
    names = [name for name in await keys.list(f"{folder}/") if "/" not in name]
    sightings.keep(folder, {f"{folder}/{name}" for name in names})
    found: dict[str, float] = {}

    async def look(name: str) -> None:
        first = await keys.get(f"{folder}/{name}", 0, 1)
        if first is not None:
            found[name] = sightings.age(f"{folder}/{name}", first.generation)

    await for_each(look, names)
    return found


async def touch(keys: Store, name: str) -> bool:
    """Write a note again, so that it is seen to have changed; False if it does not exist.

    Its content stays. Only the white space at its end changes, to a value never used before.
    """
    note_parts(name)
    while (found := await keys.get(name)) is not None:
        bits = f"{secrets.randbits(_NONCE_BITS):0{_NONCE_BITS}b}"
        data = found.data.rstrip(b" \t") + bits.replace("0", " ").replace("1", "\t").encode()
        if (await keys.swap(name, data, found.generation)).generation is not None:
            return True
    return False


async def drop(keys: Store, name: str) -> bool:
    note_parts(name)
    if await keys.get(name, 0, 1) is None:
        return False
    await keys.delete(name)
    return True
