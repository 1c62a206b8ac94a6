"""A bucket of a test, or what stands for one: how it is opened, and looked into from outside."""

from __future__ import annotations

import io
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckpt.storage
from ckpt.storage import open_root
from ckpt.storage._base import Attempt
from ckpt.testing.conformance import StoreCase
from tests.stores import servers
from tests.stores.fault_proxy import FaultProxy
from tests.stores.gcs_fake import GcsFake

__all__ = ["Place", "case_of"]


@dataclass(frozen=True)
class Place:
    """A bucket that is empty when a test begins.

    Attributes:
        kind: `local`, `tensorstore` (local too), `memory`, `gcs`, or the name of a server that
            speaks S3.
        bucket: Its name.
        directory: Where local roots lie.
        port: Of the server itself.
        proxy: The proxy in front of it, which clients talk to; None without a server.
        fake: The fake of GCS; None elsewhere.
    """

    kind: str
    bucket: str
    directory: str
    port: int
    proxy: FaultProxy | None
    fake: GcsFake | None

    @property
    def is_s3(self) -> bool:
        return self.kind not in ("local", "tensorstore", "memory", "gcs")

    @property
    def endpoint(self) -> str:
        assert self.proxy is not None
        return f"http://127.0.0.1:{self.proxy.port}"

    def root(self, name: str = "", **options: Any) -> Any:
        """Return what opens a root of the bucket: a path, a URL or a config object."""
        name = name or uuid.uuid4().hex
        if self.kind == "local":
            return Path(self.directory, name)
        if self.kind == "tensorstore":
            return ckpt.storage.Local(Path(self.directory, name), io="tensorstore")
        if self.kind == "memory":
            return f"memory://{self.bucket}/{name}"
        if self.kind == "gcs":
            return ckpt.storage.GCS(f"gs://{self.bucket}/{name}", **options)
        options = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "credentials": "environment",
            **options,
        }
        return ckpt.storage.S3(f"s3://{self.bucket}/{name}", **options)

    def boto(self) -> Any:
        """Return a client of the S3 server itself, past the proxy."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=servers.KEY,
            aws_secret_access_key=servers.SECRET,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )

    def objects(self) -> dict[str, bytes]:
        """Return every object of the bucket, by key, as another program sees it."""
        if self.fake is not None:
            return {name: each.data for name, each in self.fake.buckets[self.bucket].items()}
        client, found = self.boto(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            for each in page.get("Contents", []):
                answer = client.get_object(Bucket=self.bucket, Key=each["Key"])
                found[each["Key"]] = answer["Body"].read()
        return found

    def put(self, key: str, data: bytes) -> None:
        """Write an object as another program does."""
        if self.fake is not None:
            self.fake.put(self.bucket, key, data)
        else:
            self.boto().upload_fileobj(io.BytesIO(data), self.bucket, key)

    def drop(self, key: str) -> None:
        """Remove an object as another program does."""
        if self.fake is not None:
            del self.fake.buckets[self.bucket][key]
        else:
            self.boto().delete_object(Bucket=self.bucket, Key=key)

    def upload(self, directory: Path, prefix: str) -> None:
        """Copy a local directory below a prefix, as any tool does."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())

    def download(self, prefix: str, target: Path) -> None:
        """Copy every object below a prefix to a local directory, as any tool does."""
        for key, data in self.objects().items():
            if key.startswith(f"{prefix}/"):
                path = target / key.removeprefix(f"{prefix}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def case_of(place: Place) -> StoreCase:
    """Return the bucket as a case of the conformance suite."""

    def fresh() -> Any:
        root = place.root()
        return lambda timeouts: open_root(root, timeouts)

    lease = {"local": 0.5, "tensorstore": 0.5, "memory": 0.4, "seaweed": 2.0}.get(place.kind, 1.2)
    return StoreCase(fresh, _abandon, lease)


def _abandon(attempt: Attempt) -> None:
    """A local attempt is given up by its lock, which goes with the process; others by silence."""
    lease = getattr(attempt, "lease", None)
    if isinstance(lease, int) and lease >= 0:
        os.close(lease)
