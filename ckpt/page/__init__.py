"""The page of a run: a local server, and the same as one file."""
