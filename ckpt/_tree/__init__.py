"""A PyTree to nodes and leaves, and back. Pure, no I/O."""
