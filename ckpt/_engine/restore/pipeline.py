"""The restore flow: with the manifest in hand, load the wanted items.

The stages of one read, from the item to the bytes and back:

    restore_items            pipeline       every wanted item at once
      Handler.load           handlers       which arrays, and the form of each result
        EngineItemReader.read  item_reader
          plan_chunk_reads     chunk_reads  arrays -> stored chunks, each once
          plan_requests        chunk_reads  chunks -> requests: byte ranges of data files
          add_blanks           destinations   arrays that are read in place, still without content
          _read_requests       item_reader  at most CONCURRENT_REQUESTS in progress:
            open               destinations   host buffers of the arrays that are due
            read_block         storage        bytes -> their place, or arena
            deliver            destinations   decode, check digests, copy out of the arena
            _or_elsewhere      item_reader    damaged chunks, from other copies of the step
            place              placement      complete arrays -> devices
      Handler.load                          arrays -> the tree

If processes share their reads, `shared_reads` comes between the requests and the storage: each
member of a group reads a part, all exchange their parts, and each carries out its requests from
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ckpt._arguments import shown
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._format.per_process import pick
from ckpt._plan.adapt import Adapt
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import short_switch_interval
from ckpt._tree.leaf_kinds import UNREADABLE
from ckpt._tree.leaf_names import near_miss
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers._base import ItemReader, errors_of
from ckpt.storage._base import MapsFiles
from ckpt.storage._manifests import while_read

logger = logging.getLogger("ckpt")


class ItemTarget(Struct, frozen=True):
    """The form in which one item is wanted.

    Attributes:
        like: The target, or None for the item as it was saved.
        adapt: Differences that are allowed between the target and the item.
    """

    like: Any
    adapt: Adapt


async def restore_items(
    restore: RestoreContext,
    wanted: Mapping[str, ItemTarget],
    reader_of: Callable[[str], ItemReader] | None = None,
) -> dict[str, Any]:
    """Return the wanted items of a committed step by name, loaded concurrently.

    In a job of several processes each one loads its own part and waits for no other, unless they
    share their reads. Then items are loaded one after the other, in the same order everywhere.

    `reader_of` returns the reader of an item, instead of one for the item as it is stored.

    An item that fails stops the others. Changes that they have made to objects by then stay (see
    `StatefulHandler`).

    Raises:
        CheckpointError: The failure, with step and item.
        StepDeletedError: The step was deleted or replaced meanwhile.
    """
    manifest = restore.manifest
    unknown = sorted(set(wanted) - set(manifest.items))
    if unknown:
        names = ", ".join(manifest.items)
        has = (
            f"the step was saved without item names, which makes it the item {names}: leave out "
            "items="
            if manifest.unnamed
            else f"the step has {names}"
        )
        raise InvalidArgumentError(
            f"there is no item {', '.join(unknown)}{near_miss(unknown[0], manifest.items)}; {has}",
            step=manifest.step,
        )
    if restore.memory == "files":
        _check_mappable(restore)
    found: dict[str, Any] = dict.fromkeys(wanted)

    async def load(name: str) -> None:
        want, entry = wanted[name], manifest.items[name]
        if entry.handler in UNREADABLE:
            raise UNREADABLE[entry.handler](str(entry.data), item=name)
        handler = restore.engine.handlers.named(entry.handler, name)
        with errors_of(handler, name, "load it"):
            part = pick(manifest, name, restore.process, restore.processes)
            plain = EngineItemReader(restore, name, part)
            reader = plain if reader_of is None else reader_of(name)
            found[name] = await handler.load(part.entry, want.like, want.adapt, reader)

    async with while_read(restore.storage, restore.step_dir, manifest):
        with located(step=manifest.step), short_switch_interval():
            if restore.broadcast is not None:
                for name in sorted(wanted):
                    await load(name)
                await restore.broadcast.finish()
            else:
                await for_each(load, wanted)
    if restore.casts:
        logger.info(
            "the target has other dtypes than step %s: %s",
            manifest.step,
            "; ".join(
                f"{old} -> {new}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, "
                f"{zeros} {'value' if zeros == 1 else 'values'} became 0"
                for (old, new), (leaves, zeros) in sorted(restore.casts.items())
            ),
        )
    return found


def _check_mappable(restore: RestoreContext) -> None:
    advice = "Leave memory= out, or pass memory='buffers'"
    if restore.external_files is not None:
        raise InvalidArgumentError(
            "memory='files' maps files of this library; these were written by another one. "
            + advice
        )
    if not isinstance(restore.storage, MapsFiles):
        raise InvalidArgumentError(
            "memory='files' maps files of a local file system, which "
            f"{shown(restore.storage.location)} is not on. {advice}"
        )
    if restore.broadcast is not None:
        raise InvalidArgumentError(
            "memory='files' and broadcast_bytes exclude each other: what is exchanged over the "
            f"devices is not mapped. {advice}"
        )
