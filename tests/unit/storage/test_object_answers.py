"""What stores answer that do not do as they were asked, and which keys they are shown."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import threading
import traceback
import uuid
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import tensorstore as ts

import ckpt.sync
from ckpt.errors import StorageError
from ckpt.storage._object.client import ObjectClient
from ckpt.storage._object.config import S3, Memory
from ckpt.storage._object.connection import connect
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._store import Swap
from tests.stores.wire import Head, Loopback, read_head, read_pieces, send
from tests.unit.storage.failing_store import FailingStore

CONFLICT = "ABORTED: ConditionalRequestConflict: m [http_response_code='409']"
TOO_MANY = "UNAVAILABLE: rateLimitExceeded [http_response_code='429']"
GARBLED = "INVALID_ARGUMENT: BadDigest: m [http_response_code='400']"


class Store:
    """Answers every request alike, and keeps what it was asked."""

    def __init__(self, status: int = 403, code: str = "AccessDenied") -> None:
        self.status = status
        self.code = code
        self.asked: list[Head] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await read_head(reader)) is not None:
            async for _ in read_pieces(reader, head):
                pass
            self.asked.append(head)
            body = f"<Error><Code>{self.code}</Code><Message>m</Message></Error>"
            await send(writer, self.status, body.encode())


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home with the files of Amazon's tools, and an environment without settings."""
    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(tmp_path / ".aws", "HOME")
    return tmp_path


def write_files(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / "config").write_text("[default]\nregion = eu-west-1\n[profile training]\n")
    (folder / "credentials").write_text(
        "".join(
            f"[{profile}]\naws_access_key_id = {name}{profile}\naws_secret_access_key = secret\n"
            for profile in ("default", "training")
        )
    )


def s3(port: int, **options: Any) -> S3:
    return S3("s3://bucket/run", endpoint=f"http://127.0.0.1:{port}", **options)


def keys_of(config: S3 | Memory, store: Any = None) -> ObjectClient:
    connection = connect(config)
    open_store = connection.open if store is None else lambda: (store, store)
    return ObjectClient(config.url, connection.endpoint, open_store, config.request_timeout, 4)


