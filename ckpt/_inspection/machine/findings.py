"""Findings of checks, with advice."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True):
    """The result of one check.

    Attributes:
        group: The checked area: `software`, `machine`, `disk` or `store`.
        name: Name of the check.
        verdict: `ok`, `warning` (slower, or less safe, than it could be) or `problem` (saves fail,
            or could be lost).
        found: The observation, as text.
        advice: The recommended change; empty if there is nothing to change.
        value: The measured figure, if there is one: bytes, seconds or a number.
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
        findings: The findings, in the order of the checks.
        warnings: Number of warnings.
        problems: Number of problems.
    """

    path: str | None
    findings: list[Finding]
    warnings: int
    problems: int


def diagnosis(path: str | None, findings: list[Finding]) -> Diagnosis:
    """Return a diagnosis with the numbers of warnings and problems."""
    verdicts = [each.verdict for each in findings]
    return Diagnosis(path, findings, verdicts.count("warning"), verdicts.count("problem"))
