"""`Parent`: the checkpoint that a run has begun from, as every step of the run names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Step = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a run has begun from; a dataclass, as a part of the public `StepInfo`.

    Attributes:
        path: Where it was.
        step: Its step, or None for a checkpoint by itself.
        attempt: The attempt that wrote it, which tells it from another one at that path.

    Example:
        ```python
        parent = ckpt.sync.metadata("runs/a/100").info.parent
        if parent is not None:
            print(parent.path, parent.step)
        ```
    """

    path: str
    step: Step | None
    attempt: str
