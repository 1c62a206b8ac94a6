"""Drains: committed steps of one root, copied to the next one in the background."""
