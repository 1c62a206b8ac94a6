"""The keeper: a small process beside the trainer, which survives it."""
