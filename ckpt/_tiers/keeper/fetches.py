"""`Fetches`: steps of farther places on their way to the nearest tier, when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from ckpt._conversion.copies.place import CopyPlace
from ckpt._conversion.copies.step_copy import StepCopier, Uncounted
from ckpt._conversion.copies.steps import CopyRules, copy_step
from ckpt._tiers.keeper.messages import Fetch, Fetched, Fetching, FromKeeper, Link, place_of_json
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._resolve import open_root

_WORD_SECONDS = 5.0


class Fetches:
    """Copies steps to the nearest tier, one at a time. Used on the keeper's loop."""

    def __init__(
        self, links: Sequence[Link], tasks: TaskGroup, told: Callable[[FromKeeper], None]
    ) -> None:
        """Copy from where `links` lead, in tasks of `tasks`."""
        self._links = links
        self._tasks = tasks
        self._told = told
        self._turn = anyio.Lock()
        self._asked: set[Fetch] = set()

    def start(self, fetch: Fetch) -> None:
        """Copy a step, which is told; one that is under way already is not copied twice."""
        if fetch not in self._asked:
            self._asked.add(fetch)
            self._tasks.start_soon(self._run, fetch)

    async def _run(self, fetch: Fetch) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._say)
            async with self._turn:
                try:
                    done = await self._copy(fetch)
                except CheckpointError as error:
                    number = error.errno if isinstance(error, StorageError) else None
                    done = Fetched(fetch, "refused", problem=error.message, errno=number)
            tasks.cancel_scope.cancel()
        self._asked.discard(fetch)
        self._told(done)

    async def _say(self) -> None:
        """Show the trainer that it is going on, for ever."""
        while True:
            self._told(Fetching())
            await anyio.sleep(_WORD_SECONDS)

    async def _copy(self, fetch: Fetch) -> Fetched:
        """Copy a step, unless every byte of it is there; what is damaged there is replaced."""
        began = time.monotonic()
        source = open_root(place_of_json(self._links[fetch.place - 1].target))
        target = open_root(place_of_json(self._links[0].source))
        await target.prepare()
        uncounted = Uncounted()
        copier = StepCopier(uncounted)
        try:
            copied = await copy_step(
                copier,
                CopyPlace(source, fetch.step_dir),
                fetch.step,
                CopyPlace(target, fetch.step_dir),
                # Only what is there already is compared with jax, which takes a moment to import.
                CopyRules(verify=True),
                uncounted,
            )
        finally:
            copier.close()
        seconds = time.monotonic() - began
        return Fetched(fetch, copied.outcome, copied.nbytes, seconds, copied.reason or "")
