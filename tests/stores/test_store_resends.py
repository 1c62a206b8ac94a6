"""A commit that the store has carried out, although its answer says that it cannot have been.

Curl sends a request again by itself when the connection breaks that it had kept. What is told is
the end of the second try: no connection, no TLS. A commit is a commit all the same.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.storage
import ckpt.sync
from ckpt.errors import StorageError
from tests.stores.fault_proxy import Fault, FaultProxy, Seen
from tests.stores.places import Place
from tests.stores.use_store import state

CHILD = Path(__file__).with_name("use_store.py")
STATE: dict[str, Any] = {"w": np.arange(10_000.0), "name": "new"}


def commits_of(step: int) -> Callable[[Seen], bool]:
    def is_one(seen: Seen) -> bool:
        key = seen.query.get("name", seen.path)
        return seen.method in ("PUT", "POST") and key.endswith(f"/{step}/ckpt.json")

    return is_one


def once(is_one: Callable[[Seen], bool], fault: Fault, met: list[Seen]) -> Any:
    """The first of these requests ends with the fault."""

    def plan(seen: Seen) -> Fault | None:
        if met or not is_one(seen):
            return None
        met.append(seen)
        return fault

    return plan


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fault", ["lost", "lost and down", "bare"])
@pytest.mark.parametrize("kind", ["moto", "gcs"])
def test_a_commit_that_was_carried_out_is_one(
    kind: str, fault: Fault, overwrite: bool, make_place: Callable[[str], Place]
) -> None:
    place = make_place(kind)
    assert place.proxy is not None
    root = place.root("run", retries=1, request_timeout=20.0)
    met: list[Seen] = []
    with ckpt.sync.CheckpointManager(root) as mgr:
        if overwrite:
            mgr.save(1, {"w": np.zeros(10), "name": "old"}).result()
        place.proxy.plan = once(commits_of(1), fault, met)
        mgr.save(1, STATE, if_exists="replace" if overwrite else "error").result()
        assert len(met) == 1
        assert mgr.all_steps() == [1]
        assert mgr.restore(1)["name"] == "new"
        assert mgr.verify(1).ok
    # Nothing is left of the old one, nor of the save itself.
    keys = [key.split("/", 1)[1] for key in place.objects()]
    assert [key for key in keys if key.startswith(".ckpt-attempts/")] == []
    assert len([key for key in keys if key.startswith(".ckpt-steps/")]) == 1


def test_the_data_of_a_commit_that_nobody_can_look_up_stay(
    make_place: Callable[[str], Place],
) -> None:
    place = make_place("moto")
    assert place.proxy is not None
    place.proxy.down = 3.0
    met: list[Seen] = []
    try:
        with ckpt.sync.CheckpointManager(place.root("run", retries=0, request_timeout=0.5)) as mgr:
            place.proxy.plan = once(commits_of(1), "lost and down", met)
            with pytest.raises(StorageError, match="it is unknown whether"):
                mgr.save(1, STATE).result()
        place.proxy.wait_until_up()
    finally:
        place.proxy.down = 0.3
    assert len(met) == 1
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        assert mgr.all_steps() == [1]
        assert np.array_equal(mgr.restore(1)["w"], STATE["w"])
        assert mgr.verify(1).ok


def test_a_commit_whose_second_try_finds_no_tls_is_one(
    make_place: Callable[[str], Place], tmp_path: Path
) -> None:
    """In a process of its own, since the certificates to be trusted are read once."""
    place = make_place("moto")
    made = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made)
    refused: list[str] = []
    met: list[Seen] = []

    def greet(*_: object) -> int | None:
        # The first try to connect again after the commit fails.
        if met and met[0].status and not refused:
            refused.append("once")
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        return None

    context.sni_callback = greet
    with FaultProxy(place.port, tls=context) as proxy:
        # Only the connections are dropped, all of them, so that a new one has to be made.
        proxy.down = 0.0
        proxy.plan = once(commits_of(1), "lost and down", met)
        root = ckpt.storage.S3(
            f"s3://{place.bucket}/run",
            endpoint=f"https://127.0.0.1:{proxy.port}",
            region="us-east-1",
            credentials="environment",
        )
        described = json.dumps(["S3", asdict(root)])
        run = subprocess.run(
            [sys.executable, str(CHILD), "saves", described, "1"],
            input="go\n",
            capture_output=True,
            text=True,
            env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "TENSORSTORE_CA_BUNDLE": str(made[0])},
            timeout=120,
        )
    assert run.stdout == "ready\nsaved\n", run.stderr
    assert (len(met), refused) == (1, ["once"])
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        found = mgr.restore(1)
        assert np.array_equal(found["w"], state("child", 1)["w"])
        assert mgr.verify(1).ok


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that signs itself; return its file and that of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
