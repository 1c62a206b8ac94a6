"""Stores for tests: the local file system, memory, and real servers, each in fresh roots.

The session `stores` of nox installs all servers, and runs all tests on all of them: there
CKPT_ALL_STORES is set, and nothing is skipped. Without it most tests run on the stores that need no
server, and one that is not installed is skipped with the reason.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.stores import servers
from tests.stores.fault_proxy import FaultProxy
from tests.stores.gcs_fake import GcsFake
from tests.stores.places import Place

ALL = "CKPT_ALL_STORES" in os.environ
# `tensorstore` is a local root whose data files TensorStore writes and reads.
LOCAL = ("local", "tensorstore")
SERVERS = ("moto", "snailmail", "seaweed", "gcs")
_NUMBERS = itertools.count()


@pytest.fixture(scope="package", autouse=True)
def _environment() -> Iterator[None]:
    """While these tests run this process sees no proxies and no settings for clouds, either."""
    wanted = servers.environment()
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(wanted):
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="package")
def started() -> Iterator[Callable[[str], Any]]:
    """Starts a store at its first use: its fake or the port it listens on, and a proxy."""
    known: dict[str, tuple[Any, FaultProxy]] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def start(name: str) -> tuple[Any, FaultProxy]:
            if name not in known:
                reason = servers.missing(name)
                if reason is not None:
                    assert not ALL, reason
                    pytest.skip(f"{reason}: nox -s stores installs it")
                if name == "gcs":
                    backend: Any = stack.enter_context(GcsFake())
                    port = backend.port
                else:
                    backend = port = stack.enter_context(getattr(servers, name)())
                proxy = stack.enter_context(FaultProxy(port))
                if name == "gcs":
                    # TensorStore looks at this once.
                    patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{proxy.port}")
                known[name] = backend, proxy
            return known[name]

        yield start


@pytest.fixture
def make_place(started: Callable[[str], Any], tmp_path: Path) -> Callable[[str], Place]:
    """Makes a bucket (or what is one elsewhere) of a test of its own."""

    def make(name: str) -> Place:
        bucket = f"ckpt-{next(_NUMBERS)}-{uuid.uuid4().hex[:8]}"
        if name in LOCAL or name == "memory":
            return Place(name, bucket, str(tmp_path), 0, None, None)
        backend, proxy = started(name)
        proxy.forget()
        if name == "gcs":
            backend.buckets[bucket] = {}
            return Place(name, bucket, "", backend.port, proxy, backend)
        place = Place(name, bucket, "", backend, proxy, None)
        place.boto().create_bucket(Bucket=bucket)
        return place

    return make


@pytest.fixture(params=[*LOCAL, "memory", *SERVERS])
def store(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    """A bucket of every kind of store there is."""
    _skip_servers(request.param)
    return make_place(request.param)


@pytest.fixture(params=["memory", *SERVERS])
def place(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    """A bucket of every kind of object store."""
    _skip_servers(request.param)
    return make_place(request.param)


@pytest.fixture(params=SERVERS)
def bucket(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    """A bucket of every kind of server."""
    _skip_servers(request.param)
    return make_place(request.param)


def _skip_servers(kind: str) -> None:
    if kind in SERVERS and not ALL:
        pytest.skip("nox -s stores runs the tests on servers")


@pytest.fixture
def make_snailmail(started: Callable[[str], Any]) -> Iterator[Callable[[str], Place]]:
    """Makes a bucket of a store that ignores or rejects conditions of writes."""
    with ExitStack() as stack:

        def make(conditional_writes: str) -> Place:
            started("snailmail")
            port = stack.enter_context(servers.snailmail(conditional_writes))
            proxy = stack.enter_context(FaultProxy(port))
            place = Place("snailmail", "ckpt-conditions", "", port, proxy, None)
            place.boto().create_bucket(Bucket=place.bucket)
            return place

        yield make
