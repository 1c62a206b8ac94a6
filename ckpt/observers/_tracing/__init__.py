"""A trace of saves and restores: the events as a timeline, and pictures of it."""
