"""Saves and restores on object stores behind a line of known latency and bandwidth.

SeaweedFS (from the dependency group `stores`) and a fake of GCS are started on loopback, each
behind a proxy that delays requests and caps the bandwidth of all of them together, and counts what
passes. `stores` has one process; `replicas` and `starts` have jobs of several.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt.storage
import ckpt.sync
from benchmarks.rounds import in_new_process
from benchmarks.tables import table
from tests.stores import servers
from tests.stores.places import Place
from tests.support.real_jobs import at, started, tell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LATENCY_S, BANDWIDTH = 0.04, 100e6
MIB = 1 << 20
LARGE, REPLICATED = 256 * MIB, 128 * MIB
LEAVES = 5000
# Enough that the first save, which makes the arena, and a slow one can be told.
ROUNDS = 3
KINDS = {"each for itself": None, "broadcast_bytes=256 MiB": 256 * MIB}
# The first of each kind compiles, and touches its memory for the first time; it is left out.
REPLICA_ROUNDS = 4
COUNTS = (1, 2, 4)
Rows = list[tuple[str, ...]]


def set_environment() -> None:
    """Gives this process and those that it starts the credentials of the stores, and no proxy."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ.update(servers.environment())


def stores(place: Path, *, store: str = "") -> str:
    """Returns the speed and the requests of S3 and GCS, or of the one that is named."""
    set_environment()
    speeds, numbers = Rows(), Rows()
    for each in [store] if store else ["s3", "gcs"]:
        # TensorStore looks at the endpoint of GCS once, so every line has a process of its own.
        speeds += in_new_process(_speed, each)
        numbers += in_new_process(_requests, each)
    return (
        f"With {LATENCY_S * 1e3:.0f} ms before every request and {BANDWIDTH / 1e6:.0f} MB/s in "
        f"all, the best of {ROUNDS}:\n\n"
        + table(("", "took", "at the cap", "share of the cap"), speeds)
        + "\n\nRequests, without latency:\n\n"
        + table(("", "requests", "of which"), numbers, align="---")
    )


@dataclass
class Line:
    """A store behind a proxy: how it is opened, and what has passed since the last look."""

    open: Callable[[str], Any]
    requests: Callable[[], list[dict[str, Any]]]


