"""`Extension`: what takes part in a manager or a call, and how a list of them is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ckpt._arguments import invalid

if TYPE_CHECKING:
    from ckpt._engine.engine import Engine


class Extension(Protocol):
    """An element of `extensions=`: a value that takes part in a manager or in one call."""

    def _join(self, engine: Engine) -> None:
        """Add to the engine what takes part: chunk extensions, hooks of runs, notes on steps."""


Extensions = Sequence[Extension]


def join(extensions: Extensions, engine: Engine) -> None:
    """Let extensions take part in what an engine does.

    Raises:
        InvalidArgumentError: This is no list of extensions, or has one twice.
    """
    expected = "a list of ckpt.extensions, such as [ckpt.extensions.VitalSigns()]"
    given: Any = extensions
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise invalid("extensions", given, expected)
    for each in given:
        if isinstance(each, type) or not hasattr(each, "_join"):
            raise invalid("extensions", each, expected)
        if sum(type(other) is type(each) for other in given) > 1:
            raise invalid("extensions", given, f"{type(each).__name__} at most once")
        each._join(engine)
