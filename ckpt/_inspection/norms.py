"""The norms of the layers of a run over its steps, from the vital signs in its manifests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._format.manifest import ItemEntry
from ckpt._inspection.locations import RunRoot
from ckpt._steps.opened import open_step
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._vitals.signs import LeafSigns, join_signs, signs_of
from ckpt._vitals.stored_signs import signs_in
from ckpt.errors import CheckpointError

Integers = np.ndarray[Any, np.dtype[np.int64]]

# How many keys of a leaf path name a layer, not counting numbers.
_DEPTH = 2


class LayerNorms(Struct, frozen=True):
    """A layer over the steps; None for a step without the layer or without its vital signs.

    Attributes:
        name: The item, if it has a name, and the keys that its leaf paths begin with.
        leaves: Number of its arrays, in the step that has the most.
        norms: Its norm in each step.
        absmax: Its largest absolute value in each step.
        nonfinite: Number of its values that are NaN or infinite, in each step.
    """

    name: str
    leaves: int
    norms: list[float | None]
    absmax: list[float | None]
    nonfinite: list[int | None]


class NormTable(Struct, frozen=True):
    """The norms of the layers of a run over its steps.

    Attributes:
        path: Path of the run.
        total: Number of its steps.
        steps: The steps that were read, ascending: evenly chosen ones, and the first step with
            values that are not finite.
        layers: Its layers, in the order of the tree.
        unknown: Steps among `steps` in which no layer has vital signs.
        unreadable: Chosen steps that could not be read.
        nonfinite: All steps of the run that are known to have values that are not finite, in any
            layer.
    """

    path: str
    total: int
    steps: list[int]
    layers: list[LayerNorms]
    unknown: list[int]
    unreadable: list[int]
    nonfinite: list[int]


# The layers of one step, by name: number of the arrays, and their vital signs together; None if
# those of one array are unknown.
StepLayers = dict[str, tuple[int, LeafSigns | None]]


class NormReader:
    """Reads the norms of a run; reads the manifest of each step once."""

    def __init__(self, root: RunRoot, *, most: int) -> None:
        """Read the steps of `root`.

        Args:
            root: The run.
            most: Limit of the number of steps, besides the first with values that are not finite.
        """
        self._root = root
        self._most = most
        # By directory, attempt and commit time: a step that is saved again has other ones.
        self._known: dict[tuple[str, str, int], StepLayers] = {}

    async def read(self) -> NormTable:
        """Return the norms as they are now.

        Raises:
            StorageError: The root cannot be read.
        """
        listed = await self._root.index.refresh()
        nonfinite = [step for step, each in listed.items() if each.notes.nonfinite_leaves]
        chosen = sorted({*chosen_steps(list(listed), self._most), *nonfinite[:1]})
        keys = {(each.step_dir, each.attempt, each.committed_ns) for each in listed.values()}
        self._known = {key: found for key, found in self._known.items() if key in keys}
        read: dict[int, StepLayers] = {}
        for number in chosen:
            step = listed[number]
            key = step.step_dir, step.attempt, step.committed_ns
            found = self._known.get(key)
            if found is None:
                found = await self._layers_of(step.step_dir, number)
            if found is not None:
                self._known[key] = read[number] = found
        unknown = [
            step
            for step, layers in read.items()
            if layers and all(signs is None for _, signs in layers.values())
        ]
        return NormTable(
            self._root.location,
            len(listed),
            list(read),
            _over_steps(list(read.values())),
            unknown,
            [step for step in chosen if step not in read],
            nonfinite,
        )

    async def _layers_of(self, step_dir: str, step: int) -> StepLayers | None:
        try:
            opened = await open_step(self._root.storage, step_dir, step)
        except CheckpointError:
            return None
        if opened is None:
            return None
        found: StepLayers = {}
        try:
            for name, item in opened.manifest.items.items():
                shown = "" if opened.manifest.unnamed else name
                found |= self._item_layers(shown, item)
        except CheckpointError:
            return None
        return found

    def _item_layers(self, item_name: str, item: ItemEntry) -> StepLayers:
        table = item.leaves
        numbers, owners, layers = [], [], dict[str, int]()
        paths = unboxed_names(item.nodes, table.names)
        # Counters and other integers are no layers.
        wanted = [
            form.kind in ARRAY_KINDS
            and form.kind != "key"
            and not re.search("int|bool", form.dtype or "")
            for form in table.forms
        ]
        for number, form in enumerate(table.form.tolist()):
            # The norm of an array that is stored once counts once; the norm of a key says nothing.
            if not wanted[form] or number in table.same_as:
                continue
            layer = ": ".join(filter(None, (item_name, layer_of(paths[number]))))
            numbers.append(number)
            owners.append(layers.setdefault(layer, len(layers)))
        of_layer: Integers = np.array(owners, np.int64)
        joined = join_signs(signs_in(table).records[numbers], of_layer, len(layers))
        counts = np.bincount(of_layer, minlength=len(layers)).tolist()
        return {
            name: (count, signs_of(joined[at]))
            for (name, at), count in zip(layers.items(), counts, strict=True)
        }


def layer_of(path: str) -> str:
    """Return the first keys of a leaf path; a number belongs to the key before it."""
    keys = path.split(".")
    taken = named = 0
    for key in keys:
        if not key.isdecimal():
            if named == _DEPTH:
                break
            named += 1
        taken += 1
    return ".".join(keys[:taken])


def chosen_steps(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps, evenly spaced, with the first and the last.

    The distance is a power of two: as the run goes on, most of the steps are chosen again.
    """
    distance = 1
    while len(range(0, len(steps) - 1, distance)) + 1 > max(most, 2):
        distance *= 2
    return [*steps[: len(steps) - 1 : distance], *steps[-1:]]


def _over_steps(steps: Sequence[StepLayers]) -> list[LayerNorms]:
    found = []
    for name in dict.fromkeys(name for step in steps for name in step):
        counts, signs = zip(*(step.get(name, (0, None)) for step in steps), strict=True)
        norms, absmax, nonfinite = (
            [None if each is None else getattr(each, figure) for each in signs]
            for figure in ("norm", "absmax", "nonfinite")
        )
        found.append(LayerNorms(name, max(counts), norms, absmax, nonfinite))
    return found
