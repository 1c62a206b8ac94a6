"""The page of a run, from a local server or in one file."""
