"""Checks of a machine and of a place for checkpoints."""
