"""Vital signs of arrays, computed on the devices that hold the arrays."""
