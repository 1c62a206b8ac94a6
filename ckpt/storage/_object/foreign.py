"""Steps of Orbax in an object store: whether there is one, and its removal."""

from __future__ import annotations

from ckpt.storage._object.client import ObjectClient, StoredObject, each
from ckpt.storage._object.names import folder_of

_SUCCESS, _ABOUT = "commit_success.txt", "_CHECKPOINT_METADATA"
# What makes a step of Orbax one.
MARKS = (_SUCCESS, _ABOUT)


async def is_foreign(keys: ObjectClient, step_dir: str) -> bool:
    """Tell whether Orbax has written a step directory, finished or not."""
    found: dict[str, StoredObject | None] = {}

    async def look(name: str) -> None:
        found[name] = await keys.get(f"{step_dir}/{name}")

    await each(look, MARKS)
    success = found[_SUCCESS]
    if success is None:
        return found[_ABOUT] is not None
    # Orbax writes the path of the step into it, this library the name alone.
    return b"/" in success.data


async def remove_foreign(keys: ObjectClient, step_dir: str) -> bool:
    """Remove a step of Orbax, first what makes it one; False if there is none."""
    if not await is_foreign(keys, step_dir):
        return False
    await each(lambda name: keys.delete(f"{step_dir}/{name}"), MARKS)
    # In folders of attempts are objects of this library, such as those of a step in the trash.
    below = [path for path in await keys.list(f"{step_dir}/") if folder_of(path) is None]
    await each(lambda path: keys.delete(f"{step_dir}/{path}"), below)
    return True
