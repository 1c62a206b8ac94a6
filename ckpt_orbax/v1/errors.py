"""Errors of the functions of v1."""

__all__ = ["InvalidLayoutError"]


class InvalidLayoutError(ValueError):
    """There is no checkpoint at a path."""
