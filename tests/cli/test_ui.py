"""`ckpt ui`: who may read the page of a run, what it answers, and the page as one file."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
from ckpt._inspection import listed_steps
from ckpt._inspection.locations import root_at
from ckpt._inspection.usage import StorageUsage, usage_of
from ckpt.page.document import RunReader
from tests.support.command import ckpt_command, environment, in_this_process


@contextmanager
def served(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve the page of a root; yield the process and the address that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt", "ui", str(root), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def get(url: str, path: str, token: str | None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Ask the server; return status, body (decoded if it is JSON) and headers."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    query = "" if token is None else f"?token={token}"
    connection.request("GET", path + query, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    is_json = answer.getheader("Content-Type", "").startswith("application/json")
    return answer.status, json.loads(text) if is_json else text, dict(answer.getheaders())


def token_of(url: str) -> str:
    return url.partition("token=")[2]


def test_it_serves_the_run_to_who_has_the_token(run_root: Path) -> None:
    with served(run_root) as (_, url):
        assert urlsplit(url).hostname == "127.0.0.1"
        token = token_of(url)
        assert len(token) >= 24
        status, page, headers = get(url, "/", token)
        assert status == 200
        assert "<h1" in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        with_cookie = {"Cookie": cookie.partition(";")[0]}
        status, run, _ = get(url, "/run", None, **with_cookie)
        assert status == 200
        assert [each["step"] for each in run["listing"]["steps"]] == ["10", "20", "30"]
        assert run["statistics"]["30"]["written"] > 0
        status, step, _ = get(url, "/step/20", token)
        assert status == 200
        assert step["summary"]["step"] == "20"
        assert {leaf["path"] for leaf in step["leaves"]} >= {"params.embed", "epoch"}
        status, norms, _ = get(url, "/norms", token)
        assert status == 200
        assert norms["table"]["steps"] == norms["table"]["unknown"] == ["10", "20", "30"]


@pytest.mark.parametrize("path", ["/", "/run", "/norms", "/step/10", "/page.js", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "wrong", "ü"])
def test_nobody_else_gets_anything(path: str, token: str | None, server: str) -> None:
    status, text, _ = get(server, path, "%C3%BC" if token == "ü" else token)
    assert status == 403
    assert "token" in text


@pytest.fixture(scope="module")
def server(run_root: Path) -> Iterator[str]:
    with served(run_root) as (_, url):
        yield url


@pytest.mark.parametrize(
    "path",
    ["/step/11", "/step/x", "/step/-1", "/step/../../etc/passwd", "/step/010", "/x", "/../x.py"],
)
def test_what_is_not_there_is_not_found(path: str, server: str) -> None:
    assert get(server, path, token_of(server))[0] == 404


def test_it_writes_nothing(server: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=30)
    connection.request("POST", f"/run?token={token_of(server)}")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_damaged_step_is_an_error_of_that_step_alone(run_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(run_root, root)
    with served(root) as (_, url):
        manifest = root / "20" / "ckpt.json"
        data = bytearray(manifest.read_bytes())
        data[-60] ^= 1
        manifest.write_bytes(data)
        status, told, _ = get(url, "/step/20", token_of(url))
        assert status == 502
        assert "20" in told["error"]
        assert get(url, "/step/30", token_of(url))[0] == 200
        assert get(url, "/run", token_of(url))[0] == 200


def test_a_new_step_is_in_the_next_answer(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": jnp.zeros(2)}, durable=True)
        with served(tmp_path) as (_, url):
            get(url, "/run", token_of(url))
            mgr.save(2, {"w": jnp.zeros(2)}, durable=True)
            _, run, _ = get(url, "/run", token_of(url))
            assert [each["step"] for each in run["listing"]["steps"]] == ["1", "2"]


def test_norms_follow_the_run_and_are_bounded(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        for step in range(2**53, 2**53 + 70):
            layers = {f"layer_{n}": jnp.ones(1) for n in range(210)}
            mgr.save(step, layers if step == 2**53 else {"layer_0": jnp.ones(1)})
        mgr.wait_until_finished()
        with served(tmp_path) as (_, url):
            _, norms, _ = get(url, "/norms", token_of(url))
            table = norms["table"]
            # Every second one, and the last; numbers that a browser would round are texts.
            steps = [*range(2**53, 2**53 + 69, 2), 2**53 + 69]
            assert table["steps"] == [*map(str, steps)]
            assert (norms["layers"], len(table["layers"]), table["total"]) == (210, 200, 70)
            assert table["layers"][0]["norms"] == [1.0] * 36
            assert table["layers"][1]["norms"] == [1.0, *[None] * 35]
            mgr.save(2**53 + 70, {"layer_0": jnp.full(1, jnp.nan)}, durable=True)
            _, norms, _ = get(url, "/norms", token_of(url))
            assert norms["table"]["nonfinite"] == [str(2**53 + 70)]
            assert norms["table"]["layers"][0]["nonfinite"][-1] == 1


def test_two_runs_can_be_served_to_one_browser(run_root: Path) -> None:
    with served(run_root) as (_, one), served(run_root) as (_, two):
        cookies = []
        for url in (one, two):
            _, _, headers = get(url, "/", token_of(url))
            cookies.append(headers["Set-Cookie"].partition(";")[0])
        # A browser sends both to both, since cookies know no ports.
        assert len({each.partition("=")[0] for each in cookies}) == 2
        for url in (one, two):
            assert get(url, "/run", None, Cookie="; ".join(cookies))[0] == 200


def test_a_reader_that_goes_away_is_not_told_of(run_root: Path) -> None:
    with served(run_root) as (process, url):
        host, _, port = urlsplit(url).netloc.partition(":")
        for _ in range(3):
            gone = socket.create_connection((host, int(port)))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(f"GET /page.js?token={token_of(url)} HTTP/1.1\r\n\r\n".encode())
            gone.close()
        assert get(url, "/run", token_of(url))[0] == 200
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert "Traceback" not in err
        assert "reset" not in err


def test_ctrl_c_ends_it(run_root: Path) -> None:
    with served(run_root) as (process, url):
        assert get(url, "/run", token_of(url))[0] == 200
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in err


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as tried:
        try:
            tried.bind(("::1", 0))
        except OSError:
            return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
EVERYWHERE = ["0.0.0.0", pytest.param("::", marks=NEEDS_IPV6)]


@pytest.mark.parametrize("host", EVERYWHERE)
def test_of_all_addresses_one_is_printed_that_can_be_opened(host: str, run_root: Path) -> None:
    with served(run_root, "--host", host) as (process, url):
        assert not ip_address(urlsplit(url).hostname or "").is_unspecified
        assert get(url, "/run", token_of(url))[0] == 200
        process.kill()
        assert "warning: everybody in the network" in process.communicate()[1]


@NEEDS_IPV6
def test_an_address_of_ipv6_is_served(run_root: Path) -> None:
    with served(run_root, "--host", "::1") as (process, url):
        assert url.startswith("http://[::1]:")
        assert get(url, "/run", token_of(url))[0] == 200
        process.kill()
        assert "warning" not in process.communicate()[1]


def test_a_host_that_is_none_is_refused(run_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = in_this_process(capsys, "ui", run_root, "--host", "no such host")
    assert (ran.status, len(ran.err.splitlines())) == (2, 2)
    assert "cannot listen on no such host" in ran.err


def test_a_root_that_is_gone_is_said_in_plain_words(run_root: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run_root, tmp_path / "runs"))
    with served(root) as (_, url):
        assert get(url, "/run", token_of(url))[0] == 200
        root.rename(tmp_path / "elsewhere")
        status, told, _ = get(url, "/run", token_of(url))
        assert status == 502
        assert told["error"].startswith(f"{root} is gone")
        assert "create=" not in told["error"]
        (tmp_path / "elsewhere").rename(root)
        assert get(url, "/run", token_of(url))[0] == 200


def test_numbers_that_a_browser_does_not_have_are_sent_as_texts(tmp_path: Path) -> None:
    """JavaScript has no whole numbers above 2^53."""
    numbers = [2**53, 2**53 + 1, 10**18 + 1]
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for number in numbers:
            mgr.save(number, {"count": number}, custom_metadata={"seed": number})
    file = tmp_path / "run.html"
    assert ckpt_command("ui", tmp_path / "run", "--export", file).status == 0
    data = embedded(file)
    assert [each["step"] for each in data["run"]["listing"]["steps"]] == [*map(str, numbers)]
    for text in map(str, numbers):
        summary = data["steps"][text]["summary"]
        assert summary["step"] == text
        assert summary["metadata"] == f'{{"seed":{text}}}'
        assert [each["value"] for each in data["steps"][text]["leaves"]] == [text]


def test_a_port_that_is_taken_is_named(run_root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = ckpt_command("ui", run_root, "--port", port)
    assert ran.status == 2
    assert str(port) in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("options", [(), ("--export", "x.html")])
def test_wrong_paths_are_refused(options: tuple[str, ...], run_root: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "missing", run_root / "10"):
        ran = ckpt_command("ui", path, *options)
        assert ran.status == 2, ran
        assert len(ran.err.splitlines()) == 1
    ran = ckpt_command("ui", run_root, "--export", tmp_path / "no" / "x.html")
    assert ran.status == 2
    assert not os.path.exists("x.html")


def embedded(file: Path) -> Any:
    """Return the data in an exported page."""
    found = re.search('<script type="application/json" id="data">(.*?)</script>', file.read_text())
    assert found is not None
    return json.loads(found[1])


def test_an_export_is_one_file_that_asks_for_nothing(run_root: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    ran = ckpt_command("ui", run_root, "--export", file, "--steps", "2")
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r": 3 steps, the leaves of 2, [1-9]\d*(\.\d+)? KiB\n$", ran.out)
    text = file.read_text()
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    data = embedded(file)
    assert [each["step"] for each in data["run"]["listing"]["steps"]] == ["10", "20", "30"]
    assert sorted(data["steps"]) == ["20", "30"]


def test_names_cannot_leave_the_data_of_an_export(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {evil: 1}, metrics={evil: 1.0}, custom_metadata={evil: evil}, durable=True)
    file = tmp_path / "run.html"
    assert ckpt_command("ui", tmp_path / "run", "--export", file).status == 0
    assert "<script>alert" not in file.read_text()
    assert evil in embedded(file)["run"]["listing"]["steps"][0]["metrics"]


def test_files_are_counted_again_when_the_steps_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live page asks every two seconds, and a root may have many files, on a slow disk."""
    counts = []

    async def counting(*args: Any, **options: Any) -> StorageUsage:
        counts.append(await usage_of(*args, **options))
        return counts[-1]

    monkeypatch.setattr(listed_steps, "usage_of", counting)

    async def main() -> None:
        root = await root_at(str(tmp_path))
        reader = RunReader(root)
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            for step in (1, 2):
                await mgr.save(step, {"w": np.arange(1000)}, durable=True)
                found = [(await reader.run()).listing["stored_bytes"] for _ in range(3)]
                assert len(counts) == step
                assert found == [counts[-1].nbytes] * 3
            # The oldest of many steps goes, and no other comes.
            await mgr.delete(1)
            assert (await reader.run()).listing["stored_bytes"] == counts[-1].nbytes
            assert len(counts) == 3

    asyncio.run(main())
