"""`Marks`, the settings of marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ckpt._arguments import as_int, invalid, one_of

if TYPE_CHECKING:
    from ckpt._engine.engine import Engine

OnDifference = Literal["warn", "raise"]
# Name of the settings among the objects that an engine keeps for extensions.
SETTINGS = "settings of marks"


@dataclass(frozen=True, slots=True)
class Marks:
    """Says how `mark` of a manager works. Without it, this is as by default.

    Attributes:
        every: Only steps that are multiples of this are marked.
        on_difference: What happens at the first step that is not what it was. `"warn"` logs one
            warning. `"raise"` logs it, too, and a later call of `mark` raises a
            `NotRepeatedError`, once the devices and the store have answered; in a job, that of
            process 0.

    Raises:
        InvalidArgumentError: `every` is not a whole number of at least 1, or `on_difference` is
            unknown.

    Example:
        ```python
        marks = ckpt.extensions.Marks(every=10, on_difference="raise")
        mgr = ckpt.CheckpointManager(root, extensions=[marks])
        ```
    """

    every: int = 1
    on_difference: OnDifference = "warn"

    def __post_init__(self) -> None:
        if (as_int(self.every) or 0) < 1:
            raise invalid("every", self.every, "a whole number of at least 1", of="Marks")
        one_of("on_difference", self.on_difference, get_args(OnDifference), of="Marks")

    def _join(self, engine: Engine) -> None:
        engine.extension_states[SETTINGS] = self
