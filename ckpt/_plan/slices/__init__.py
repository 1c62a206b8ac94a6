"""Slices of stored arrays: maps from their elements to elements of other arrays."""
