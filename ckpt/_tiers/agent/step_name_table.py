"""`StepNameTable`: names of steps, as the trainer has sent them."""

from __future__ import annotations


class StepNameTable:
    """Names of steps that a function of the trainer may have made."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, step: int, name: str) -> None:
        self._names[step] = name

    def name(self, step: int) -> str:
        return self._names[step]

    def step(self, name: str) -> int | None:
        return next((step for step, each in self._names.items() if each == name), None)
