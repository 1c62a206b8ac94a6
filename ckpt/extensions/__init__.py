"""Extensions of a manager or a save: what is noted beside the arrays, and what guards a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ckpt._arguments import one_of
from ckpt._proof.contract import Contract
from ckpt._proof.marks import Marks
from ckpt._proof.rehearsal import Rehearsal
from ckpt.errors import InvalidArgumentError
from ckpt.keep._questions import SIGNS_NOTE, LeafNotes

if TYPE_CHECKING:
    from ckpt._engine.engine import Engine
    from ckpt._format.leaf_table import LeafTable
    from ckpt._format.manifest import Manifest
    from ckpt._plan.item_reports import ChunkNotes
    from ckpt._plan.targets import ArrayRead
    from ckpt._steps.step_metadata import LeafInfo
    from ckpt._vitals.extension.device_pass import Kernels, SignsPlace
    from ckpt._vitals.extension.restored_arrays import ReadFingerprints
    from ckpt._vitals.signs import LeafSigns

__all__ = ["Contract", "Marks", "Rehearsal", "VitalSigns"]


@dataclass(frozen=True, slots=True)
class VitalSigns:
    """Notes a fingerprint, the norm and the largest value of arrays, and how many are not finite.

    `of` returns those of a leaf in `metadata`.

    Attributes:
        on: Where they are computed. `"auto"`: accelerators compute those of their large arrays,
            from the second save on, and compare replicas; the host computes all others after
            `save` has returned. `"host"`: the host computes all. `"device"`: devices compute those
            of large arrays, CPUs, too, from the first save on, which waits until the kernels are
            compiled.
        frozen: Patterns of leaf paths whose arrays should not change, such as `"base"`. On
            accelerators, their vital signs are compared with those of the step before. Equal
            arrays are not copied to the host; others are saved, with a warning. A save without a
            step before it, such as a one-shot save, has nothing to compare with, and saves all.

    Raises:
        InvalidArgumentError: `on` is unknown, a pattern is invalid, or `frozen` is given with
            `on="host"`.

    Example:
        ```python
        signs = ckpt.extensions.VitalSigns(frozen="base")
        mgr = ckpt.CheckpointManager(root, extensions=[signs])
        ```
    """

    on: SignsPlace = "auto"
    frozen: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        from ckpt._vitals.extension.device_pass import SignsPlace
        from ckpt._vitals.extension.signs_of_saves import frozen_patterns

        one_of("on", self.on, get_args(SignsPlace), of="VitalSigns")
        if frozen_patterns(self.frozen) and self.on == "host":
            raise InvalidArgumentError(
                "VitalSigns(on='host', frozen=...): devices prove by vital signs that leaves have "
                "not changed: use on='auto' or on='device', or leave frozen out"
            )

    def _join(self, engine: Engine) -> None:
        from ckpt._vitals.extension.signs_of_saves import SignsOfManager, frozen_patterns

        kernels = _kernels_in(engine.extension_states)
        signs = SignsOfManager(self.on, frozen_patterns(self.frozen), kernels)
        engine.extensions = (*engine.extensions, signs)

    @staticmethod
    def of(leaf: LeafInfo) -> LeafSigns | None:
        """Return the vital signs of an array when it was saved; None if they are unknown.

        Example:
            ```python
            w = (await mgr.metadata(100)).tree["params"]["w"]
            signs = ckpt.extensions.VitalSigns.of(w)
            ```
        """
        noted = leaf.notes.get(SIGNS_NOTE)
        return None if noted is None else noted.signs

    @staticmethod
    def unequal_on(leaf: LeafInfo) -> tuple[int, ...]:
        """Return the processes whose devices held other values than most when it was saved.

        Only parts of arrays that several devices should hold alike are compared, and only by
        devices that compute vital signs.

        Example:
            ```python
            w = (await mgr.metadata(100)).tree["params"]["w"]
            print(ckpt.extensions.VitalSigns.unequal_on(w))
            ```
        """
        noted = leaf.notes.get(SIGNS_NOTE)
        return () if noted is None else noted.unequal_on


def reported_notes(chunks: int, records: bytes, others: bytes) -> dict[str, ChunkNotes]:
    """Return the notes of another process on its chunks, by extension, from their bytes."""
    from ckpt._plan.item_reports import ChunkNotes
    from ckpt._vitals.signs import COPY, SIGNS, no_signs

    found = np.frombuffer(records, SIGNS) if records else no_signs(chunks)
    return {SIGNS_NOTE: ChunkNotes(found, no_signs(1)[0], np.frombuffer(others, COPY))}


def notes_of_step(manifest: Manifest) -> LeafNotes:
    """Return what extensions have noted about the leaves of a step, with their names."""
    from ckpt._vitals import stored_signs

    return stored_signs.notes_of_step(manifest)


def device_check(
    states: dict[str, Any],
) -> Callable[[LeafTable, Sequence[ArrayRead], Sequence[Any]], None]:
    """Return the function that compares restored arrays on devices; see `check_arrays`."""
    from ckpt._vitals.extension.restored_arrays import check_arrays

    return partial(check_arrays, _kernels_in(states))


def read_check(manifest: Manifest) -> ReadFingerprints | None:
    """Return a check of the bytes of a step while `verify` reads them; see `ReadCheck`."""
    if not any(SIGNS_NOTE in item.leaves.extensions for item in manifest.items.values()):
        return None
    from ckpt._vitals.extension.restored_arrays import ReadFingerprints

    return ReadFingerprints()


def _kernels_in(states: dict[str, Any]) -> Kernels:
    from ckpt._vitals.extension.device_pass import Kernels

    found: Kernels = states.setdefault(SIGNS_NOTE, Kernels())
    return found


def __dir__() -> list[str]:
    return __all__
