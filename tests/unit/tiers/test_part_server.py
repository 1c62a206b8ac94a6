"""A host shows its parts of snapshots to those who know the key of the job, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from ckpt._runtime.loop import call_once
from ckpt._tiers.peers import server, wire
from ckpt._tiers.peers.server import PartServer, serving
from ckpt._tiers.peers.wire import Hello, PartOpenRequest, PartOpenResult, PartReadRequest, new_key
from tests.support.served_parts import ADDRESS, SAVE, Host, Raw, Tagging

PART = PartOpenRequest(1, 5, SAVE)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


def test_who_knows_the_key_reads_every_byte_of_every_file(host: Host) -> None:
    step = host.take(5)
    (step / "empty").touch()
    (step / "below/it").mkdir(parents=True)
    (step / "below/it/two").write_bytes(b"12345")

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            files = (await (await raw.introduced(host.key)).opened(PART)).files
            wanted = {
                each.relative_to(step).as_posix(): each.read_bytes()
                for each in step.rglob("*")
                if each.is_file()
            }
            assert files == {path: len(data) for path, data in wanted.items()}
            for path, data in wanted.items():
                await raw.send(PartReadRequest(path, 0, len(data)))
                assert await raw.bytes_of(len(data)) == data
            await raw.send(PartReadRequest("below/it/two", 1, 3))
            assert await raw.bytes_of(3) == b"234"
        assert host.refused == []

    host.run(body)


@pytest.mark.parametrize(
    "problem", ["key", "role", "number", "later", "replayed", "other line", "no tag", "nothing"]
)
def test_who_does_not_prove_the_key_hears_nothing(problem: str, host: Host) -> None:
    host.take(5)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            heard = (await raw.introduced(host.key)).lined(PART)
            await raw.send(heard)
            # Somebody listens on the way.
            assert b"opened" in await raw.line()
        async with Raw.to(served.address) as raw:
            nonces = msgspec.json.decode(await raw.line(), type=Hello).nonce, "0c" * 32
            await raw.send(Hello(nonces[1]))
            right = Tagging(host.key, "client", *nonces)
            right.count += problem == "later"
            line = msgspec.json.encode(PART)
            tag = {
                "key": Tagging(new_key(), "client", *nonces),
                "role": Tagging(host.key, "server", *nonces),
                "number": Tagging(host.key, "client", nonces[0], nonces[0]),
            }.get(problem, right)
            said = b"{}" if problem == "other line" else line
            sent = line + b" " + tag.next(said).hex().encode() + b"\n"
            await raw.send(
                {"replayed": heard, "no tag": line + b"\n", "nothing": b"\n"}.get(problem, sent)
            )
            assert await raw.is_over()
        await host.says(f"a program at {ADDRESS} does not know the key of this job")

    host.run(body)


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "not text": b"\xff\xfe\x80\n",
    "not text in a message": b'{"type":"ckpt-parts-2","nonce":"\xff"}\n',
    "half a pair": b'{"type":"ckpt-parts-2","nonce":"\\ud800"}\n',
    "deep": b'{"type":"ckpt-parts-2","x":' + b"[" * 50_000 + b"\n",
    "another message": b'{"type":"opened"}\n',
    "a number": b"7\n",
    "an empty line": b"\n",
    "a long line": b'{"type":"ckpt-parts-2","nonce":"' + b"a" * 200_000 + b'"}\n',
    "a line without end": b"a" * 200_000,
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("when", ["before", "after", "reading"])
def test_garbage_ends_its_connection_alone(name: str, when: str, host: Host) -> None:
    """It is named with where it comes from, and the next one is served."""
    host.take(5)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            if when == "before":
                await raw.line()
            else:
                await raw.introduced(host.key)
                if when == "reading":
                    await raw.opened(PART)
            await raw.send(GARBAGE[name])
            assert await raw.is_over()
        await host.says(f"a program at {ADDRESS} ")
        without_tag = "does not know the key" if when != "before" else "of this protocol"
        assert "of this protocol" in host.refused[0] or without_tag in host.refused[0]
        assert host.key not in str(host.refused)
        assert len(host.refused[0]) < 300
        async with Raw.to(served.address) as raw:
            assert (await (await raw.introduced(host.key)).opened(PART)).files

    host.run(body)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_line_that_is_longer_than_an_answer_is_refused(when: str, host: Host) -> None:
    """Also where it comes in one piece, end and all."""

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            if when == "before":
                await raw.send(Hello("0" * 2000))
            else:
                await raw.introduced(host.key)
                await raw.send(PartOpenRequest(1, 5, "0" * 2000))
            await raw.line()
            assert await raw.is_over()
        await host.says("of this protocol")

    host.run(body)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_that_says_nothing_is_given_up(
    when: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", 0.05)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            if when == "before":
                await raw.line()
            else:
                await raw.introduced(host.key)
            assert await raw.is_over()
        await host.says("")

    host.run(body)


@pytest.mark.parametrize(
    "read",
    [
        PartReadRequest("../../owner", 0, 1),
        PartReadRequest("/etc/passwd", 0, 1),
        PartReadRequest("./ckpt.json", 0, 1),
        PartReadRequest("sub/../ckpt.json", 0, 1),
        PartReadRequest("link", 0, 1),
        PartReadRequest("missing", 0, 1),
        PartReadRequest("missing", 0, 0),
        PartReadRequest("ckpt.json", -1, 1),
        PartReadRequest("ckpt.json", 0, -1),
        PartReadRequest("ckpt.json", 5, -3),
        PartReadRequest("ckpt.json", 0, 1 << 40),
        PartReadRequest("ckpt.json", 1 << 40, 1),
        PartReadRequest("ckpt.json", 1 << 90, 1 << 90),
        PartReadRequest("ckpt.json", (1 << 63) - 1, 1),
    ],
    ids=str,
)
def test_only_bytes_of_the_told_files_can_be_read(read: PartReadRequest, host: Host) -> None:
    step = host.take(5)
    (host.folder / "owner").write_text("secret")
    (step / "link").symlink_to(host.folder / "owner")

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            opened = await (await raw.introduced(host.key)).opened(PART)
            assert "link" not in opened.files
            await raw.send(read)
            assert await raw.is_over()
        await host.says(f"a program at {ADDRESS} asked for bytes that are not there")

    host.run(body)


@pytest.mark.parametrize(
    "wanted",
    [
        PartOpenRequest(1, 6, SAVE),
        PartOpenRequest(1, 5, "other"),
        PartOpenRequest(0, 5, SAVE),
        PartOpenRequest(-1, 5, SAVE),
        PartOpenRequest(1, 5, ""),
    ],
    ids=str,
)
def test_what_is_not_there_is_said_to_be_missing(wanted: PartOpenRequest, host: Host) -> None:
    host.take(5)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            opened = await (await raw.introduced(host.key)).opened(wanted)
            assert opened.files == {}
            assert f"no part {wanted.part} of the snapshot of step {wanted.step}" in opened.problem

    host.run(body)


def test_more_connections_than_allowed_hear_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are there go on; when one ends there is room again."""
    host.take(5)
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as first:
            assert (await (await first.introduced(host.key)).opened(PART)).files
            async with Raw.to(served.address) as second:
                assert (await (await second.introduced(host.key)).opened(PART)).files
                async with Raw.to(served.address) as third:
                    opened = await (await third.introduced(host.key)).opened(PART)
                    assert opened.problem == "it serves as many others as it can"
            await first.send(PartReadRequest("ckpt.json", 0, 1))
            assert await first.bytes_of(1) == b"{"
            # The server hears of the end a little later.
            while True:
                async with Raw.to(served.address) as again:
                    if (await (await again.introduced(host.key)).opened(PART)).files:
                        break

    host.run(body)


