"""How object stores are named: URLs, config objects, the environment, installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

import ckpt
import ckpt.storage
import ckpt.sync
from ckpt.errors import InvalidArgumentError, NotACheckpointError, StorageError
from ckpt.storage._object.config import GCS, S3, Memory, parent_of
from ckpt.storage._object.connection import connect
from ckpt.storage._object.storage import ObjectStorage
from ckpt.storage._resolve import open_root, open_step_dir

STATE = {"a": np.arange(10)}
CANARY = "cAnArY-s3cr3t-0123456789"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("AWS_", "TENSORSTORE_GCS")):
            monkeypatch.delenv(name)


def fresh() -> str:
    return f"memory://{uuid.uuid4().hex}/runs/a"


@pytest.mark.parametrize(
    ("root", "location"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs/a"),
        ("s3://bucket/runs/a///", "s3://bucket/runs/a"),
        ("S3://bucket", "s3://bucket"),
        ("gs://bucket/ü b/%41+&=", "gs://bucket/ü b/%41+&="),
        ("memory://m/x", "memory://m/x"),
        (epath.Path("gs://bucket/runs") / "a", "gs://bucket/runs/a"),
        (S3("s3://bucket/runs", endpoint="http://127.0.0.1:1/"), "s3://bucket/runs"),
        (GCS("gs://bucket/runs"), "gs://bucket/runs"),
        (Memory("memory://m"), "memory://m"),
    ],
    ids=str,
)
def test_a_place_is_a_url_or_a_store(root: Any, location: str) -> None:
    storage = open_root(root)
    assert isinstance(storage, ObjectStorage)
    assert storage.location == location
    assert storage.traits.largest_file_bytes == 1 << 30


@pytest.mark.parametrize(
    ("path", "root", "step_dir"),
    [
        ("s3://bucket/runs/a", "s3://bucket/runs", "a"),
        ("s3://bucket/a/", "s3://bucket", "a"),
        (Memory("memory://m/x/y"), "memory://m/x", "y"),
    ],
    ids=str,
)
def test_a_checkpoint_lies_in_a_place(path: Any, root: str, step_dir: str) -> None:
    storage, name = open_step_dir(path)
    assert (storage.location, name) == (root, step_dir)


def test_settings_stay_with_the_parent() -> None:
    config = S3("s3://bucket/runs/a", endpoint="http://127.0.0.1:1", retries=0, concurrency=2)
    parent, name = parent_of(config)
    assert name == "a"
    assert parent == S3("s3://bucket/runs", endpoint="http://127.0.0.1:1", retries=0, concurrency=2)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "cannot be the name of a bucket"),
        ("s3:///x", "cannot be the name of a bucket"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/./b", "'.'"),
        ("s3://bucket/a\\b", "backslashes"),
        ("s3://bucket/a\nb", "control characters"),
        ("s3://bucket/" + "x" * 701, "at most 700 bytes"),
        ("s3://bucket/\udc80", "bytes of UTF-8"),
        ("s3:/bucket/a", "drops one of its two slashes"),
        ("gs:/bucket/a", "drops one of its two slashes"),
        ("s3:bucket/a", "expected a URL such as 's3://"),
        ("GS:bucket/a", "expected a URL such as 'gs://"),
        ("gcs:bucket/a", "expected a URL such as 'gs://"),
        ("gcs://bucket/a", "Use gs://"),
        ("s3a://bucket/a", "Use s3://"),
        ("file:bucket/a", "expected a URL such as 'file://"),
        ("gs://ab/x", "cannot be the name of a bucket"),
        ("s3://a..b/x", "cannot be the name of a bucket"),
        ("s3://-a/x", "cannot be the name of a bucket"),
        ("s4://bucket/x", "no storage is known for 's4', only file, gs, memory, s3"),
        ("http://host/x", "no storage is known for 'http'"),
    ],
)
def test_what_is_no_place_is_refused(url: str, words: str) -> None:
    for call in (open_root, lambda url: ckpt.sync.CheckpointManager(url)):
        with pytest.raises(InvalidArgumentError, match=words.replace("(", "\\(")):
            call(url)


def test_a_bucket_is_no_checkpoint() -> None:
    for path in ("s3://bucket", "memory://m", Memory("memory://m")):
        with pytest.raises(InvalidArgumentError, match="not a bucket"):
            ckpt.sync.save(path, STATE)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{CANARY}@bucket/x",
        f"s3://bucket/x?X-Amz-Signature={CANARY}",
        f"gs://bucket/x#{CANARY}",
        f"memory://{CANARY}@m/x",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_told(url: str) -> None:
    for call in (open_root, open_step_dir):
        with pytest.raises(InvalidArgumentError, match="without user, query or fragment") as caught:
            call(url)
        assert CANARY not in str(caught.value)
        assert CANARY not in repr(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: S3("gs://bucket"), r"S3\(url='gs://bucket'\)"),
        (lambda: S3(3), "expected a URL"),  # type: ignore[arg-type]
        (lambda: S3("s3://bucket", endpoint="localhost:9000"), "expected the URL of a store"),
        (lambda: S3("s3://bucket", endpoint="http://h:99999999"), "expected the URL of a store"),
        (lambda: S3("s3://bucket", endpoint=f"http://a:{CANARY}@h"), "without user"),
        (lambda: S3("s3://bucket", region="EU west"), "name of a region"),
        (lambda: S3("s3://bucket", credentials=CANARY), "where the keys come from"),
        (lambda: S3("s3://bucket", credentials="profile:"), "where the keys come from"),
        (lambda: S3("s3://bucket", retries=-1), "whole number from 0 to 100"),
        (lambda: S3("s3://bucket", retries=True), "whole number"),
        (lambda: S3("s3://bucket", concurrency=0), "whole number from 1"),
        (lambda: S3("s3://bucket", request_timeout=0), "number of seconds"),
        (lambda: S3("s3://bucket", request_timeout=float("nan")), "number of seconds"),
        (lambda: S3("s3://bucket", single_writer=1), "True or False"),  # type: ignore[arg-type]
        (lambda: GCS("gs://bucket", user_project=""), "name of a project"),
        (lambda: GCS("gs://bucket", request_timeout="1"), "number of seconds"),  # type: ignore[arg-type]
        (lambda: Memory("memory://m", concurrency=1.5), "whole number"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        make()
    assert CANARY not in str(caught.value)


def spec_of(config: S3) -> dict[str, Any]:
    found: dict[str, Any] = connect(config).open()[0].spec().to_json()
    return found


def test_the_environment_says_what_the_url_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore looks at neither."""
    config = S3("s3://bucket/x")
    assert connect(config).endpoint == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    spec = spec_of(config)
    assert (spec["endpoint"], spec["aws_region"]) == ("http://127.0.0.1:1", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2/")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    spec = spec_of(config)
    assert (spec["endpoint"], spec["aws_region"]) == ("http://127.0.0.1:2", "eu-west-2")
    spec = spec_of(S3("s3://bucket/x", endpoint="http://127.0.0.1:3", region="eu-west-3"))
    assert (spec["endpoint"], spec["aws_region"]) == ("http://127.0.0.1:3", "eu-west-3")
    # Otherwise TensorStore writes without any condition.
    assert spec["use_conditional_write"] is True


def test_an_endpoint_of_the_environment_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"https://me:{CANARY}@host")
    with pytest.raises(InvalidArgumentError, match="AWS_ENDPOINT_URL_S3") as caught:
        open_root("s3://bucket/x")
    assert CANARY not in str(caught.value)


