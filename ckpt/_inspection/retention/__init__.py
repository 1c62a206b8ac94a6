"""Retention: kept steps, deleted steps, and leftovers of dead writers."""