@pytest.mark.parametrize("spoken", [b"", b'{"type":"ckp'], ids=["silent", "half a message"])
def test_connections_without_a_proof_keep_out_none_that_has_one(spoken: bytes, host: Host) -> None:
    """However many there are: the oldest of them makes way, and those with a proof stay."""
    host.take(5)

    async def body(served: PartServer) -> None:
        async with contextlib.AsyncExitStack() as ends:
            early = await ends.enter_async_context(Raw.to(served.address))
            assert (await (await early.introduced(host.key)).opened(PART)).files
            silent = [
                await ends.enter_async_context(Raw.to(served.address))
                for _ in range(2 * server._MOST_CONNECTIONS)
            ]
            for each in silent:
                await each.send(spoken)
            late = await ends.enter_async_context(Raw.to(served.address))
            assert (await (await late.introduced(host.key)).opened(PART)).files
            await early.send(PartReadRequest("ckpt.json", 0, 1))
            assert await early.bytes_of(1) == b"{"
            # No more are kept than may be, and the newest have their time.
            assert await silent[0].line()
            assert await silent[0].is_over()
            assert await silent[-1].line()
            assert len(served._unproven) <= server._MOST_UNPROVEN

    host.run(body)


def test_a_step_that_is_deleted_stays_for_those_who_read_it(host: Host) -> None:
    step = host.take(5)
    data = (step / "ckpt.json").read_bytes()

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            await (await raw.introduced(host.key)).opened(PART)
            shutil.rmtree(step)
            await raw.send(PartReadRequest("ckpt.json", 0, len(data)))
            assert await raw.bytes_of(len(data)) == data
        async with Raw.to(served.address) as raw:
            assert (await (await raw.introduced(host.key)).opened(PART)).problem

    host.run(body)


