"""Data that a save need not write, because the step before has it."""
