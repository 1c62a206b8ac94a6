"""Conversion: a checkpoint becomes one of another format, a block of memory at a time."""
