"""The metadata of a root: written once, beside the steps, where Orbax looks for it."""

from __future__ import annotations

import contextlib
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
# The note of older versions of Orbax, with the values alone, which Orbax reads if the other is
# missing.
_OLD_NOTE = "metadata/metadata"
_MAX_BYTES = 16 << 20
# Number of times that another writer may change the note between a look and a write.
_TRIES = 10


async def write_root_metadata(storage: Storage, metadata: Mapping[str, Any]) -> None:
    """Write the metadata of a root if it has none yet; existing metadata stay.

    If the existing note may not be read, or holds no metadata, a warning says so: no step needs it.

    Raises:
        StorageError: The note cannot be read for another reason, or cannot be written.
    """
    if not metadata:
        return
    for _ in range(_TRIES):
        try:
            document = await _read(storage)
        except (CorruptCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in (errno.EACCES, errno.EPERM):
                raise
            logger.warning("the metadata of the root was not changed: %s", error)
            return
        if document is not None:
            await _add(storage, document, metadata)
            return
        if await storage.put_note(_NOTE, root_view(metadata), replace=False):
            return
        # Another writer was faster; look at its note.
    logger.warning("%s/%s comes and goes; it was not written", storage.location, _NOTE)


async def _add(storage: Storage, document: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Add the metadata to a document that has none; its other fields stay."""
    found = document["custom_metadata"]
    if not found:
        # Orbax keeps other fields in the document.
        data = json.dumps(document | {"custom_metadata": dict(metadata)}).encode()
        await storage.put_note(_NOTE, data, replace=True)
    elif found != metadata:
        both = found.keys() | metadata.keys()
        differing = [str(key) for key in both if found.get(key, ...) != metadata.get(key, ...)]
        logger.warning(
            "%s keeps the metadata it was given first; what differs now is left out: %s",
            storage.location,
            ", ".join(sorted(differing))[:200],
        )


async def read_root_metadata(storage: Storage) -> dict[str, Any] | None:
    """Return the metadata of the root; empty if there are none, None if no note was written.

    Raises:
        StorageError: The note cannot be read.
        CorruptCheckpointError: The note is not root metadata.
    """
    document = await _read(storage)
    return None if document is None else document["custom_metadata"] or {}


async def _read(storage: Storage) -> dict[str, Any] | None:
    """Return the whole document; its `custom_metadata` is a dict or None."""
    for note in (_NOTE, _OLD_NOTE):
        data = await storage.read("", note, _MAX_BYTES)
        if data is None:
            continue
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            found = json.loads(data)
            document: dict[str, Any] = found if note == _NOTE else {"custom_metadata": found}
            if isinstance(document["custom_metadata"], dict | None):
                return document
        raise CorruptCheckpointError(
            f"{storage.location}/{note} is not root metadata: expected a JSON object, in "
            f"{_NOTE} with an object custom_metadata. Remove the file to have it written anew; no "
            "step needs it"
        )
    return None
