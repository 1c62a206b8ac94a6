"""Handlers: what kinds of object a step can hold, and how each becomes leaves and files."""
