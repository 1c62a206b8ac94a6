"""A line through the points of a growth scenario: what one more GiB or leaf costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.results import Sample, Scenario


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds = intercept + slope * amount`, and how much of the variance it explains."""

    slope: float
    intercept: float
    r_squared: float


def points(scenario: Scenario, row: str, measure: str) -> dict[int, Sample]:
    """Returns the samples `measure@N` of a row by N, ascending."""
    measures: Mapping[str, Sample] = scenario.measures.get(row, {})
    split = ((name.split("@"), sample) for name, sample in measures.items() if "@" in name)
    return dict(sorted((int(at), sample) for (name, at), sample in split if name == measure))


def line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Returns the least-squares line of at least two points.

    Errors count relative to the seconds (weights of 1/seconds squared): the noise of a timing grows
    with it, and otherwise the largest point alone would decide about the intercept.
    """
    weights = [1 / value**2 for value in seconds]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / total

    x, y = mean(amounts), mean(seconds)
    spread = mean([(each - x) ** 2 for each in amounts])
    together = mean([(a - x) * (s - y) for a, s in zip(amounts, seconds, strict=True)])
    slope = together / spread
    intercept = y - slope * x
    left = mean([(s - intercept - slope * a) ** 2 for a, s in zip(amounts, seconds, strict=True)])
    variance = mean([(s - y) ** 2 for s in seconds])
    return Line(slope, intercept, 1 - left / variance if variance else 1.0)


def of(scenario: Scenario, row: str, measure: str) -> Line | None:
    """Returns the line through the medians of a row, or None with fewer than two points."""
    found = points(scenario, row, measure)
    if len(found) < 2:
        return None
    return line([float(at) for at in found], [sample.median for sample in found.values()])
