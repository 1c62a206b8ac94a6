"""The metadata of a root: written once, beside the steps, where Orbax looks for it."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping
from typing import Any

from ckpt._plan.orbax_view import root_view
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

_NOTE = "metadata/_ROOT_METADATA"
_MAX_BYTES = 16 << 20
# How often another writer may write it between a look and a write.
_TRIES = 10


async def write_root_metadata(storage: Storage, metadata: Mapping[str, Any] | None) -> None:
    """Write the metadata of a root, unless there is some; what is there stays.

    Where they may not be read, or are no metadata, a warning says so: no step needs them.

    Raises:
        StorageError: They cannot be read, for another reason, or not be written.
    """
    for _ in range(_TRIES):
        try:
            document = await _read(storage)
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
            return
        except StorageError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
            logger.warning("the metadata of the root was not changed: %s", error)
            return
        if document is not None:
            await _add(storage, document, metadata or {})
            return
        if await storage.put_note(_NOTE, root_view(metadata or {}), replace=False):
            return
        # Another writer was quicker; what it wrote decides.
    logger.warning("%s/%s comes and goes; it was not written", storage.location, _NOTE)


async def _add(storage: Storage, document: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Add the metadata to a document that has none; it keeps what else it says."""
    found = document["custom_metadata"]
    if not metadata:
        return
    if not found:
        # Written by a manager that was given none, or by Orbax, which keeps more than that in it.
        data = json.dumps(document | {"custom_metadata": dict(metadata)}).encode()
        await storage.put_note(_NOTE, data, replace=True)
    elif found != metadata:
        logger.warning(
            "%s keeps the metadata it was given first; what differs now is left out: %s",
            storage.location,
            ", ".join(sorted(_differing(found, metadata)))[:200],
        )


async def read_root_metadata(storage: Storage) -> dict[str, Any] | None:
    """Return the metadata of a root; empty if it was given none, None if nothing was written.

    Raises:
        StorageError: It cannot be read.
        CorruptCheckpointError: What is there is not root metadata.
    """
    document = await _read(storage)
    return None if document is None else document["custom_metadata"] or {}


async def _read(storage: Storage) -> dict[str, Any] | None:
    """Return the whole document; its custom metadata are a dict or None."""
    data = await storage.read_note(_NOTE, _MAX_BYTES)
    if data is None:
        return None
    try:
        document: dict[str, Any] = json.loads(data)
        custom = document["custom_metadata"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(storage) from error
    if custom is not None and not isinstance(custom, dict):
        raise _damaged(storage)
    return document


def _damaged(storage: Storage) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{storage.location}/{_NOTE} is not root metadata: expected a JSON object with an object "
        "custom_metadata. Remove the file to have it written anew; no step needs it"
    )


def _differing(found: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    return {
        str(key)
        for key in found.keys() | given.keys()
        if key not in found or key not in given or found[key] != given[key]
    }
