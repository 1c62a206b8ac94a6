"""Checkpoints on a local (POSIX) file system."""