def test_a_file_that_shrinks_ends_the_connection(host: Host) -> None:
    step = host.take(5)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            size = (await (await raw.introduced(host.key)).opened(PART)).files["ckpt.json"]
            os.truncate(step / "ckpt.json", size - 1)
            await raw.send(PartReadRequest("ckpt.json", 0, size))
            assert len(await raw.exactly(size)) == size - 1
            assert await raw.is_over()
        await host.says("the file is shorter than it was")

    host.run(body)


def test_more_files_than_can_be_open_are_an_error(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say that the part is not there, and keeps none of them open."""
    step = host.take(5)
    for number in range(50):
        (step / f"{number}").touch()
    real_open, most = os.open, 20

    def open_few(path: Any, *args: Any, **options: Any) -> int:
        nonlocal most
        if str(path).startswith(f"{step}/"):
            most -= 1
            if most < 0:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real_open(path, *args, **options)

    async def body(served: PartServer) -> None:
        async with Raw.to(served.address) as raw:
            await raw.introduced(host.key)
            before = len(os.listdir("/proc/self/fd"))
            monkeypatch.setattr(os, "open", open_few)
            opened = await raw.opened(PART)
            assert "Too many open files" in opened.problem
            assert opened.files == {}
            assert len(os.listdir("/proc/self/fd")) <= before

    host.run(body)


def test_a_connection_leaves_no_descriptor(host: Host) -> None:
    host.take(5)

    async def body(served: PartServer) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with Raw.to(served.address) as raw:
                await (await raw.introduced(host.key)).opened(PART)
        with anyio.fail_after(10):
            while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    host.run(body)


@pytest.mark.parametrize("address", ["0", "0.0.0.0", "::", "::0", "::ffff:0.0.0.0"])
def test_all_addresses_are_never_listened_at(address: str) -> None:
    async def main() -> None:
        async with serving(address, 0, new_key(), list, print):
            pass

    with pytest.raises(OSError, match="all addresses"):
        call_once(main)


def test_no_other_address_is_listened_at(host: Host) -> None:
    async def body(served: PartServer) -> None:
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", served.address[1])) == errno.ECONNREFUSED

    host.run(body)


@pytest.mark.parametrize("address", ["203.0.113.7", "no-such-host.invalid", "\ud800"])
def test_an_address_of_another_host(address: str) -> None:
    async def main() -> None:
        async with serving(address, 0, new_key(), list, print):
            pass

    with pytest.raises(OSError, match=r"."):
        call_once(main)


def test_the_end_of_the_server_ends_its_connections(host: Host) -> None:
    host.take(5)

    async def main() -> None:
        async with host.serving() as served:
            raw = await anyio.connect_tcp(*served.address)
            end = Raw(raw)
            assert (await (await end.introduced(host.key)).opened(PART)).files
        async with raw:
            assert await end.is_over()

    call_once(main)


def test_opened_has_no_negative_sizes() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"type":"opened","files":{"a":-1}}', type=PartOpenResult)
