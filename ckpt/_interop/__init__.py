"""Checkpoints of other libraries, read where they are."""
