"""Tools for tests of code that saves checkpoints, and for the tests of this library.

Nothing else in `ckpt` imports this package. What a module needs beyond the library itself it says:

- `ckpt.testing.strategies`: Hypothesis strategies for trees and leaves (needs `hypothesis`).
- `ckpt.testing.handlers`: a conformance suite for handlers, on real checkpoints.
- `ckpt.testing.compare`: whether a restored tree is exactly the one that was saved.
"""
