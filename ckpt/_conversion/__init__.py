"""Conversion of checkpoints to other formats, one block of memory at a time."""
