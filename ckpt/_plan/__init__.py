"""Planning: where the bytes of a tree go, and which bytes a target needs. Pure, no I/O."""
