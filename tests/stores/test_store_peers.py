"""A job that has lost a host with its memory reads no arrays from its bucket: a peer has its part.

By default on the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) on a server of S3, too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.stores.fault_proxy import FaultProxy
from tests.stores.job_starts import Asked
from tests.stores.places import Place
from tests.support.real_jobs import started
from tests.support.snapshots import shared_memory

KINDS = ("gcs", "seaweed") if "CKPT_ALL_STORES" in os.environ else ("gcs",)
PROGRAM = "peers_in_job.py"
COUNT = 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lost", [None, 1])
def test_a_job_that_has_lost_a_host_reads_no_arrays_from_its_bucket(
    kind: str, lost: int | None, make_place: Callable[[str], Place]
) -> None:
    place = make_place(kind)
    url = f"{'gs' if kind == 'gcs' else 's3'}://{place.bucket}/run"
    with shared_memory() as memory, ExitStack() as stack:
        hosts = [memory / f"host-{number}" for number in range(COUNT)]
        for host in hosts:
            host.mkdir()
        proxies = [stack.enter_context(FaultProxy(place.port)) for _ in range(COUNT)]
        told = {
            "hosts": list(map(str, hosts)),
            "endpoints": [f"http://127.0.0.1:{proxy.port}" for proxy in proxies],
            "kind": kind,
        }

        def run(**given: object) -> list[int]:
            with started(
                COUNT, PROGRAM, url, json.dumps(told | given), devices_per_process=1, timeout=120
            ) as job:
                for child in job.children:
                    child.reached("the end")
                for child in job.children:
                    child.kill()
                results = job.results()
            assert all(each.value["right"] for each in results)
            return [each.value["start"] for each in results]

        assert run(saves=True, snapshots=2, then="wait") == [0] * COUNT
        if lost is not None:
            shutil.rmtree(hosts[lost])
            hosts[lost].mkdir()
        for proxy in proxies:
            proxy.forget()
        # Of the root, step 0; of the memories, step 2.
        assert run(snapshots=0, then="wait") == [3] * COUNT
        asked = Asked()
        for proxy in proxies:
            for seen in proxy.log:
                asked.add(seen, place.bucket)
        assert asked.listings > 0
        assert asked.nbytes == 0
