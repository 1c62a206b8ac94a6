"""Durations of saves, and their costs for a run."""
