"""Stores that are not there, not ours, or not fit: each is an error that says what to do."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.storage
import ckpt.sync
from ckpt.errors import CheckpointError, InvalidArgumentError, NotACheckpointError, StorageError
from tests.stores import servers
from tests.stores.places import Place

CANARY = "tellNobody7"
STATE = {"w": np.arange(100_000.0)}
# A second for each request that can hang, and some of them one after the other.
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def _nothing_leaks(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Any:
    """No secret is logged, nor printed by TensorStore."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    for text in (caplog.text, printed.out, printed.err):
        assert CANARY not in text


def s3(place: Place, name: str = "run", **options: Any) -> Any:
    return place.root(name, **{"retries": 1, "request_timeout": 20.0, **options})


def save(root: Any, step: int = 1) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(step, STATE).result()


def restore(root: Any) -> Any:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        return mgr.restore()


def failure(act: Callable[[], Any], *names: str, kind: Any = StorageError) -> CheckpointError:
    """The error of a call: in time, of the kind, naming what it has to name, without secrets."""
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        act()
    assert time.monotonic() - begun < PATIENCE_S
    text = "".join(traceback.format_exception(caught.value))
    message = f"{caught.value}"
    assert CANARY not in text
    for name in names:
        assert name.lower() in message.lower(), f"{name!r} is not in: {message}"
    return caught.value


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening.getsockname()[1]


# -- nothing has to run for these --------------------------------------------------------------


def test_an_endpoint_where_nobody_listens(closed_port: int) -> None:
    endpoint = f"http://127.0.0.1:{closed_port}"
    root = ckpt.storage.S3(
        "s3://bucket/run",
        endpoint=endpoint,
        region="us-east-1",
        credentials="environment",
        retries=1,
        request_timeout=1.0,
    )
    for act in (save, restore):
        failure(partial(act, root), endpoint, "bucket", "endpoint")
    failure(lambda: ckpt.sync.load(root), endpoint)
    failure(lambda: ckpt.sync.save(root, STATE), endpoint)


def test_an_endpoint_that_never_answers(silent_port: int) -> None:
    endpoint = f"http://127.0.0.1:{silent_port}"
    root = ckpt.storage.S3(
        "s3://bucket/run",
        endpoint=endpoint,
        region="us-east-1",
        credentials="environment",
        retries=1,
        request_timeout=0.5,
    )
    failure(lambda: ckpt.sync.load(root), endpoint, "request_timeout")
    failure(lambda: ckpt.sync.save(root, STATE), endpoint, "request_timeout")


def test_an_endpoint_that_speaks_no_tls(make_place: Callable[[str], Place]) -> None:
    place = make_place("gcs")
    assert place.proxy is not None
    endpoint = f"https://127.0.0.1:{place.proxy.port}"
    root = ckpt.storage.S3(
        "s3://bucket/run",
        endpoint=endpoint,
        region="us-east-1",
        credentials="environment",
        retries=1,
        request_timeout=2.0,
    )
    failure(lambda: ckpt.sync.save(root, STATE), endpoint)


