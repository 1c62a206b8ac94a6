"""The private thread and its event loop, waiting for it, and interpreter exit."""
