"""Planning: the places of a tree's bytes, and the bytes that a target needs. Pure, no I/O."""
