"""What a check has found, and what to change."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True):
    """What one check has found.

    Attributes:
        group: What was checked: `software`, `machine`, `disk` or `store`.
        name: The check.
        verdict: `ok`, `warning` (slower, or less safe, than it could be) or `problem` (saves fail,
            or could be lost).
        found: What there is.
        advice: What to change; empty if there is nothing to change.
        value: The figure, if there is one: bytes, seconds or a number.
    """

    group: str
    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    value: float | None = None


class Diagnosis(Struct, frozen=True):
    """All findings.

    Attributes:
        path: The place that was checked, or None.
        findings: What was found, in the order of the checks.
        warnings: How many of them are warnings.
        problems: How many of them are problems.
    """

    path: str | None
    findings: list[Finding]
    warnings: int
    problems: int


def diagnosis(path: str | None, findings: list[Finding]) -> Diagnosis:
    """Return findings with their numbers."""
    verdicts = [each.verdict for each in findings]
    return Diagnosis(path, findings, verdicts.count("warning"), verdicts.count("problem"))