@pytest.mark.parametrize(
    "url",
    [
        *("s3:/bucket/run", "s3://", "s3:///run", "s4://bucket/run"),
        *("s3://bucket/../run", "s3://bucket/./run", "s3://bucket//run", "gs:/bucket/run"),
        *("s3://buc ket/run", "s3://bucket/run\nx", "s3://_/run", "http://host/bucket/run"),
        *(f"s3://me:{CANARY}@bucket/run", f"s3://bucket/run?X-Amz-Signature={CANARY}"),
        *(f"gs://bucket/run#{CANARY}", "gs://", f"https://host/run?sig={CANARY}", "memory://"),
    ],
)
def test_a_url_with_a_slip_is_refused_before_anything_is_asked(
    url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is taken for a relative path would be made here.
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: ckpt.sync.CheckpointManager(url).__enter__(),
        lambda: ckpt.sync.load(url),
        lambda: ckpt.sync.save(url, STATE),
        lambda: next(iter(ckpt.sync.watch(url, timeout=0)), None),
    ):
        with pytest.raises((InvalidArgumentError, NotACheckpointError)) as caught:
            act()
        assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        *({"endpoint": f"http://me:{CANARY}@host"}, {"endpoint": f"http://host?key={CANARY}"}),
        *({"endpoint": "host:9000"}, {"endpoint": "ftp://host"}, {"endpoint": 9000}),
        *({"region": "Europe, somewhere"}, {"region": 1}, {"credentials": CANARY}),
        *({"credentials": (servers.KEY, servers.SECRET)}, {"retries": -1}, {"retries": 1.5}),
        *({"request_timeout": 0}, {"request_timeout": "1"}, {"concurrency": 0}),
        *({"request_timeout": float("nan")}, {"single_writer": "no"}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        ckpt.storage.S3("s3://bucket/run", **options)
    assert CANARY not in str(caught.value)


# -- real servers ---------------------------------------------------------------------------------


def test_a_bucket_that_is_not_there(bucket: Place) -> None:
    root = s3(bucket)
    root = dataclasses.replace(root, url=root.url.replace(bucket.bucket, "ckpt-no-such-bucket"))
    error = failure(lambda: save(root), "ckpt-no-such-bucket", "bucket")
    assert "not there" in str(error) or "exist" in str(error) or "NoSuchBucket" in str(error)
    failure(lambda: restore(root), "ckpt-no-such-bucket", kind=CheckpointError)
    failure(lambda: ckpt.sync.load(root), "ckpt-no-such-bucket", kind=CheckpointError)


@pytest.mark.slow
def test_credentials_that_are_wrong(
    make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place("seaweed")
    save(s3(place))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{CANARY}Wrong/secret")
    for act in (save, restore):
        failure(partial(act, s3(place)), place.bucket, "credentials")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"AKIA{CANARY}UNKNOWN0")
    failure(lambda: save(s3(place)), place.bucket, "credentials")
    failure(lambda: save(s3(place, credentials="anonymous")), place.bucket, "credentials")


def test_credentials_of_google_that_are_wrong(make_place: Callable[[str], Place]) -> None:
    place = make_place("gcs")
    assert place.fake is not None
    save(s3(place))
    try:
        place.fake.tokens = {"another"}
        for act in (save, restore):
            failure(partial(act, s3(place)), place.bucket, "credentials")
    finally:
        place.fake.tokens = None


def test_a_bucket_that_may_only_be_read(
    make_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place("seaweed")
    save(s3(place))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.READER[1])
    root = s3(place)
    failure(lambda: save(root, 2), place.bucket, "write")
    # Who only reads needs to write nothing.
    assert np.array_equal(restore(root)["w"], STATE["w"])
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.all_steps() == [1]
        assert mgr.verify(1).ok
    with ckpt.sync.watch(root, timeout=0, pin=False) as watch:
        assert next(watch).step == 1


def test_a_bucket_of_google_that_may_only_be_read(make_place: Callable[[str], Place]) -> None:
    place = make_place("gcs")
    assert place.fake is not None
    save(s3(place))
    place.fake.read_only.add(place.bucket)
    failure(lambda: save(s3(place), 2), place.bucket)
    assert np.array_equal(restore(s3(place))["w"], STATE["w"])


@pytest.mark.parametrize("behaviour", ["ignore", "reject"])
def test_a_store_without_conditional_writes(
    make_snailmail: Callable[[str], Place], behaviour: str
) -> None:
    place = make_snailmail(behaviour)
    hint = ["single_writer=True"] if behaviour == "ignore" else []
    failure(lambda: save(s3(place)), place.bucket, "condition", *hint)
    failure(lambda: ckpt.sync.save(s3(place, "final"), STATE), "condition", *hint)
    root = s3(place, "alone", single_writer=True)
    if behaviour == "ignore":
        with ckpt.sync.CheckpointManager(root) as mgr:
            mgr.save(1, STATE).result()
            mgr.save(2, STATE).result()
            mgr.delete(1)
            assert mgr.all_steps() == [2]
            assert np.array_equal(mgr.restore(2)["w"], STATE["w"])
    else:
        # Nothing can be promised about a store that refuses every commit.
        failure(lambda: save(root), place.bucket)
