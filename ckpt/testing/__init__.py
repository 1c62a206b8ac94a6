"""Tools for tests of code that saves checkpoints.

The library itself does not import them.

- `ckpt.testing.conformance`: suites that check, on real checkpoints, that your own handler or store
  keeps the promises that the library relies on.
- `ckpt.testing.clock`: another clock for managers.
- `ckpt.testing.compare`: exact comparison of a restored tree with the saved one.
- `ckpt.testing.coordination`: the key-value store that the processes of a simulated job share.
- `ckpt.testing.strategies`: Hypothesis strategies for trees and leaves (needs `hypothesis`).
"""
