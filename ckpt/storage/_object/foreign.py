"""Foreign steps in an object store, which are of Orbax or a single file: finding, removing them."""

from __future__ import annotations

from ckpt._runtime.tasks import for_each
from ckpt.storage._object.names import folder_of
from ckpt.storage._store import Store, StoredObject

_SUCCESS, _ABOUT = "commit_success.txt", "_CHECKPOINT_METADATA"
# Files that mark a step of Orbax.
MARKS = (_SUCCESS, _ABOUT)


async def is_foreign(keys: Store, step_dir: str) -> bool:
    """Return True if Orbax has written a step directory, finished or not, or it is a file."""
    found: dict[str, StoredObject | None] = {}

    async def look(name: str) -> None:
        read = keys.get(f"{step_dir}/{name}") if name else keys.get(step_dir, 0, 1)
        found[name] = await read

    await for_each(look, ("", *MARKS))
    success = found[_SUCCESS]
    if success is None:
        return (found[_ABOUT] or found[""]) is not None
    # Orbax writes the path of the step into it, this library the name alone.
    return b"/" in success.data


async def remove_foreign(keys: Store, step_dir: str) -> bool:
    """Remove a foreign step, first the files that mark it; False if there is none."""
    if not await is_foreign(keys, step_dir):
        return False
    await for_each(keys.delete, (step_dir, *(f"{step_dir}/{name}" for name in MARKS)))
    # Folders of attempts hold objects of this library, such as those of a step in the trash.
    below = [path for path in await keys.list(f"{step_dir}/") if folder_of(path) is None]
    await for_each(lambda path: keys.delete(f"{step_dir}/{path}"), below)
    return True
