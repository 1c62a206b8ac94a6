"""What has to be set before jax is imported, and the profiles of Hypothesis."""

from __future__ import annotations

import os
import signal
import sys

# A shell that starts the tests in the background has interrupts ignored, and every process of a
# test inherits that: Python then does not raise KeyboardInterrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each of the thousand processes that tests start would compile all it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", "").split():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run once: half of their time would go into compiling them well.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

from hypothesis import settings  # noqa: E402

from tests.support.paths import let_programs_import_tests  # noqa: E402

let_programs_import_tests()

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
