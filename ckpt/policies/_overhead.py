"""`BoundedOverhead`: a save interval that adapts to the measured cost of a save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt._arguments import invalid, number_of_seconds, shown
from ckpt.policies._context import SaveContext, SavedStep
from ckpt.policies._save_policies import seconds_since_last


@dataclass(frozen=True, slots=True)
class BoundedOverhead:
    """Saves as often as it can while training loses at most `fraction` of the time to saving.

    The first save is made at once, to measure what one costs. After that, a save is due once the
    loss it causes is `fraction` of the time since the last one began. Measuring continues, so the
    interval adapts when a disk gets slower or a model larger. Saves never queue: none begins while
    another is under way, nor sooner than one usually takes plus two steps, so that there are steps
    without a save to compare with.

    Call `save` or `should_save` at every step. Otherwise only the time spent in `save` itself can
    be measured and bounded.

    The rule is that of CheckFreq (Mohan, Phanishayee, Chidambaram: "CheckFreq: Frequent,
    Fine-Grained DNN Checkpointing", FAST '21), with time in place of iterations.

    Attributes:
        fraction: The share of the time that may be lost, above 0 and below 1.
        at_least_seconds: The shortest interval between the beginnings of two saves.
        at_most_seconds: The longest such interval, even if more than `fraction` is lost; None for
            no limit.

    Raises:
        InvalidArgumentError: One of them is out of its range, or `at_least_seconds` is greater
            than `at_most_seconds`.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, save_policy=ckpt.policies.BoundedOverhead(0.02))
        ```
    """

    fraction: float = 0.03
    at_least_seconds: float = 0
    at_most_seconds: float | None = None

    def __post_init__(self) -> None:
        fraction: object = self.fraction
        if not isinstance(fraction, float) or not 0 < fraction < 1:
            what = "a number above 0 and below 1, such as 0.03 for 3%"
            raise invalid("fraction", fraction, what, of="BoundedOverhead")
        least, most = self.at_least_seconds, self.at_most_seconds
        number_of_seconds("at_least_seconds", least, of="BoundedOverhead", zero=True)
        if most is not None:
            number_of_seconds("at_most_seconds", most, of="BoundedOverhead")
            if least > most:
                what = f"a value no greater than at_most_seconds={shown(most)}"
                raise invalid("at_least_seconds", least, what, of="BoundedOverhead")

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the last save has ended and is paid for, else the reason not to save."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (BoundedOverhead)"
        if context.lost_seconds is None:
            return None
        if context.step_seconds is None:
            return "no step without a save has been measured yet (BoundedOverhead)"
        elapsed = seconds_since_last(previous, context)
        pause = (context.save_seconds or 0.0) + 2 * context.step_seconds
        due = max(self._wanted(context.lost_seconds), pause)
        if elapsed is None or elapsed >= due:
            return None
        return (
            f"the last save began {elapsed:.1f} s ago; the next one is due after {due:.1f} s, as "
            f"one costs {context.lost_seconds:.3g} s and {self.fraction:.3g} of the time may be "
            "lost (BoundedOverhead)"
        )

    def _wanted(self, lost_seconds: float) -> float:
        wanted = max(lost_seconds / self.fraction, self.at_least_seconds)
        return wanted if self.at_most_seconds is None else min(wanted, self.at_most_seconds)
