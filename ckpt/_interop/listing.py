"""Properties of steps of other libraries for lists: directories of Orbax, and files."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ckpt._interop.files import head_of, is_flax
from ckpt._interop.flax.checkpoint import FORMAT as FLAX
from ckpt._interop.orbax import listing as orbax
from ckpt._interop.orbax.listing import OrbaxHead
from ckpt._runtime.tasks import for_each
from ckpt.storage._base import Storage, fingerprint

_MOST_LOOKS = 16


async def stamps_of(storage: Storage, names: Sequence[str]) -> list[Hashable | None]:
    """Return for each name a value that changes when another checkpoint takes its place."""
    stamps = await orbax.stamps_of(storage, names)
    # Stamps of files are texts; the stamps of directories are not.
    for number, name in enumerate(names):
        if stamps[number] is None:
            stamps[number] = await fingerprint(storage, "", name)
    return stamps


async def heads_of(
    storage: Storage, stamps: Mapping[str, Hashable], names: Sequence[str]
) -> list[OrbaxHead | None]:
    """Return the head of each name; None for a name that is not a checkpoint.

    Args:
        storage: The root.
        stamps: The stamps of these names, and of others.
        names: The names.
    """
    files = [name for name in names if isinstance(stamps[name], str)]
    folders = [name for name in names if not isinstance(stamps[name], str)]
    heads = dict(zip(folders, await orbax.heads_of(storage, folders), strict=True))

    async def look(name: str) -> None:
        head, stamp = await head_of(storage, name), str(stamps[name])
        heads[name] = OrbaxHead(stamp, 0, 0, None, FLAX) if is_flax(head) else None

    await for_each(look, files, _MOST_LOOKS)
    return [heads[name] for name in names]