def test_a_region_of_the_environment_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_REGION", f"eu {CANARY}")
    with pytest.raises(InvalidArgumentError, match=r"AWS_REGION.*name of a region") as caught:
        open_root("s3://bucket/x")
    assert CANARY not in str(caught.value)


def test_other_names_with_a_colon_are_paths(tmp_path: Path) -> None:
    for name in ("run:7", "s4:bucket", "s3:bucket"):
        assert open_root(f"{tmp_path}/{name}").location == f"{tmp_path}/{name}"
    assert open_step_dir("run:7")[1] == "run:7"


def test_managers_of_a_process_share_a_memory_by_name() -> None:
    root = fresh()
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, STATE).result()
        assert mgr.directory == root
    with ckpt.sync.CheckpointManager(Memory(root + "/")) as mgr:
        assert mgr.all_steps() == [1]
        assert np.array_equal(mgr.restore(1)["a"], STATE["a"])
    assert np.array_equal(ckpt.sync.load(f"{root}/1")["a"], STATE["a"])
    with pytest.raises(NotACheckpointError):
        ckpt.sync.load(fresh())


def test_what_objects_do_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected a plain name"):
        ckpt.sync.CheckpointManager(fresh(), trash="/trash")


def test_a_root_that_is_not_to_be_made_has_to_be_there() -> None:
    root = fresh()
    with (
        pytest.raises(StorageError, match="mode='r\\+'"),
        ckpt.sync.CheckpointManager(root, mode="r+") as mgr,
    ):
        mgr.all_steps()
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, STATE).result()
    with ckpt.sync.CheckpointManager(root, mode="r+") as mgr:
        assert mgr.all_steps() == [1]


