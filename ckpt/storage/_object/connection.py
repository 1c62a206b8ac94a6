"""Connections: the place in an object store that a user names, as TensorStore opens it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from ckpt.storage._object.config import (
    GCS,
    S3,
    Memory,
    StoreConfig,
    check_endpoint,
    check_region,
    parts_of,
)

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# The files of Amazon's tools: TensorStore's name, the variable that sets the path, the usual path.
_FILES = (
    ("credentials_file", "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("config_file", "AWS_CONFIG_FILE", "~/.aws/config"),
)
# For stores other than Amazon's, which have no regions but still need a name of one.
_ANY_REGION = "us-east-1"
_FIRST_DELAY, _LONGEST_DELAY = "100ms", "4s"


class Connection:
    """A place in an object store, as TensorStore opens it.

    Attributes:
        location: The place, for messages.
        endpoint: The URL of the store; empty for the usual one.
        region: Region of the bucket; empty where the store is asked for it, or has none.
    """

    def __init__(
        self,
        location: str,
        endpoint: str,
        spec: Callable[[int], dict[str, Any]],
        retries: int,
        region: str = "",
    ) -> None:
        """Describe a place.

        Args:
            location: The place.
            endpoint: The URL of the store.
            spec: Returns the specification with a given number of retries.
            retries: Number of retries of requests that are harmless to repeat.
            region: Region of the bucket.
        """
        self.location = location
        self.endpoint = endpoint
        self.region = region
        self._spec = spec
        self._retries = retries
        self._context: ts.Context | None = None

    @classmethod
    def shared(cls, location: str, name: str, prefix: str) -> Connection:
        """Describe a place in the memory of this process."""
        made = cls(location, "", lambda _: {"driver": "memory", "path": prefix}, 0)
        made._context = _memory_of(name)
        return made

    def open(self) -> tuple[ts.KvStore, ts.KvStore]:
        """Return the store twice: one that retries failed requests, and one that does not."""
        return self._opened(self._retries), self._opened(0)

    def _opened(self, retries: int) -> ts.KvStore:
        context = self._context or ts.Context()
        spec = self._spec(retries)
        try:
            return ts.KvStore.open(spec, context=context).result()
        except ValueError as error:
            wanted = spec.get("aws_credentials", {})
            if wanted.get("type") == "profile":
                # TensorStore's error names neither the profile nor the file.
                places = " or ".join(wanted[name] for name, _, _ in _FILES)
                hint = f"there may be no profile {wanted['profile']!r} with keys in {places}"
                error.args = (f"{error}; {hint}",)
            raise


def connect(config: StoreConfig) -> Connection:
    """Return the connection to a place. It reads the environment, and sends nothing.

    Raises:
        InvalidArgumentError: The environment holds an invalid endpoint or region.
    """
    bucket, prefix = parts_of(config)
    path = f"{prefix}/" if prefix else ""
    if isinstance(config, Memory):
        return Connection.shared(config.url, bucket, path)
    if isinstance(config, GCS):
        return Connection(
            config.url,
            os.environ.get("TENSORSTORE_GCS_HTTP_URL", ""),
            functools.partial(_gcs, config, bucket, path),
            config.retries,
        )
    endpoint = config.endpoint or _first_of(_ENDPOINTS)
    if endpoint is not None and config.endpoint is None:
        endpoint = check_endpoint(" or ".join(_ENDPOINTS) + " in the environment", endpoint)
    region = config.region or _first_of(_REGIONS)
    if region is not None and config.region is None:
        region = check_region(" or ".join(_REGIONS) + " in the environment", region)
    region = region or (_ANY_REGION if endpoint else None)
    return Connection(
        config.url,
        endpoint or "",
        functools.partial(_s3, config, bucket, path, endpoint, region),
        config.retries,
        region or "",
    )


def _first_of(names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def _s3(
    config: S3, bucket: str, path: str, endpoint: str | None, region: str | None, retries: int
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": "s3",
        "bucket": bucket,
        "path": path,
        # Without this, TensorStore reads the object first, and then writes without a condition.
        "use_conditional_write": True,
        "aws_credentials": credentials_of(config.credentials),
        "s3_request_concurrency": {"limit": config.concurrency},
        "s3_request_retries": _retries(retries),
    }
    if endpoint is not None:
        spec["endpoint"] = endpoint
    if region is not None:
        spec["aws_region"] = region
    return spec


def credentials_of(given: str) -> dict[str, str]:
    """Return where TensorStore looks for keys. It reads files only for a profile."""
    kind, _, profile = given.partition(":")
    if kind == "profile":
        return {"type": kind, "profile": profile, **key_files()}
    if kind != "default":
        return {"type": kind}
    if all(os.environ.get(name) for name in _KEYS):
        # Keys in the environment have priority anyway, and now TensorStore does not warn about
        # missing files.
        return {"type": "environment"}
    return {"type": kind, "profile": os.environ.get("AWS_PROFILE") or "default"}


def key_files() -> dict[str, str]:
    """Return the paths of the files of Amazon's tools, by TensorStore's names."""
    files = {name: os.environ.get(variable) or usual for name, variable, usual in _FILES}
    return {name: os.path.expanduser(path) for name, path in files.items()}


def _gcs(config: GCS, bucket: str, path: str, retries: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": "gcs",
        "bucket": bucket,
        "path": path,
        "gcs_request_concurrency": {"limit": config.concurrency},
        "gcs_request_retries": _retries(retries),
    }
    if config.user_project is not None:
        spec["gcs_user_project"] = {"project_id": config.user_project}
    return spec


def _retries(count: int) -> dict[str, Any]:
    return {"max_retries": count, "initial_delay": _FIRST_DELAY, "max_delay": _LONGEST_DELAY}


@functools.cache
def _memory_of(name: str) -> ts.Context:
    """Return the memory that all users of this name in this process share."""
    return ts.Context({"memory_key_value_store": {}})
