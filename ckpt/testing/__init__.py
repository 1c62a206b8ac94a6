"""Tools for tests of code that saves checkpoints.

The library itself does not import them. Each says what it needs beyond the library:

- `ckpt.testing.conformance`: suites that tell whether a handler or a store of your own does what
  the library relies on, tried on real checkpoints.
- `ckpt.testing.faults`: file operations of this process that fail, are cut short, or wait, and a
  record of them.
- `ckpt.testing.compare`: whether a restored tree is exactly the one that was saved.
- `ckpt.testing.coordination`: what the processes of a simulated job share.
- `ckpt.testing.strategies`: Hypothesis strategies for trees and leaves (needs `hypothesis`).
"""
