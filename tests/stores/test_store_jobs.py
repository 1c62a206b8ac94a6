"""Jobs of several processes on a bucket: what is the same for all is asked for once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from tests.stores.places import Place
from tests.support.real_jobs import run_processes

PROGRAM = Path(__file__).with_name("resume_in_bucket.py")
ALL = "CKPT_ALL_STORES" in os.environ

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ALL, reason="takes its time: nox -s stores runs it"),
]


def requests_of(place: Place, count: int) -> Counter[tuple[str, str]]:
    """Let a job resume, and return how often it asked for which object."""
    assert place.proxy is not None
    place.proxy.forget()
    told = run_processes(
        count,
        PROGRAM,
        f"gs://{place.bucket}/run",
        devices_per_process=1,
        environment={"TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{place.proxy.port}"},
    )
    assert [each.value for each in told] == [{"begin": 21, "same": True, "step": 20}] * count
    found: Counter[tuple[str, str]] = Counter()
    for each in place.proxy.log:
        if f"/b/{place.bucket}/" not in each.path:
            continue  # A late request of an earlier test, which had a bucket of its own.
        name = each.query.get("name") or each.query.get("startOffset") or each.path
        below = name.partition("/run/")[2] or name.removeprefix("run/")
        # What is named by chance counts as one thing.
        found[each.method, re.sub("[0-9a-f]{32}", "*", below)] += 1
    return found


def test_a_job_lists_the_steps_and_reads_the_manifest_as_one_process_does(
    make_place: Callable[[str], Place],
) -> None:
    place = make_place("gcs")
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        for step in (10, 20):
            mgr.save(step, {"w": jnp.arange(4096.0), "step": jnp.int32(step)}, durable=True)
    alone, four = requests_of(place, 1), requests_of(place, 4)
    assert alone["GET", "20/ckpt.json"] > 0
    assert alone["GET", "20/*/default/d/*"] == 1
    # The others ask for their arrays, and for nothing else.
    assert four - alone == Counter({("GET", "20/*/default/d/*"): 3})
    assert alone - four == Counter()
