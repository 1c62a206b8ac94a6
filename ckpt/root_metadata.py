"""What is said of a whole root: written once, beside the steps, where Orbax looks for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from ckpt.errors import CorruptCheckpointError
from ckpt.layout.orbax_view import root_view
from ckpt.storage.base import Storage

__all__ = ["read_root_metadata", "write_root_metadata"]

logger = logging.getLogger("ckpt")

_NOTE = "metadata/_ROOT_METADATA"
_MAX_BYTES = 16 << 20


async def write_root_metadata(storage: Storage, metadata: Mapping[str, Any] | None) -> None:
    """Write the metadata of a root, unless somebody has; what is there stays.

    Raises:
        StorageError: It cannot be read or written.
    """
    try:
        found = await read_root_metadata(storage)
    except CorruptCheckpointError as error:
        logger.warning("%s", error)
        return
    if found is None:
        await storage.put_note(_NOTE, root_view(metadata or {}), replace=False)
    elif not metadata:
        return
    elif not found:
        # Written by a manager that was given none.
        await storage.put_note(_NOTE, root_view(metadata), replace=True)
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
        CorruptCheckpointError: What is there is no root metadata.
    """
    data = await storage.read_note(_NOTE, _MAX_BYTES)
    if data is None:
        return None
    try:
        custom = json.loads(data)["custom_metadata"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(storage) from error
    if custom is not None and not isinstance(custom, dict):
        raise _damaged(storage)
    return custom or {}


def _damaged(storage: Storage) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{storage.location}/{_NOTE} is no root metadata: expected a JSON object with an object "
        "custom_metadata. Remove the file to have it written anew; no step needs it"
    )


def _differing(found: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    return {
        str(key)
        for key in found.keys() | given.keys()
        if key not in found or key not in given or found[key] != given[key]
    }
