"""Plans of restores without restoring: the bytes that each process would read, and its memory."""
