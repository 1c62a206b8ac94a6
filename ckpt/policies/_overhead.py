"""How often to save, found out while the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt._arguments import check_seconds, shown
from ckpt.errors import InvalidArgumentError
from ckpt.policies._context import SaveContext, SavedStep
from ckpt.policies._saving import seconds_since_last

__all__ = ["BoundedOverhead"]


@dataclass(frozen=True, slots=True)
class BoundedOverhead:
    """Saves as often as it can while training loses at most `fraction` of the time to saving.

    The first save is made at once, to measure what one costs. From then on the next one is due
    when so much time has passed since the last one began that the loss is `fraction` of it. The
    measurement goes on, so the interval follows when a disk gets slower or a model larger. Saves
    never queue: none is begun while one is under way, or sooner than one usually takes, and two
    steps more, so that there are steps without a save to compare with.

    The manager has to be asked about every step, by `save` or `should_save`. Otherwise it sees only
    how long the calls of `save` take, and that is all that is bounded.

    The rule is that of CheckFreq (Mohan, Phanishayee, Chidambaram: "CheckFreq: Frequent,
    Fine-Grained DNN Checkpointing", FAST '21), with time in the place of iterations.

    Attributes:
        fraction: The share of the time that may be lost, above 0 and below 1.
        at_least_seconds: How long after the last save began the next one may begin, however
            little is lost.
        at_most_seconds: How long after the last save began the next one is due, even if more is
            lost then; None for no such bound.

    Raises:
        InvalidArgumentError: One of them is out of its range, or `at_least_seconds` is greater
            than `at_most_seconds`.
    """

    fraction: float = 0.03
    at_least_seconds: float = 0
    at_most_seconds: float | None = None

    def __post_init__(self) -> None:
        fraction: object = self.fraction
        if not isinstance(fraction, float) or not 0 < fraction < 1:
            raise InvalidArgumentError(
                f"BoundedOverhead(fraction={shown(fraction)}): expected a number above 0 and below "
                "1, such as 0.03 for 3%"
            )
        least, most = self.at_least_seconds, self.at_most_seconds
        check_seconds("BoundedOverhead", least, name="at_least_seconds", zero=True)
        if most is not None:
            check_seconds("BoundedOverhead", most, name="at_most_seconds")
            if least > most:
                raise InvalidArgumentError(
                    f"BoundedOverhead(at_least_seconds={shown(least)}, "
                    f"at_most_seconds={shown(most)}): expected at least no longer than at most"
                )

    def refusal(self, step: int, previous: Sequence[SavedStep], context: SaveContext) -> str | None:
        """Return None if the last save has ended and its price is paid, else a sentence."""
        if context.saving:
            return f"step {context.saving[0].step} is still being saved (BoundedOverhead)"
        if context.lost_seconds is None:
            return None
        if context.step_seconds is None:
            return "no step has been measured without a save yet (BoundedOverhead)"
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
