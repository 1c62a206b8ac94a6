"""Looks for the test of every row, by taking the thing away: `python -m tests.ledger`.

    python -m tests.ledger                  whether each row's test fails without what it is for
    python -m tests.ledger --write          the same, and look for another test where it does not

All tests are collected once. Each trial is a fork of that process in which one thing is taken away
and one test runs, so that a trial costs little more than the test. A test that also fails, or does
not run, with everything there shows nothing.
"""

from __future__ import annotations

import os
import sys

# Forks need a process without threads, and numpy would start some.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

from tests.ledger.trials import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
