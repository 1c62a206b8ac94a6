"""A part that is fetched from another host is whole, or an error that names that host."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import numpy as np
import pytest

import ckpt.sync
from ckpt._runtime.loop import call_once
from ckpt._tiers.peers import remote_part, wire
from ckpt._tiers.peers.remote_part import Peer, fetch_part
from ckpt._tiers.peers.server import PartServer
from ckpt._tiers.peers.wire import Hello, PartOpenRequest, PartOpenResult, PartReadRequest
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.storage import Local
from ckpt.testing.compare import differences
from tests.support.served_parts import ADDRESS, PATIENCE_S, SAVE, Host, Raw, Tagging, target_of

ITEMS = {f"item_{n}": {"w": np.arange(40_000.0) + n, "n": n} for n in range(6)}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


def fetching(host: Host, target: Path, **options: Any) -> Exception | None:
    """Fetch the part of step 5; return the error."""
    found: list[Exception] = []
    peers: list[str] = []

    async def body(served: PartServer) -> None:
        try:
            await host.fetch(served, 5, target, **options)
        except CheckpointError as error:
            peers.append(f"process 1 at {ADDRESS}:{served.address[1]}")
            found.append(error)

    host.run(body)
    assert all(peer in str(error) for peer, error in zip(peers, found, strict=True))
    return found[0] if found else None


def assert_nothing_in(target: Path) -> None:
    """Nothing of a fetch that failed is left or seen."""
    assert [each.name for each in target.glob("*") if each.name.isdecimal()] == []
    assert list(target.glob("*/ckpt.json")) == []


def test_a_part_is_fetched_whole_and_for_its_owner_alone(host: Host, tmp_path: Path) -> None:
    step, target = host.take(5, ITEMS), tmp_path / "held/1"
    assert fetching(host, target) is None
    with ckpt.sync.CheckpointManager(target, mode="r") as mgr:
        assert mgr.verify(5).ok
        assert differences(mgr.restore(5), ITEMS) == []
    assert (target / "5/ckpt.json").read_bytes() == (step / "ckpt.json").read_bytes()
    modes = {each.stat().st_mode & 0o777 for each in target.rglob("*") if each.is_dir()}
    assert modes == {0o700}
    assert all(not each.stat().st_mode & 0o077 for each in target.rglob("*"))


def test_what_is_here_already_is_not_fetched_again(host: Host, tmp_path: Path) -> None:
    host.take(5)
    target = tmp_path / "target"

    async def body(served: PartServer) -> None:
        assert await host.fetch(served, 5, target) > 0
        assert await host.fetch(served, 5, target) == 0

    host.run(body)


def test_another_snapshot_of_that_step_is_replaced(host: Host, tmp_path: Path) -> None:
    other, target = Host(tmp_path / "other"), tmp_path / "target"
    other.take(5, save="b" * 32)
    assert fetching(other, target, save="b" * 32) is None
    step = host.take(5, ITEMS)
    assert fetching(host, target) is None
    assert (target / "5/ckpt.json").read_bytes() == (step / "ckpt.json").read_bytes()


def test_files_without_bytes(host: Host, tmp_path: Path) -> None:
    items = {"w": {"none": np.zeros(0), "some": np.ones(3)}}
    host.take(5, items)
    assert fetching(host, tmp_path / "target") is None
    with ckpt.sync.CheckpointManager(tmp_path / "target") as mgr:
        assert differences(mgr.restore(5), items) == []


def data_files(step: Path) -> list[Path]:
    found = [each for each in step.rglob("*") if each.is_file() and each.name != "ckpt.json"]
    return sorted(found, key=lambda each: each.stat().st_size)


@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_a_damaged_byte_is_named_with_its_host(where: float, host: Host, tmp_path: Path) -> None:
    """Not as a step that was deleted: other files are on their way meanwhile."""
    path = data_files(host.take(5, ITEMS))[-1]
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    error = fetching(host, tmp_path / "target")
    assert type(error) is CorruptCheckpointError
    assert "was changed after it was saved" in error.message
    assert_nothing_in(tmp_path / "target")


@pytest.mark.parametrize("what", ["cut", "missing", "no manifest", "damaged manifest"])
def test_a_part_that_is_not_whole(what: str, host: Host, tmp_path: Path) -> None:
    step = host.take(5, ITEMS)
    path = data_files(step)[-1]
    if what == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif what == "missing":
        path.unlink()
    elif what == "no manifest":
        (step / "ckpt.json").unlink()
    else:
        # Its head stays as it is.
        data = (step / "ckpt.json").read_bytes()
        (step / "ckpt.json").write_bytes(data[:-50] + b"!" + data[-49:])
    error = fetching(host, tmp_path / "target")
    assert isinstance(error, StorageError if what == "no manifest" else CorruptCheckpointError)
    assert_nothing_in(tmp_path / "target")


def test_another_save_than_the_wanted_one_is_not_there(host: Host, tmp_path: Path) -> None:
    host.take(5)
    error = fetching(host, tmp_path / "target", save="c" * 32)
    assert isinstance(error, StorageError)
    assert "no part 1 of the snapshot of step 5 any more" in error.message


def test_a_key_of_another_job_is_refused(host: Host, tmp_path: Path) -> None:
    host.take(5)
    error = fetching(host, tmp_path / "target", key="ab" * 32)
    assert isinstance(error, StorageError)
    assert "as it does where keys differ" in error.message
    assert "does not know the key of this job" in host.refused[0]
    assert_nothing_in(tmp_path / "target")


Serve = Callable[[Raw], Awaitable[None]]


@contextlib.asynccontextmanager
async def impostor(serve: Serve) -> AsyncIterator[Peer]:
    """Listen as another process would, and do what the test wants."""

    async def handle(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await serve(Raw(stream))

    listener = await anyio.create_tcp_listener(local_host=ADDRESS)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
        yield Peer(1, ADDRESS, port)
        tasks.cancel_scope.cancel()


def error_of(serve: Serve, key: str, target: Path) -> str:
    """Return the error of a fetch from an impostor, which it must name."""

    async def main() -> str:
        async with impostor(serve) as peer:
            wanted = PartOpenRequest(1, 5, SAVE)
            with anyio.fail_after(PATIENCE_S), pytest.raises(CheckpointError) as caught:
                await fetch_part(peer, key, wanted, target_of(target), "5")
            assert str(peer) in caught.value.message
            assert key not in str(caught.value)
        assert_nothing_in(target)
        return caught.value.message

    return call_once(main)


async def welcomed(raw: Raw, key: str) -> None:
    """Hear the request of a client, as a server that knows the key."""
    await (await raw.introduced(key, "server")).message()


@pytest.mark.parametrize("claim", ["none", "other key", "my own tags", "my own words"])
def test_a_server_that_does_not_prove_the_key_is_not_believed(
    claim: str, host: Host, tmp_path: Path
) -> None:
    async def serve(raw: Raw) -> None:
        # With the number of the client as its own, its tags could be taken for those of the server.
        hello = await raw.line()
        nonce = msgspec.json.decode(hello, type=Hello).nonce
        await raw.send(hello + b"\n")
        request = await raw.line()
        if claim == "none":
            raw.sent = None
        if claim == "other key":
            raw.sent = Tagging("cd" * 32, "server", nonce, nonce)
        if claim == "my own tags":
            raw.sent = Tagging(host.key, "client", nonce, nonce)
        opened = PartOpenResult({"ckpt.json": 3})
        await raw.send(request + b"\n" if claim == "my own words" else opened)
        assert await raw.line() == b""

    assert "does not know the key of this job" in error_of(serve, host.key, tmp_path / "target")


# What a relay makes of an answer.
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte": lambda answer: flipped(answer, 10),
    "the last byte": lambda answer: flipped(answer, -70),
    "its tag": lambda answer: flipped(answer, -3),
    "something added": lambda answer: b"x" + answer,
    "cut": lambda answer: answer[:-1],
}


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_a_relay_changes_is_noticed(name: str, after: int, host: Host, tmp_path: Path) -> None:
    """It hears every byte between both sides, and does not know the key.

    It changes the list of files, the first block of one, or a later one, after so many answers.
    """
    host.take(5, ITEMS)

    async def serve(raw: Raw) -> None:
        async with Raw.to(served_at[0]) as real:
            await raw.send(await real.line() + b"\n")
            await real.send(await raw.line() + b"\n")
            await real.send(await raw.line() + b"\n")
            answers = [await real.line() + b"\n"]
            for _ in range(after):
                await raw.send(answers[-1])
                request = await raw.line()
                read = msgspec.json.decode(request.rpartition(b" ")[0], type=PartReadRequest)
                await real.send(request + b"\n")
                answers.append(await real.exactly(read.nbytes + 32))
            await raw.send(CHANGES[name](answers[-1]))

    served_at: list[tuple[str, int]] = []

    async def body(served: PartServer) -> None:
        served_at.append(served.address)
        async with impostor(serve) as peer:
            with pytest.raises(StorageError) as caught:
                await fetch_part(
                    peer, host.key, PartOpenRequest(1, 5, SAVE), target_of(tmp_path / "t"), "5"
                )
        wanted = "has ended" if name == "cut" else "was changed on its way"
        assert wanted in caught.value.message
        assert_nothing_in(tmp_path / "t")

    host.run(body)


@pytest.mark.parametrize("how", ["changed", "repeated"])
def test_a_request_that_is_not_the_one_that_was_sent_is_refused(how: str, host: Host) -> None:
    host.take(5)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            await (await raw.introduced(host.key)).opened(PartOpenRequest(1, 5, SAVE))
            line = raw.lined(PartReadRequest("ckpt.json", 0, 100))
            if how == "repeated":
                await raw.send(line)
                assert (await raw.bytes_of(100)).startswith(b"{")
            await raw.send(line if how == "repeated" else line.replace(b"100", b"101"))
            assert await raw.is_over()
        await host.says("was changed on its way")

    host.run(body)


def test_a_tag_is_valid_once_for_one_side_of_one_connection() -> None:
    """So nothing can be repeated, turned around, sent back, or sent over another connection."""
    roles: tuple[wire.Role, ...] = ("server", "client")
    ends = itertools.product(["0a" * 32, "0b" * 32], roles, ["1", "2"], ["3", "4"])
    tags = [wire.Tags(key, role, *nonces) for key, role, *nonces in ends]
    found = [each.next(b"x").digest() for each in tags for _ in range(3)]
    assert len(set(found)) == len(found) == 48


GARBAGE = {
    "text": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "not text": b"\xff\xfe\x80\n",
    "deep": b'{"type":"opened","x":' + b"[" * 50_000 + b"\n",
    "a negative size": b'{"type":"opened","files":{"ckpt.json":-1}}\n',
    "another message": b'{"type":"read","path":"","offset":0,"nbytes":0}\n',
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("when", ["before", "after"])
def test_garbage_is_an_error_that_names_who_sent_it(
    name: str, when: str, host: Host, tmp_path: Path
) -> None:
    async def serve(raw: Raw) -> None:
        if when == "after":
            await welcomed(raw, host.key)
        await raw.send(GARBAGE[name])
        await raw.line()

    problem = error_of(serve, host.key, tmp_path / "target")
    assert ("not of this protocol" if when == "before" else "the key of this job") in problem


def test_a_line_without_end(host: Host, tmp_path: Path) -> None:
    async def serve(raw: Raw) -> None:
        await raw.send(b"a" * 200_000)
        await raw.line()

    assert "not of this protocol" in error_of(serve, host.key, tmp_path / "target")


@pytest.mark.parametrize("when", ["at once", "before", "after", "opened", "in the middle"])
def test_a_peer_that_goes_is_named(when: str, host: Host, tmp_path: Path) -> None:
    async def serve(raw: Raw) -> None:
        if when == "at once":
            return
        if when == "before":
            await raw.send(Hello("0" * 64))
            return
        await welcomed(raw, host.key)
        if when != "after":
            await raw.send(PartOpenResult({"ckpt.json": 100}))
        if when == "in the middle":
            read = msgspec.json.decode(await raw.message(), type=PartReadRequest)
            await raw.send(b"x" * (read.nbytes // 2))

    problem = error_of(serve, host.key, tmp_path / "target")
    assert any(each in problem for each in ["has ended the connection", "reset by peer"])


@pytest.mark.parametrize("when", ["at once", "slow", "after", "in the middle"])
def test_a_peer_that_is_silent_is_named(
    when: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(remote_part, "HELLO_SECONDS", 0.3)

    async def serve(raw: Raw) -> None:
        if when == "slow":
            # A byte now and then is no answer.
            while True:
                await raw.send(b" ")
                await anyio.sleep(0.05)
        if when != "at once":
            await welcomed(raw, host.key)
        if when == "in the middle":
            await raw.send(PartOpenResult({"ckpt.json": 100}))
            await raw.send(b"{")
        await anyio.sleep_forever()

    problem = error_of(serve, host.key, tmp_path / "target")
    assert "was silent for" in problem or "does not answer within" in problem


def test_a_port_at_which_there_is_none(host: Host, tmp_path: Path) -> None:
    async def main() -> None:
        listener = await anyio.create_tcp_listener(local_host=ADDRESS)
        port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
        await listener.aclose()
        with pytest.raises(StorageError, match=rf"process 1 at {ADDRESS}:{port} cannot be reached"):
            await fetch_part(
                Peer(1, ADDRESS, port),
                host.key,
                PartOpenRequest(1, 5, SAVE),
                target_of(tmp_path),
                "5",
            )

    call_once(main)


def test_a_host_without_descriptors_says_so(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = host.take(5)
    real_open = os.open

    def open_none(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(f"{step}/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", open_none)
    error = fetching(host, tmp_path / "target")
    assert isinstance(error, StorageError)
    assert "Too many open files" in error.message


def test_a_fetch_that_is_cancelled_leaves_nothing_to_be_seen(host: Host, tmp_path: Path) -> None:
    host.take(5, ITEMS)
    target = tmp_path / "target"

    async def body(served: PartServer) -> None:
        with anyio.CancelScope() as scope:

            class Cut(type(target_of(target))):  # type: ignore[misc]
                async def write_part(self, *args: Any, **options: Any) -> None:
                    scope.cancel()
                    await super().write_part(*args, **options)

            peer = Peer(1, *served.address)
            cut = Cut(Local(target, permission_mode=0o700), target_of(target)._timeouts)
            await fetch_part(peer, host.key, PartOpenRequest(1, 5, SAVE), cut, "5")
        assert scope.cancelled_caught
        assert_nothing_in(target)
        # The next one removes what is left.
        await host.fetch(served, 5, target)
        assert [each.name for each in target.iterdir()] == ["5"]

    host.run(body)
