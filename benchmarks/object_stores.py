"""Saves and restores on object stores behind a line of known latency and bandwidth.

`python -m benchmarks.object_stores` starts SeaweedFS (from the dependency group `stores`) and a
fake of GCS on loopback, each behind a proxy that delays requests and caps the bandwidth of all of
them together, and counts what passes. `--page docs/how-to/object-stores.md` writes the tables into
a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import table, write_between
from tests.stores import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START, END = "<!-- stores:start -->", "<!-- stores:end -->"
LATENCY_S, BANDWIDTH = 0.04, 100e6
MIB = 1 << 20
NBYTES = 256 * MIB
LEAVES = 5000
# Enough that the first save, which makes the arena, and a slow one can be told.
ROUNDS = 3


@dataclass
class Line:
    """A store behind a proxy: how it is opened, and what has passed since the last look."""

    kind: str
    open: Callable[[str], Any]
    requests: Callable[[], list[dict[str, Any]]]


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[Callable[[], str]]:
    """Run a module that answers lines with lines; what is yielded reads its port at first."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    first = True

    def ask() -> str:
        nonlocal first
        assert process.stdin is not None
        assert process.stdout is not None
        if not first:
            process.stdin.write("\n")
            process.stdin.flush()
        first = False
        return process.stdout.readline()

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def line(kind: str, latency: float, bandwidth: float) -> Iterator[Line]:
    """A store of that kind behind a line."""
    import ckpt.storage

    bucket = "ckpt-figures"
    with contextlib.ExitStack() as stack:
        if kind == "gcs":
            store = stack.enter_context(child("tests.stores.gcs_fake", bucket))
            port = int(store())
        else:
            port = stack.enter_context(servers.seaweed())
            make_bucket(port, bucket)
        proxy = stack.enter_context(
            child("tests.stores.fault_proxy", str(port), str(latency), str(bandwidth))
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
        yield Line(kind, opened, lambda: json.loads(proxy()))


def make_bucket(port: int, bucket: str) -> None:
    import boto3

    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=servers.KEY,
        aws_secret_access_key=servers.SECRET,
    ).create_bucket(Bucket=bucket)


def large() -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return {
        f"layer{n}": random.random((4096, 1024), np.float32) for n in range(NBYTES // 16 // MIB)
    }


def small() -> dict[str, Any]:
    import numpy as np

    return {f"leaf{n:05}": np.full(1024, n, np.float32) for n in range(LEAVES)}


def bandwidth(where: Line) -> list[tuple[str, ...]]:
    """Rows: seconds of saves and restores of a large state, and their share of the cap."""
    import ckpt.sync

    state, saves, restores = large(), [], []
    with ckpt.sync.CheckpointManager(where.open(uuid.uuid4().hex)) as mgr:
        for step in range(ROUNDS):
            begun = time.perf_counter()
            mgr.save(step, state).result()
            saves.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            mgr.restore(step)
            restores.append(time.perf_counter() - begun)
    ideal = NBYTES / BANDWIDTH
    return [
        (
            f"{where.kind}, {what} of 256 MiB",
            f"{min(seconds):.2f} s",
            f"{ideal:.2f} s",
            f"{ideal / min(seconds):.2f}",
        )
        for what, seconds in (("save", saves), ("restore", restores))
    ]


def counts(where: Line) -> list[tuple[str, ...]]:
    """Rows: the requests of one operation of an open manager, by kind."""
    import ckpt.sync

    rows: list[tuple[str, ...]] = []

    def row(what: str, act: Callable[[], Any]) -> Any:
        where.requests()
        made = act()
        seen = where.requests()
        kinds = Counter(kind_of(each) for each in seen)
        text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        rows.append((f"{where.kind}, {what}", str(len(seen)), text))
        return made

    state = small()
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


def kind_of(seen: dict[str, Any]) -> str:
    method, path, query = seen["method"], seen["path"], seen["query"]
    if method == "GET" and ("list-type" in query or path.endswith("/o")):
        return "LIST"
    if method in ("PUT", "POST"):
        return "conditional PUT" if seen["conditional"] else "PUT"
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="the page whose tables are made anew")
    parser.add_argument("--store", choices=("s3", "gcs"), help="only this one")
    chosen = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ.update(servers.environment())
    speeds, numbers = [], []
    for each in [chosen.store] if chosen.store else ["s3", "gcs"]:
        speeds += in_new_process(each, "speed")
        numbers += in_new_process(each, "requests")
    text = (
        f"With {LATENCY_S * 1e3:.0f} ms before every request and {BANDWIDTH / 1e6:.0f} MB/s in "
        f"all, the best of {ROUNDS}:\n\n"
        + table(("", "took", "at the cap", "share of the cap"), speeds)
        + "\n\nRequests, without latency:\n\n"
        + table(("", "requests", "of which"), numbers, align="---")
    )
    sys.stdout.write(text + "\n")
    if chosen.page:
        write_between(chosen.page, START, END, text)


def in_new_process(kind: str, what: str) -> list[tuple[str, ...]]:
    """TensorStore looks at the endpoint of GCS once, so every line has a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from benchmarks.object_stores import one; one({kind!r}, {what!r})",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def one(kind: str, what: str) -> None:
    """Measure one thing, and print its rows."""
    if what == "speed":
        with line(kind, LATENCY_S, BANDWIDTH) as where:
            rows = bandwidth(where)
    else:
        with line(kind, 0.0, 0.0) as where:
            rows = counts(where)
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
