"""Everything that moves bytes: the loop thread, staging, write lanes, and the reader."""
