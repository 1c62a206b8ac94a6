"""Vital signs of arrays that are computed where the arrays are."""
