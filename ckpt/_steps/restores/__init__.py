"""Restores of steps: which one, and what of it."""
