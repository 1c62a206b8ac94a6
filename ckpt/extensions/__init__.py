"""Extensions of a manager or a save: what is noted about arrays beside their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ckpt._arguments import invalid, one_of
from ckpt._plan.unchanged.frozen_leaves import frozen_patterns
from ckpt._settings import SignsPlace
from ckpt.errors import InvalidArgumentError

__all__ = ["VitalSigns"]


@dataclass(frozen=True, slots=True)
class VitalSigns:
    """Notes a fingerprint, the norm and the largest value of arrays, and how many are not finite.

    `metadata` shows them; see `ckpt.types.LeafSigns`.

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
        one_of("on", self.on, get_args(SignsPlace), of="VitalSigns")
        if frozen_patterns(self.frozen) and self.on == "host":
            raise InvalidArgumentError(
                "VitalSigns(on='host', frozen=...): devices prove by vital signs that leaves have "
                "not changed: use on='auto' or on='device', or leave frozen out"
            )


Extensions = Sequence[VitalSigns]


def vital_signs_of(extensions: Extensions) -> VitalSigns | None:
    """Return the vital signs among extensions; None if there are none.

    Raises:
        InvalidArgumentError: This is no list of extensions, or has one twice.
    """
    expected = "a list of ckpt.extensions, such as [ckpt.extensions.VitalSigns()]"
    given: object = extensions
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise invalid("extensions", given, expected)
    for each in given:
        if not isinstance(each, VitalSigns):
            raise invalid("extensions", each, expected)
    if len(extensions) > 1:
        raise invalid("extensions", extensions, "VitalSigns at most once")
    return extensions[0] if extensions else None


def __dir__() -> list[str]:
    return __all__
