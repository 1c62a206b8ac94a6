"""The marks of a run: kept in its root, and compared where steps are run again.

    begin     the caller's thread   begins the pass over the state
    _take     the engine's loop     waits for the devices, compares, and writes the note

After a crash, the steps between the last checkpoint and the crash are run again. Their marks are
compared with those of the run that saved it, from its notes. Process 0 of a job does so for all,
since the marks are the same on each.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, SupportsIndex

import anyio
from msgspec import Struct, field

from ckpt._arguments import check_step
from ckpt._proof.mark_notes import (
    FOLDER,
    MOST_BYTES,
    encode_marks,
    marks_of_run_before,
    prune,
    read_marks,
)
from ckpt._proof.marks import SETTINGS, Marks
from ckpt._proof.state_marks import StateMark
from ckpt._proof.state_pass import BegunMark, StatePass
from ckpt._proof.verdicts import Repetition
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CheckpointError, NotRepeatedError
from ckpt.storage._base import Storage

if TYPE_CHECKING:
    from ckpt._steps.service import RootService

logger = logging.getLogger("ckpt")

# Marks that wait to be taken, at most: a store may not answer for minutes.
_MOST_BEGUN = 100
# Name of the marks of a manager among the objects that its engine keeps for extensions.
_MARKS = "marks"


class RunMarks(Struct, eq=False):
    """The marks that one manager makes.

    Attributes:
        storage: The root.
        loop: The engine's loop.
        is_writer: True for the process of the job that keeps and compares marks.
        settings: What the user has chosen.
    """

    storage: Storage
    loop: EngineLoop
    is_writer: bool
    settings: Marks
    _pass: StatePass = field(default_factory=StatePass)
    _begun: deque[BegunMark] = field(default_factory=deque)
    _taking: anyio.Lock | None = None
    # The comparison with an earlier run, once its marks are read.
    _repetition: Repetition | None = None
    # The marks of the note that is being filled, and its name.
    _filling: list[StateMark] = field(default_factory=list)
    _note: str = ""
    _run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    _is_late: bool = False
    _is_said: set[str] = field(default_factory=set)

    def begin(self, step: int, state: object) -> None:
        """Begin a mark; see `CheckpointManager.mark`. Called on the caller's thread."""
        found = self._repetition and self._repetition.found
        if found and self.settings.on_difference == "raise":
            raise NotRepeatedError(str(found), step=found.step)
        if step % self.settings.every:
            return
        begun = self._pass.begin(step, state)
        if not self.is_writer:
            return
        if len(self._begun) >= _MOST_BEGUN:
            # Nothing is wrong with the run.
            if not self._is_late:
                where = redact(self.storage.location)
                logger.info("%s: steps are faster than their marks, and some have none", where)
            self._is_late = True
            return
        self._begun.append(begun)
        self.loop.submit(self._take)

    async def _take(self) -> None:
        """Take the marks that have begun, one after the other."""
        self._taking = self._taking or anyio.Lock()
        async with self._taking:
            while self._begun:
                begun = self._begun.popleft()
                try:
                    mark, unequal = await run_in_thread(begun.finish)
                except Exception as error:
                    self._say("pass", f"step {begun.step} was not marked: {error}")
                    continue
                for leaf, devices in unequal.items():
                    self._say(
                        f"unequal {leaf}",
                        f"step {begun.step}: {', '.join(devices)} should hold the same values of "
                        f"{leaf} as other devices, and do not: a device may be faulty, or the "
                        "program lets its replicas drift apart",
                    )
                if self._repetition is None:
                    self._repetition = Repetition(await self._read_earlier(begun.step))
                await self._compare(mark, begun)
                if self._filling and self._filling[0].layout != mark.layout:
                    self._filling.clear()
                await self._keep(mark)

    async def _read_earlier(self, step: int) -> dict[int, StateMark]:
        try:
            return marks_of_run_before(await read_marks(self.storage), step)
        except CheckpointError as error:
            self._say("read", f"the marks of earlier runs were not read: {error}")
            return {}

    async def _compare(self, mark: StateMark, begun: BegunMark) -> None:
        """Compare a mark with that of an earlier run; say what is found, once."""
        repetition, where = self._repetition, redact(self.storage.location)
        assert repetition is not None
        told = await run_in_thread(repetition.compare, mark, begun.holders)
        if told is not None:
            logger.warning("%s: %s", where, told)
        if repetition.steps is None or not repetition.is_over_at(mark.step):
            return
        first, last = repetition.steps
        repetition.steps = None
        if repetition.found is None:
            steps = f"step {first} was" if first == last else f"steps {first} to {last} were"
            logger.info("%s: %s repeated %s", where, steps, repetition.how)

    async def _keep(self, mark: StateMark) -> None:
        """Write a mark to the note that is being filled."""
        filling = self._filling
        is_new = not filling
        if is_new:
            self._note = f"{FOLDER}/{time.time_ns():020d}-{self._run}"
        filling.append(mark)
        is_full = sum(each.leaves.nbytes for each in filling) > MOST_BYTES
        if self._begun and self._begun[0].layout == mark.layout and not is_full:
            # Written with the next one, since stores take as long for one as for many.
            return
        try:
            data = await run_in_thread(encode_marks, list(filling))
            # The first save makes the root, and may come later.
            await self.storage.prepare()
            await self.storage.put_note(self._note, data, replace=True, durable=False)
            if is_new:
                await prune(self.storage)
        except CheckpointError as error:
            self._say("write", f"marks were not kept: {error}")
        if is_full:
            filling.clear()

    def _say(self, what: str, text: str) -> None:
        """Warn of something, once."""
        if what not in self._is_said:
            self._is_said.add(what)
            logger.warning("%s: %s", redact(self.storage.location), text)


def mark(service: RootService, step: SupportsIndex, state: object) -> None:
    """Begin a mark of a step; see `CheckpointManager.mark`."""
    states = service.engine.extension_states
    marks = states.get(_MARKS)
    if marks is None:
        root = service.root
        root.refuse_writing()
        settings = states.get(SETTINGS) or Marks()
        is_writer = root.processes.process == 0
        marks = RunMarks(root.storage, service.run.loop, is_writer, settings)
        states[_MARKS] = marks
    marks.begin(check_step(step), state)
