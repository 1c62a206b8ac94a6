"""Slices of stored arrays: which of their elements are which elements of another array."""
