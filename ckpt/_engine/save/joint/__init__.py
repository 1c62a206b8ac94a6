"""Saves of several processes: how they agree, and what each tells of what it has written."""