@pytest.mark.parametrize(
    ("credentials", "variables", "key"),
    [
        ("default", {}, "HOMEdefault"),
        ("default", {"AWS_PROFILE": "training"}, "HOMEtraining"),
        ("default", {"AWS_SHARED_CREDENTIALS_FILE": "{}/other/credentials"}, "OTHERdefault"),
        ("default", {"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "secret"}, "ENV"),
        ("profile:training", {}, "HOMEtraining"),
        ("profile:training", {"AWS_PROFILE": "default", "AWS_ACCESS_KEY_ID": "E"}, "HOMEtraining"),
        (
            "profile:training",
            {
                "AWS_SHARED_CREDENTIALS_FILE": "{}/other/credentials",
                "AWS_CONFIG_FILE": "{}/other/config",
            },
            "OTHERtraining",
        ),
    ],
)
def test_keys_come_from_where_users_keep_them(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    credentials: str,
    variables: dict[str, str],
    key: str,
) -> None:
    write_files(home / "other", "OTHER")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(home))
    store = Store()
    with (
        Loopback(store.serve) as server,
        pytest.raises(StorageError, match="credentials") as caught,
    ):
        anyio.run(keys_of(s3(server.port, credentials=credentials)).get, "x")
    assert caught.value.errno == errno.EACCES
    assert f"Credential={key}/" in store.asked[0].headers["authorization"]


def test_a_profile_that_is_not_there_is_named() -> None:
    with pytest.raises(StorageError, match=r"no profile 'none' with keys in .*/\.aws/") as caught:
        anyio.run(keys_of(s3(1, credentials="profile:none")).get, "x")
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize(
    ("status", "code", "number", "words"),
    [
        (400, "ExpiredToken", errno.EACCES, "Log in again"),
        (400, "InvalidToken", errno.EACCES, "Log in again"),
        (400, "AuthorizationHeaderMalformed", errno.EREMOTE, "another region or endpoint"),
        (301, "PermanentRedirect", errno.EREMOTE, "another region or endpoint"),
        (301, "Moved", errno.EREMOTE, "another region or endpoint"),
        (307, "TemporaryRedirect", errno.EREMOTE, "another region or endpoint"),
        (403, "SecondLevelDomainForbidden", errno.ENOTSUP, "only in the host name"),
        (403, "PathStyleDomainForbidden", errno.ENOTSUP, "only in the host name"),
        (400, "InvalidPathAccess", errno.ENOTSUP, "only in the host name"),
        (400, "InvalidRequest", errno.EINVAL, "does not accept the request"),
        (405, "MethodNotAllowed", errno.EINVAL, "does not accept the request"),
    ],
)
def test_a_refusal_is_told_at_once(status: int, code: str, number: int, words: str) -> None:
    store = Store(status, code)
    with (
        Loopback(store.serve) as server,
        pytest.raises(RequestFailed, match=f"{code}.*{words}") as caught,
    ):
        anyio.run(keys_of(s3(server.port)).swap, "x", b"data", None)
    assert caught.value.is_refusal
    assert caught.value.errno == number
    assert len(store.asked) == 1
    # Told as what a caller can catch, in this process and in others.
    (last,) = traceback.format_exception_only(caught.value)
    assert last.startswith("ckpt.errors.StorageError: ")
    sent = pickle.loads(pickle.dumps(caught.value))
    assert type(sent) is StorageError
    assert (str(sent), sent.errno) == (str(caught.value), number)


class Page:
    """A web server that says yes to everything, and shows its page."""

    def __init__(self, **headers: str) -> None:
        self.headers = headers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await read_head(reader)) is not None:
            async for _ in read_pieces(reader, head):
                pass
            await send(writer, 200, b"<html>Log in</html>", **self.headers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "words"), [({}, "does not speak S3"), ({"ETag": '"1"'}, "does not have it")]
)
def test_a_page_for_people_is_not_taken_for_a_store(headers: dict[str, str], words: str) -> None:
    with Loopback(Page(**headers).serve) as server:
        root = s3(server.port, credentials="anonymous", request_timeout=20.0)
        with pytest.raises(StorageError, match=words) as caught:
            ckpt.sync.save(root, {"w": np.arange(10.0)})
        assert "single_writer" not in str(caught.value)
        with pytest.raises(StorageError, match=r"not speak S3.* end with the bucket"):
            anyio.run(keys_of(root).list, "x/")


def test_who_does_not_know_conditions_may_be_no_store() -> None:
    with (
        Loopback(Store(501, "NotImplemented").serve) as server,
        pytest.raises(RequestFailed, match=r"If-None-Match.*check that the endpoint") as caught,
    ):
        anyio.run(keys_of(s3(server.port, credentials="anonymous")).swap, "x", b"data", None)
    assert caught.value.errno == errno.ENOTSUP


