"""Restores of steps: the choice of a step and of its items."""
