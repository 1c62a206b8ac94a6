"""Conformance suites for handlers and stores of other packages, run on real checkpoints."""
