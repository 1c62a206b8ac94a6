"""Credentials stay where they are: in no error, note, log or file; and files follow the umask."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CheckpointError
from ckpt.storage._object.errors import refused as store_refused
from tests.support.damage import files_of

# Stands in every secret; looks like a word, so that its own shape does not give it away.
CANARY = "tellNobody7"
KEY = f"wJalrXUtn/{CANARY}/bPxRfiCYEXAMPLE"
KEY += "K" * (40 - len(KEY))

# By way of which a secret comes into a path or an answer of a store.
SHAPES = {
    "password": f"https://me:{CANARY}@host/run",
    "password of a bucket": f"s3://me:{CANARY}@bucket/run",
    "password of a database": f"postgres://me:{CANARY}@host:5432/db?sslmode=on",
    "password with an at sign": f"gs://me:x@{CANARY}@bucket/run",
    "password with a slash": f"gs://me:x/{CANARY}@bucket/run",
    "password in percent signs": f"https://me:%2F{CANARY}%40@host/run",
    "password of a file URL": f"file://me:{CANARY}@host/run",
    "token as a user": f"https://{CANARY}@github.com/me/x",
    "user and token": f"https://oauth2:{CANARY}@host/x.git",
    "S3 signature": f"https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature={CANARY}",
    "S3 credential": f"https://b.s3.amazonaws.com/k?X-Amz-Credential={CANARY}%2Fs3&x=1",
    "S3 session": f"https://b.s3.amazonaws.com/k?X-Amz-Security-Token=Fwo%2F{CANARY}",
    "S3 key of version 2": f"https://b.s3.amazonaws.com/k?AWSAccessKeyId={CANARY}&Expires=1",
    "S3 signature of version 2": f"https://b.s3.amazonaws.com/k?Signature=a%2F{CANARY}%3D",
    "GCS signature": f"https://storage.googleapis.com/b/k?X-Goog-Signature=0f{CANARY}",
    "GCS credential": f"https://storage.googleapis.com/b/k?X-Goog-Credential={CANARY}%40p",
    "GCS signature of version 2": f"https://storage.googleapis.com/b/k?GoogleAccessId={CANARY}",
    "Azure signature": f"https://a.blob.core.windows.net/c/k?sv=2024&sig={CANARY}%3D&se=1",
    "access token": f"gs://bucket/run?access_token={CANARY}",
    "token": f"https://host/run?token={CANARY}#x",
    "key": f"https://host/run?a=1&api_key={CANARY}",
    "fragment": f"https://host/run#access_token={CANARY}",
    "URL in a URL": f"https://host/run?next=https%3A%2F%2Fh%3Ftoken%3D{CANARY}",
    "bearer": f"https://host/run: Authorization: Bearer {CANARY}",
    "bearer alone": f"https://host/run (bearer {CANARY}.x)",
    "basic": f"https://host/run: Authorization: Basic {CANARY}==",
    "signed request": f"s3://b: Authorization: AWS4-HMAC-SHA256 Credential=x, Signature={CANARY}",
    "header": f"s3://b: X-Auth-Token: {CANARY}",
    "header of a key": f"s3://b: x-api-key: {CANARY}",
    "cookie": f"https://host/run: Set-Cookie: a=b; session={CANARY}",
    "keys of AWS": f"s3://b with AKIAIOSFODNN7EXAMPLE:{KEY}",
    "key of AWS": f"s3://b with aws_secret_access_key={KEY}",
    "account key": f"azure://c AccountName=me;AccountKey=a/b+{CANARY}==;EndpointSuffix=x",
    "configuration": f'gs://b with "password": "{CANARY}"',
    "argument": f"gs://b with password='{CANARY}'",
    "environment": f"s3://b/in-the-environment-{CANARY}/run",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", f"in-the-environment-{CANARY}")


@pytest.fixture(params=SHAPES)
def text(request: pytest.FixtureRequest) -> str:
    return SHAPES[request.param]


def told(error: BaseException) -> str:
    """Everything that an error shows of itself."""
    parts = [str(error), repr(error), *getattr(error, "__notes__", ())]
    parts += [str(getattr(error, name, "")) for name in ("args", "message", "problems", "others")]
    return "\n".join(parts)


def refused(call: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert CANARY not in told(caught.value)
    return caught.value


READS: list[Callable[[Any], Any]] = [ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify]
CALLS: list[Callable[[Any], Any]] = [
    *READS,
    ckpt.sync.CheckpointManager,
    ckpt.CheckpointManager,
    lambda path: ckpt.sync.save(path, {"w": 1}),
]


def test_thirty_shapes_are_tried() -> None:
    assert len(SHAPES) >= 30
    assert all(CANARY in shape for shape in SHAPES.values())


def test_a_path_that_is_refused_shows_no_secret(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt")
    monkeypatch.chdir(tmp_path)
    for call in CALLS:
        for path in (text, text.encode(), text + "\0"):
            refused(partial(call, path))
    for call in READS:
        # What is no URL any more is a path of a local file system, where there is nothing.
        for place in (Path(text), "x" * 80 + "/" + text):
            if "file:" not in str(place):
                refused(partial(call, place))
    assert os.listdir(tmp_path) == []
    assert CANARY not in "\n".join(record.getMessage() for record in caplog.records)


def test_a_store_that_answers_with_a_secret(text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for status in ("UNAVAILABLE: ", "NOT_FOUND: ", "DATA_LOSS: ", ""):
        answer = f"{status}Error reading {text!r} [url='{text}']"

        def call(answer: str = answer) -> None:
            error = ValueError(answer)
            raise store_refused("read", "an object", error) from error

        error = refused(call)
        # Nor in what is printed of it, with what it came from.
        shown = "".join(traceback.format_exception(error))
        lines = [line for line in shown.splitlines() if not line.startswith("  ")]
        assert CANARY not in "\n".join(lines)
        logging.getLogger("ckpt").warning("a store failed", exc_info=error)
    assert CANARY not in "\n".join(record.getMessage() for record in caplog.records)


class Broken:
    """An object whose library tells more than it should."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_state(self) -> Any:
        if self.text.startswith("saved "):
            return {"position": 1}
        raise ConnectionError(f"cannot reach {self.text}")

    def set_state(self, state: Any) -> None:
        raise ConnectionError(f"cannot reach {self.text}")