PLUGIN = """
import ckpt.errors
from ckpt.storage._object.client import ObjectClient
from ckpt.storage._object.config import Memory
from ckpt.storage._object.connection import connect

def shelf(url):
    assert url.startswith("shelf://")
    if "closed" in url:
        raise ckpt.errors.StorageError("the shelf is closed")
    memory = connect(Memory(url.replace("shelf", "memory", 1)))
    return ObjectClient(memory.location, "", memory.open, 10.0, 4)

def odd(url):
    return object()

def broken(url):
    raise RuntimeError("no licence: " + url)
"""
POINTS = """[ckpt.storage]
shelf = shelves:shelf
odd = shelves:odd
broken = shelves:broken
absent = nothing_like_this:store
"""
PROGRAM = """
import sys, traceback
import ckpt, ckpt.sync
assert "shelves" not in sys.modules
with ckpt.sync.CheckpointManager("shelf://a/run") as mgr:
    mgr.save(1, {"a": 1}).result()
    assert mgr.restore(1) == {"a": 1}
ckpt.sync.save("shelf://a/run/final", {"b": 2})
assert ckpt.sync.load("memory://a/run/final") == {"b": 2}
for url in ("shelf://closed/x", "odd://a/x", "broken://a/x", "absent://a/x", "none://a/x"):
    try:
        ckpt.sync.load(url)
    except ckpt.CheckpointError as error:
        print(type(error).__name__, error)
try:
    # In two parts, since a traceback of Python 3.13 shows this line, too.
    ckpt.sync.load("broken://me:" + "tellNobody" + "7@a/x")
except ckpt.CheckpointError as error:
    shown = "".join(traceback.format_exception(error))
    assert "no licence" in shown and "tellNobody7" not in shown, shown
"""


def test_installed_stores_are_found_by_scheme(tmp_path: Path) -> None:
    """A real distribution on the path."""
    site = tmp_path / "site"
    (site / "shelves-1.0.dist-info").mkdir(parents=True)
    (site / "shelves.py").write_text(PLUGIN)
    (site / "shelves-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n"
    )
    (site / "shelves-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": f"{Path(ckpt.__file__).parents[1]}{os.pathsep}{site}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    closed, odd, broken, absent, none = done.stdout.splitlines()
    assert closed == "StorageError the shelf is closed"
    assert "gave object, which is not a store: it lacks delete, delete_if" in odd
    assert "RuntimeError: no licence" in broken
    assert "ModuleNotFoundError" in absent
    assert "no storage is known for 'none', only absent, broken, file, gs, memory, odd, s3" in none


def test_stores_are_named_without_tensorstore() -> None:
    program = (
        "import sys, ckpt.storage\nckpt.storage.S3('s3://bucket/x')\n"
        "print([m for m in ('jax', 'tensorstore') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"
