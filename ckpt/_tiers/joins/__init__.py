"""Joins: the parts of a step, each on the disk of a process, become one step of the root."""
