"""Pure planning: what a tree is, where its bytes go, which bytes a target needs. No I/O here."""
