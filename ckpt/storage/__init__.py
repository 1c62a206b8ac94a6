"""Where steps are kept: one protocol, and the local file system behind it."""
