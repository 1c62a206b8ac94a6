"""Checkpoints of other libraries, read in place."""
