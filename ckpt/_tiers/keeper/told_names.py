"""`ToldNames`: names of steps as the trainer has told them."""

from __future__ import annotations


class ToldNames:
    """Names of steps that a function of the trainer may have made."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, step: int, name: str) -> None:
        """Note the name of a step."""
        self._names[step] = name

    def name(self, step: int) -> str:
        """Return the name of a step that was noted."""
        return self._names[step]

    def step(self, name: str) -> int | None:
        """Return the step of that name; None if it was not noted."""
        return next((step for step, each in self._names.items() if each == name), None)