@contextlib.contextmanager
def _child(*arguments: str) -> Iterator[Callable[[], str]]:
    """Run a module that tells its port, and then answers lines; what is yielded asks it."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None
        # The port comes without a question.
        asked = iter([""])

        def ask() -> str:
            questions.write(next(asked, "\n"))
            return answers.readline()

        try:
            yield ask
        finally:
            process.kill()


@contextlib.contextmanager
def line(kind: str, latency: float, bandwidth: float) -> Iterator[Line]:
    """A store of that kind behind a line."""
    bucket = "ckpt-figures"
    with contextlib.ExitStack() as stack:
        if kind == "gcs":
            store = stack.enter_context(_child("tests.stores.gcs_fake", bucket))
            port = int(store())
        else:
            port = stack.enter_context(servers.seaweed())
            _bucket(port, bucket)
        proxy = stack.enter_context(
            _child("tests.stores.fault_proxy", str(port), str(latency), str(bandwidth))
        )
        front = int(proxy())
        url = f"http://127.0.0.1:{front}"

        def opened(name: str) -> Any:
            if kind == "gcs":
                return ckpt.storage.GCS(f"gs://{bucket}/{name}")
            return ckpt.storage.S3(
                f"s3://{bucket}/{name}", endpoint=url, region="us-east-1", credentials="environment"
            )

        if kind == "gcs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = url
        yield Line(opened, lambda: json.loads(proxy()))


def _bucket(port: int, name: str) -> Place:
    """Returns a new bucket of a SeaweedFS."""
    place = Place("seaweed", name, "", port, None, None)
    place.boto().create_bucket(Bucket=name)
    return place


def _large(nbytes: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        f"layer{n}": random.random((4096, 1024), np.float32) for n in range(nbytes // 16 // MIB)
    }


def _speed(kind: str) -> Rows:
    """Rows: seconds of saves and restores of a large state, and their share of the cap."""
    state, saves, restores = _large(LARGE), [], []
    with (
        line(kind, LATENCY_S, BANDWIDTH) as where,
        ckpt.sync.CheckpointManager(where.open(uuid.uuid4().hex)) as mgr,
    ):
        for step in range(ROUNDS):
            begun = time.perf_counter()
            mgr.save(step, state).result()
            saves.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            mgr.restore(step)
            restores.append(time.perf_counter() - begun)
    ideal = LARGE / BANDWIDTH
    return [
        (
            f"{kind}, {what} of 256 MiB",
            f"{min(seconds):.2f} s",
            f"{ideal:.2f} s",
            f"{ideal / min(seconds):.2f}",
        )
        for what, seconds in (("save", saves), ("restore", restores))
    ]


def _requests(kind: str) -> Rows:
    """Rows: the requests of one operation of an open manager, by kind."""
    rows = Rows()

    def row(what: str, act: Callable[[], Any]) -> Any:
        where.requests()
        made = act()
        seen = where.requests()
        kinds = Counter(_kind_of(each) for each in seen)
        text = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
        rows.append((f"{kind}, {what}", str(len(seen)), text))
        return made

    state = {f"leaf{n:05}": np.full(1024, n, np.float32) for n in range(LEAVES)}
    with line(kind, 0.0, 0.0) as where:
        root = where.open(uuid.uuid4().hex)
        mgr = row("opening a new root", lambda: ckpt.sync.CheckpointManager(root).__enter__())
        with contextlib.closing(mgr):
            row("save of 5,000 small leaves", lambda: mgr.save(0, state).result())
            row("the next save", lambda: mgr.save(1, state).result())
            row("restore of 5,000 small leaves", lambda: mgr.restore(0))
            row("all_steps()", mgr.all_steps)
            row("delete of a step", lambda: mgr.delete(0))
        again = row("opening it again", lambda: ckpt.sync.CheckpointManager(root).__enter__())
        with contextlib.closing(again):
            row("restore of the latest step", again.restore)
    return rows


def _kind_of(seen: dict[str, Any]) -> str:
    method, path, query = seen["method"], seen["path"], seen["query"]
    if method == "GET" and ("list-type" in query or path.endswith("/o")):
        return "LIST"
    if method in ("PUT", "POST"):
        return "conditional PUT" if seen["conditional"] else "PUT"
    return method


def replicas(place: Path) -> str:
    """Returns restores of a state that all processes of a job hold, with and without sharing."""
    set_environment()
    rows = Rows()
    with line("s3", LATENCY_S, BANDWIDTH) as where:
        name = uuid.uuid4().hex
        with ckpt.sync.CheckpointManager(where.open(name)) as mgr:
            mgr.save(1, _large(REPLICATED))
        for processes in (2, 4):
            rows += _restored(where, processes, name)
    return (
        f"A state of {REPLICATED // MIB} MiB that every process holds, {LATENCY_S * 1e3:.0f} ms "
        f"before every request and {BANDWIDTH / 1e6:.0f} MB/s for all of them together, median of "
        f"{REPLICA_ROUNDS - 1}:\n\n"
    ) + table(("", "took", "GETs", "from the store"), rows)


def _restored(where: Line, processes: int, name: str) -> Rows:
    """Rows: seconds, requests and bytes of restores of both kinds, in turns."""
    kinds = list(KINDS) * REPLICA_ROUNDS
    passed: list[tuple[int, int]] = []
    with started(
        processes,
        Path(__file__),
        where.open(name).endpoint,
        where.open(name).url,
        *(KINDS[kind] or 0 for kind in kinds),
        devices_per_process=1,
        timeout=900,
    ) as job:
        for number in range(len(kinds) + 1):
            for child in job.children:
                child.reached(f"round {number}", 300)
            seen = [each for each in where.requests() if _kind_of(each) == "GET"]
            passed.append((len(seen), sum(each["down"] for each in seen)))
            for child in job.children:
                child.go_on()
        seconds = [max(each) for each in zip(*(r.value for r in job.results()), strict=True)]
    rows = Rows()
    for first, kind in enumerate(KINDS):
        later = range(first + len(KINDS), len(kinds), len(KINDS))
        # What has passed is known when the next round begins.
        gets = statistics.median(passed[number + 1][0] for number in later)
        nbytes = statistics.median(passed[number + 1][1] for number in later)
        took = statistics.median(seconds[number] for number in later)
        rows.append(
            (
                f"{processes} processes, {kind}",
                f"{took:.2f} s",
                f"{gets:.0f}",
                f"{nbytes / MIB:.0f} MiB",
            )
        )
    return rows


def _restore_in_job() -> None:
    """One process of a job: restores for every BYTES of `ENDPOINT URL BYTES...`, and tells times.

    With 0 bytes for shared reads each process restores for itself.
    """

    endpoint, url, *sizes = sys.argv[1:]
    store = ckpt.storage.S3(url, endpoint=endpoint, region="us-east-1", credentials="environment")
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    seconds = []
    with ckpt.sync.CheckpointManager(store, mode="r") as mgr:
        shapes = mgr.metadata(1).items["default"]
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes
        )
        for number, size in enumerate(map(int, sizes)):
            at(f"round {number}")
            began = time.perf_counter()
            found = mgr.restore(1, like, broadcast_bytes=size or None)
            jax.block_until_ready(found)
            seconds.append(time.perf_counter() - began)
            del found
        at(f"round {len(sizes)}")
    tell(seconds)


def starts(place: Path) -> str:
    """Returns what jobs ask a store for when they start: how often, and by how many processes."""
    set_environment()
    head = ("", "lists of the root", "reads of manifests", "other requests", "data, MB")
    with servers.seaweed() as port:
        return (
            "Requests of jobs of 1, 2 and 4 processes, all of them together; and how much data "
            "they read. The state has 0.7 MB: 0.3 MB are cut over the devices, and all processes "
            "need the rest.\n\n"
        ) + table(head, _start_rows(port))


def _start_rows(port: int) -> Rows:
    """Return a row for every call."""
    from tests.stores.job_starts import CALLS, DAMAGED, OPENING, Asked, starts_of

    found: dict[int, dict[str, list[Asked]]] = {}
    for count in COUNTS:
        found[count] = starts_of(_bucket(port, f"ckpt-starts-{count}"), count)

    def cells(call: str) -> tuple[str, ...]:
        every = [found[count][call] for count in COUNTS]
        kinds = [
            [sum(getattr(asked, kind) for asked in each) for each in every]
            for kind in ("listings", "manifests", "others")
        ]
        data = [sum(asked.nbytes for asked in each) for each in every]
        megabytes = [f"{nbytes / 1e6:.1f}" for nbytes in data] if any(data) else ["-"]
        return tuple(", ".join(map(str, part)) for part in (*kinds, megabytes))

    shown = [OPENING, *(call for call in CALLS if not call.endswith("alone") and call != DAMAGED)]
    return [(f"`{call}`" if "(" in call else call, *cells(call)) for call in shown]


if __name__ == "__main__":
    _restore_in_job()