def test_a_handler_that_fails_with_a_secret(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ckpt")
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        refused(lambda: mgr.save(1, items={"loader": Broken(text)}).result())
        mgr.save(2, items={"loader": Broken(f"saved {text}")}).result()
        refused(lambda: mgr.restore(2, items={"loader": Broken(f"saved {text}")}))
    refused(lambda: ckpt.sync.save(tmp_path / "x", items={"loader": Broken(text)}))
    assert CANARY not in "\n".join(record.getMessage() for record in caplog.records)


def test_arguments_that_hold_a_secret(text: str, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": 1}).result()
        for call in (
            lambda: mgr.save(text, {"w": 1}),  # type: ignore[call-overload]
            lambda: mgr.restore(text),  # type: ignore[arg-type]
            lambda: mgr.save(2, items={text: {"w": 1}}),
            lambda: mgr.restore(1, items=[text]),
            lambda: mgr.save(2, {"w": 1}, metrics={"loss": {text}}),
            lambda: mgr.save(2, {"w": 1}, custom_metadata={"store": {text}}),
        ):
            refused(call)


def test_a_local_path_that_holds_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a mounted bucket, named by what is in the environment."""
    caplog.set_level(logging.DEBUG, logger="ckpt")
    root = tmp_path / f"in-the-environment-{CANARY}"
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, {"w": np.arange(5.0)}).result()
        refused(lambda: mgr.restore(2))
        (root / "1" / "ckpt.json").write_text("x")
        refused(lambda: mgr.restore(1))
        (root / "1" / "ckpt.json").unlink()
        (root / "1" / "ckpt.json").mkdir()
        refused(lambda: mgr.restore(1))
    for call in (ckpt.sync.load, ckpt.sync.metadata):
        refused(partial(call, root / "1"))
        refused(partial(call, root / "none"))
    (root / "file").write_text("x")
    refused(lambda: ckpt.sync.CheckpointManager(root / "file").__enter__())
    refused(lambda: ckpt.sync.save(root / "file" / "x", {"w": 1}))
    assert CANARY not in "\n".join(record.getMessage() for record in caplog.records)


def test_no_file_holds_what_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "XLA_FLAGS_TOKEN", "JAX_SECRET", "USER"):
        monkeypatch.setenv(name, f"{CANARY}-{name}")
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        items = {"state": {"w": np.arange(5.0)}, "notes": "text"}
        mgr.save(1, items=items, metrics={"loss": 1}, custom_metadata={"a": 1}).result()
    for name in files_of(tmp_path):
        assert CANARY.encode() not in (tmp_path / name).read_bytes(), name


# -- the umask ------------------------------------------------------------------------------------

SAVES = """
import os, sys
os.umask(int(sys.argv[2], 8))
import numpy as np
import ckpt.sync
with ckpt.sync.CheckpointManager(sys.argv[1] + "/run") as mgr:
    state = {"w": np.zeros((600, 600)), "small": np.ones(3)}
    mgr.save(1, items={"state": state, "notes": "x" * 2_000_000, "more": b"y"}).result()
    mgr.save(2, state, metrics={"loss": 1}).result()
    mgr.save(2, state, if_exists="replace").result()
ckpt.sync.save(sys.argv[1] + "/x", state, formats={"**": ckpt.ArrayFormat(compression="zstd")})
"""


def modes(top: Path) -> Iterator[tuple[str, int]]:
    for path in top.rglob("*"):
        status = path.lstat()
        allowed = 0o777 if stat.S_ISDIR(status.st_mode) else 0o666
        yield path.relative_to(top).as_posix(), (status.st_mode & 0o7777) ^ allowed


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o007])
def test_files_and_directories_follow_the_umask(tmp_path: Path, umask: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVES, tmp_path, oct(umask)[2:]],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(modes(tmp_path))
    assert len(found) > 20
    for name, missing in found.items():
        # A file has no more than the umask leaves; one never has the bits to run.
        assert missing & umask == umask & (0o777 if (tmp_path / name).is_dir() else 0o666), name
        assert missing & ~umask == 0, f"{name}: {missing:o} is less than umask {umask:o} leaves"
