"""Tell who this process is and what devices the job has: `echo_job.py [WORD...]`."""

from __future__ import annotations

import sys

import jax

from tests.support.real_jobs import at, tell

word = at("here") if sys.argv[1:] == ["wait"] else ""
sys.stdout.write(f"hello {word}\n")
tell(
    {
        "index": jax.process_index(),
        "count": jax.process_count(),
        "local": jax.local_device_count(),
        "all": jax.device_count(),
        "arguments": sys.argv[1:],
    }
)
