"""The names of objects are those of `docs/reference/format.md`."""

from __future__ import annotations

import re
import uuid

import numpy as np

import ckpt
import ckpt.sync
from ckpt.storage._object.config import Memory
from ckpt.storage._object.connection import connect
from tests.support.file_names import HEX, check

# All but the manifest are in a folder of the step.
IN_FOLDER = {
    *("_CHECKPOINT_METADATA", "commit_success.txt", "orbax.checkpoint"),
    *("model/commit_success.txt", "model/manifest.ocdbt", f"model/d/{HEX}"),
    *("model/_METADATA", "model/_sharding", "model/array_metadatas/process_0"),
    *("note/commit_success.txt", "note/metadata", "note/text.txt"),
}


def test_those_of_a_root() -> None:
    root = Memory(f"memory://{uuid.uuid4().hex}/run")
    store = connect(root).open()[0]
    during: set[str] = set()

    def keys() -> set[str]:
        return {key.decode() for key in store.list().result()}

    def look(event: ckpt.types.Event) -> None:
        if (event.operation, event.phase) == ("save", "write"):
            during.update(keys())

    with ckpt.sync.CheckpointManager(root, trash="trash", observers=[look]) as mgr:
        for step in (1, 2):
            mgr.save(step, items={"model": {"w": np.ones(64)}, "note": "by hand"}).result()
        mgr.delete(1)
    found = keys()
    (folder,) = {key.split("/")[1] for key in found if re.match(rf"2/{HEX}/", key)}
    # The files of a step in the trash stay where they are.
    trashed = {key for key in found if key.startswith("1/")}
    check(
        found - trashed,
        {
            *("2/ckpt.json", rf"\.ckpt-steps/2\.{folder}", rf"\.ckpt-trash/1\.{HEX}"),
            *(f"2/{folder}/{name}" for name in IN_FOLDER),
            r"\.ckpt-run/preservation\.json",
        },
    )
    attempts = {key for key in during if key.startswith(".ckpt-attempts/")}
    check(attempts, {rf"\.ckpt-attempts/{step}\.{HEX}" for step in (1, 2)})
