"""Tools for tests of code that saves checkpoints.

Nothing else in `ckpt` imports this package. What a module needs beyond the library itself it says:

- `ckpt.testing.strategies`: Hypothesis strategies for trees and leaves (needs `hypothesis`).
- `ckpt.testing.conformance.handlers`: a conformance suite for handlers, on real checkpoints.
- `ckpt.testing.conformance.stores`: a conformance suite for stores, on real ones.
- `ckpt.testing.coordination`: what the processes of a simulated job share.
- `ckpt.testing.compare`: whether a restored tree is exactly the one that was saved.
- `ckpt.testing.faults.files`: file operations of this process that fail, are short, or wait, as a
  plan of `ckpt.testing.faults.plans` says; and a record of them.
"""
