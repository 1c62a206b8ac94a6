"""The docstrings of the plain calls, made from those of their asyncio twins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Plain = TypeVar("Plain", bound=Callable[..., object])

# What an asyncio program writes, and what a plain one writes in its place.
_PLAIN = {
    "await commit": "commit.result()",
    "await ": "",
    "async with": "with",
    "async for": "for",
    "Await it for": "Call its `result()` for",
} | {
    f"ckpt.{call}": f"ckpt.sync.{call}"
    for call in (
        "CheckpointManager",
        "adopt",
        "convert",
        "load",
        "merge",
        "metadata",
        "open_array",
        "save",
        "verify",
        "watch",
    )
}


def plain_docs(twin: object) -> Callable[[Plain], Plain]:
    """Give a plain function, or each method of a plain class, the docstring of its asyncio twin.

    Its code becomes plain code, and what is said of cancellation is left out. The first paragraph
    of the call's own docstring is for those who read only the source; what follows it is about the
    plain call alone, and stays.
    """

    def decorate(plain: Plain) -> Plain:
        if isinstance(plain, type):
            for name, method in vars(plain).items():
                if inspect.isfunction(method) and not name.startswith("_"):
                    _redocument(method, getattr(twin, name, None))
        else:
            _redocument(plain, twin)
        return plain

    return decorate


def _redocument(call: Callable[..., object], twin: object) -> None:
    # `python -OO` leaves no docstrings. A call without a twin has one that stands on its own.
    if call.__doc__ is None or not (doc := getattr(twin, "__doc__", None)):
        return
    _, *own = inspect.cleandoc(call.__doc__).split("\n\n")
    for text, instead in _PLAIN.items():
        doc = doc.replace(text, instead)
    found = [part for part in inspect.cleandoc(doc).split("\n\n") if part[:13] != "Cancellation:"]
    place = next((i for i, part in enumerate(found) if part[:8] == "Example:"), len(found))
    found[place:place] = [part for part in own if part[:10] != "See `ckpt."]
    call.__doc__ = "\n\n".join(found)
