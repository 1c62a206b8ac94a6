"""What has to be set before jax is imported, where tests write, and the profiles of Hypothesis."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
# Its threads wait for work by spinning, and matrices are small here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
# Programs here run once: half of their time would go into compiling them well.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# Tests sync files a hundred thousand times, and a disk makes each of them wait. So they write to
# memory, unless TMPDIR is set.
DISK = os.environ.setdefault("CKPT_TEST_DISK", tempfile.gettempdir())
MEMORY = "/dev/shm"
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free >= 8 << 30
):
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support.paths import let_programs_import_tests  # noqa: E402

let_programs_import_tests()

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Let tests load what jax has compiled for others, which takes a tenth of the time."""
    # Of this process alone: jax does not write its files atomically.
    folder = tempfile.mkdtemp(prefix="ckpt-test-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish() -> None:
    """Keep what has been imported and collected out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder of this test; it is on a disk if the test has the mark `disk`."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=DISK, prefix="ckpt-test-") as folder:
            yield Path(folder)
