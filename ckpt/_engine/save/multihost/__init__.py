"""Saves of several processes: their agreement, and their reports of what each has written."""
