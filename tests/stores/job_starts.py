"""Jobs that start on a bucket, and what each of their processes asks the store for.

Each process goes by a proxy of its own, so that it is known who asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from tests.stores.fault_proxy import FaultProxy, Seen
from tests.stores.places import Place
from tests.support.real_jobs import started

__all__ = ["ALONE", "CALLS", "DAMAGED", "OPENING", "Asked", "read_twice", "starts_of"]

OPENING = "open the root"
ALONE = "latest_step() of process 0 alone"
DAMAGED = "resume() past a damaged step"
# In the order of start_in_bucket.py.
CALLS = (
    "resume()",
    "resume(healthy=True)",
    "restore()",
    "restore(broadcast_bytes=...)",
    "latest_step()",
    "all_steps()",
    "best_step()",
    "metadata()",
    ALONE,
    DAMAGED,
)
_PROGRAM = Path(__file__).with_name("start_in_bucket.py")
_FOLDER = "run"


@dataclass
class Asked:
    """What a process has asked for.

    Attributes:
        listings: How often for a list of the root.
        manifests: How often for the manifest of a step, or its first bytes.
        others: How often for what is neither of these, nor data: locks, pins, metadata.
        spans: Which bytes of data files: path, first, last.
    """

    listings: int = 0
    manifests: int = 0
    others: int = 0
    spans: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def common(self) -> tuple[int, int, int]:
        """All but the data, which is the same for all processes."""
        return self.listings, self.manifests, self.others

    @property
    def nbytes(self) -> int:
        """How many bytes of data files."""
        return sum(last + 1 - first for _, first, last in self.spans)

    def add(self, seen: Seen, bucket: str) -> None:
        """Count a request to `bucket`."""
        query = seen.query
        path = unquote(query.get("name") or seen.path.partition("/o/")[2] or seen.path)
        key = path.removeprefix(f"/{bucket}/").removeprefix(f"{_FOLDER}/")
        listed = next((query[name] for name in ("startOffset", "prefix") if query.get(name)), None)
        if seen.method == "GET" and listed == f"{_FOLDER}/":
            self.listings += 1
        elif seen.method == "GET" and listed is None and key.endswith("/ckpt.json"):
            self.manifests += 1
        elif seen.method == "GET" and listed is None and "/d/" in key:
            first, last = seen.span or (0, seen.down - 1)
            self.spans.append((key, first, last))
        else:
            self.others += 1


def read_twice(every: Sequence[Asked]) -> int:
    """Return how many bytes of data files were read more than once."""
    times: Counter[tuple[str, int]] = Counter()
    for path, first, last in (span for asked in every for span in asked.spans):
        times.update((path, at) for at in range(first, last + 1))
    return sum(count > 1 for count in times.values())


def starts_of(place: Place, count: int) -> dict[str, list[Asked]]:
    """Let a job of `count` processes save two steps, and then start once for every call.

    Returns:
        By call what each process has asked for, by number; `OPENING` is what comes before it.
    """
    asked: dict[str, list[Asked]] = {}
    url = f"{'gs' if place.kind == 'gcs' else 's3'}://{place.bucket}/{_FOLDER}"
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(place.port)) for _ in range(count)]
        endpoints = [f"http://127.0.0.1:{proxy.port}" for proxy in proxies]
        job = stack.enter_context(
            started(count, _PROGRAM, place.kind, url, *endpoints, devices_per_process=1)
        )
        for call in CALLS:
            for name, mark in ((OPENING, f"{call} opened"), (call, f"{call} answered")):
                for child in job.children:
                    child.reached(mark)
                found = [_asked(proxy, place.bucket) for proxy in proxies]
                # What the saves have asked for comes before the first one.
                asked[name] = found
                if mark == f"{DAMAGED} opened":
                    _damage(place)
                for child in job.children:
                    child.go_on()
        results = job.results()
    for each in results:
        assert each.code == 0, each.errors
        assert each.value == dict.fromkeys(CALLS, True)
    return asked


def _asked(proxy: FaultProxy, bucket: str) -> Asked:
    found = Asked()
    for seen in proxy.log:
        found.add(seen, bucket)
    proxy.forget()
    return found


def _damage(place: Place) -> None:
    """Change what the greatest step has in its largest data file."""
    found = {
        key: data
        for key, data in place.objects().items()
        if key.startswith(f"{_FOLDER}/20/") and "/d/" in key
    }
    largest = max(found, key=lambda key: len(found[key]))
    place.put(largest, bytes(len(found[largest])))
