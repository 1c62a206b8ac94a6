"""Errors of a `Checkpointer`."""


class StepAlreadyExistsError(FileExistsError):
    """The step exists."""


class StepNotFoundError(FileNotFoundError):
    """There is no such step."""
