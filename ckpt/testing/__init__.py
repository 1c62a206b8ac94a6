"""Tools for tests of code that saves checkpoints, and for the tests of this library.

Nothing else in `ckpt` imports this package. What a module needs beyond the library itself it says:

- `ckpt.testing.strategies`: Hypothesis strategies for trees and leaves (needs `hypothesis`).
- `ckpt.testing.handlers`: a conformance suite for handlers, on real checkpoints.
- `ckpt.testing.stores`: a conformance suite for stores, on real ones.
- `ckpt.testing.coordination`: what the processes of a make-believe job share.
- `ckpt.testing.compare`: whether a restored tree is exactly the one that was saved.
- `ckpt.testing.damage`: files of a checkpoint, damaged in every way and whole again.
- `ckpt.testing.files`: file operations of this process that fail, are short, or wait, as a plan of
  `ckpt.testing.faults` says; and a record of them.
- `ckpt.testing.crash_states`: from such a record, every state in which a power cut may leave a
  directory.
- `ckpt.testing.kills`: a program that dies, stops or meets an error at one chosen system call.
- `ckpt.testing.power`: a file system whose power can be cut.
"""