class Reluctant:
    """A store in memory that answers so many conditional writes with an error."""

    def __init__(self, text: str, times: int, other: bytes | None = None) -> None:
        self.store = connect(Memory(f"memory://{uuid.uuid4().hex}")).open()[0]
        self.text = text
        self.times = times
        self.other = other

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        return self.store.read(key, byte_range=byte_range)

    def list(self, range: Any = None) -> Any:
        return self.store.list(range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        if not self.times:
            return self.store.write(key, value, if_equal=if_equal)
        self.times -= 1
        if self.other is not None:
            self.store.write(key, self.other).result()
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        promise.set_exception(ValueError(self.text))
        return future


@pytest.mark.parametrize("text", [CONFLICT, TOO_MANY, GARBLED])
def test_what_was_turned_away_is_tried_again(text: str) -> None:
    async def main() -> None:
        store = Reluctant(text, 4)
        keys = keys_of(Memory("memory://m"), store)
        swap = await keys.swap("x", b"data", None)
        assert swap.generation is not None
        # A conflict is no lost answer: somebody else's object is there, and ours never was.
        store.times, store.other = 1, b"theirs"
        assert await keys.swap("x", b"more", swap.generation) == Swap(None)
        # Neither is it one when the time is up.
        store.times, store.other = 1 << 30, None
        hasty = keys_of(Memory("memory://m", request_timeout=0.2), store)
        with pytest.raises(RequestFailed) as caught:
            await hasty.swap("y", b"data", None)
        assert caught.value.is_refusal

    anyio.run(main)


@pytest.mark.parametrize("kind", ["refused", "lost"])
def test_a_conditional_removal_is_repeated(kind: str) -> None:
    async def main() -> None:
        raw = connect(Memory(f"memory://{uuid.uuid4().hex}")).open()[0]
        generation = raw.write("x", b"data").result().generation
        keys = keys_of(Memory("memory://m"), FailingStore(raw, 0, kind))
        assert await keys.delete_if("x", generation) is (kind == "refused")
        assert raw.list().result() == []
        raw.write("x", b"another").result()
        assert not await keys.delete_if("x", generation)
        assert raw.read("x").result().value == b"another"

    anyio.run(main)


class SlowStore:
    """A store in memory that takes its time for whole objects."""

    def __init__(self, seconds: float) -> None:
        self.store = connect(Memory(f"memory://{uuid.uuid4().hex}")).open()[0]
        self.seconds = seconds

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        found = self.store.read(key, byte_range=byte_range)
        if byte_range is not None:
            return found
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        timer = threading.Timer(self.seconds, lambda: promise.set_result(found.result()))
        timer.daemon = True
        timer.start()
        return future


def test_large_objects_have_more_time() -> None:
    async def main() -> None:
        store = SlowStore(1.0)
        store.store.write("large", bytes(3 << 20)).result()
        store.store.write("small", b"data").result()
        keys = keys_of(Memory("memory://m", request_timeout=0.3), store)
        found = await keys.get("large")
        assert found is not None
        assert len(found.data) == 3 << 20
        with pytest.raises(RequestFailed, match="no answer within"):
            await keys.get("small")

    anyio.run(main)


def test_bytes_behind_the_end_of_an_object_are_found() -> None:
    config = Memory(f"memory://{uuid.uuid4().hex}/run")
    ckpt.sync.save(f"{config.url}/final", {"w": np.arange(1000.0)})
    raw = connect(config).open()[0]
    assert ckpt.sync.verify(f"{config.url}/final", deep=True).ok
    for key in raw.list().result():
        name = key.decode()
        if not name.startswith("final/") or name.endswith("/ckpt.json"):
            continue
        whole = raw.read(key).result().value
        raw.write(key, whole + b"-").result()
        report = ckpt.sync.verify(f"{config.url}/final", deep=True)
        assert [name.endswith(problem.file) for problem in report.problems] == [True]
        assert f"has more than {len(whole)} bytes" in report.problems[0].message
        raw.write(key, whole).result()


class CrowdedStore:
    """A store in memory that sees how many write to it from threads at once."""

    def __init__(self) -> None:
        self.store = connect(Memory(f"memory://{uuid.uuid4().hex}")).open()[0]
        self.inside = 0
        self.met = threading.Event()

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        self.inside += 1
        if self.inside > 1:
            self.met.set()
        self.met.wait(0.05)
        self.inside -= 1
        return self.store.write(key, value)


def test_data_are_copied_one_object_at_a_time() -> None:
    """Each copy has the size of the object, and copying holds the interpreter anyway."""

    async def main() -> None:
        store = CrowdedStore()
        keys = keys_of(Memory("memory://m"), store)
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(keys.put, f"x{number}", memoryview(b"data"))
        assert not store.met.is_set()
        assert len(store.store.list().result()) == 4

    anyio.run(main)
