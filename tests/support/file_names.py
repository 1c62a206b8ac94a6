"""Names of files compared with those that the format has."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["HEX", "check"]

HEX = "[0-9a-f]{32}"


def check(found: Iterable[str], patterns: Iterable[str]) -> None:
    """Every name is one of the patterns, and every pattern has a name."""
    left = set(patterns)
    for name in found:
        fitting = {each for each in patterns if re.fullmatch(each, name)}
        assert fitting, name
        left -= fitting
    assert not left
