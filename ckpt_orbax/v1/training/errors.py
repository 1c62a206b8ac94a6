"""Errors of a `Checkpointer`."""

__all__ = ["StepAlreadyExistsError", "StepNotFoundError"]


class StepAlreadyExistsError(FileExistsError):
    """The step exists."""


class StepNotFoundError(FileNotFoundError):
    """There is no such step."""
