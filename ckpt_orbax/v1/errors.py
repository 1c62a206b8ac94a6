"""Errors of the functions of v1."""


class InvalidLayoutError(ValueError):
    """There is no checkpoint at a path."""
