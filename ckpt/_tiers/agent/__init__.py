"""The agent: a small process beside the trainer, which outlives it."""
