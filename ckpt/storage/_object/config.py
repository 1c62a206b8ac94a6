"""Places in object stores as users name them: a URL, and settings that a URL cannot hold.

This module needs neither jax nor tensorstore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import urlsplit

from ckpt._arguments import invalid, number_of_seconds, shown, true_or_false, whole_number
from ckpt.errors import InvalidArgumentError

_BUCKET = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,220}[A-Za-z0-9])?\Z")
_SHORTEST_BUCKET = 3
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_CREDENTIALS = ("default", "environment", "anonymous", "imds", "ecs")
_PROFILE = re.compile(r"^profile:[^\x00-\x1f:]{1,200}\Z")
_REGION = re.compile(r"^[a-z0-9-]{1,60}\Z")
_LONGEST_KEY_BYTES = 700
_LONGEST_SECONDS = 86400.0
_MOST_RETRIES = 100
_MOST_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class S3:
    """A place in Amazon S3, or in a store that speaks its protocol.

    Attributes:
        url: `s3://bucket/prefix`.
        endpoint: URL of the store if it is not Amazon's, such as `http://127.0.0.1:9000`. None
            takes `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` of the environment, if one is set.
        region: Region of the bucket. None takes `AWS_REGION` or `AWS_DEFAULT_REGION`; without
            those Amazon is asked, and other stores get `us-east-1`.
        credentials: Where the keys come from: `default` (environment, files, then the machine),
            `environment`, `anonymous`, `imds`, `ecs`, or `profile:NAME` of the AWS files.
        retries: Number of repetitions of a request that the store could not serve.
        request_timeout: Time limit of one request, including repetitions, in seconds.
            Requests with data get a second more for every MiB.
        concurrency: Number of requests in flight at once.
        single_writer: Promise that no other program writes below `url` meanwhile. Then stores
            that ignore the conditions of writes are accepted, too.
        server_side_copies: True copies objects of arrays that are the same as in the step before
            inside the store, instead of uploading them again; needs `ckpt-jax[copies]`. False
            uploads every step in full.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        place = ckpt.storage.S3("s3://bucket/run", endpoint="http://127.0.0.1:9000")
        mgr = ckpt.CheckpointManager(place)
        ```
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    credentials: str = "default"
    retries: int = 5
    request_timeout: float = 60.0
    concurrency: int = 32
    single_writer: bool = False
    server_side_copies: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("S3", self.url, "s3"))
        _check_requests(self)
        _check_writes(self)
        if self.endpoint is not None:
            object.__setattr__(self, "endpoint", check_endpoint("S3(endpoint=...)", self.endpoint))
        if self.region is not None:
            check_region(f"S3(region={shown(self.region)})", self.region)
        given: object = self.credentials
        if not isinstance(given, str) or (given not in _CREDENTIALS and not _PROFILE.match(given)):
            # The value is not shown: users may pass the keys themselves.
            raise InvalidArgumentError(
                "S3(credentials=...): expected where the keys come from, one of "
                f"{', '.join(_CREDENTIALS)} or 'profile:NAME'; the keys themselves are never given "
                "here"
            )


@dataclass(frozen=True, slots=True)
class GCS:
    """A place in Google Cloud Storage.

    Credentials are Google's application default ones.

    Attributes:
        url: `gs://bucket/prefix`.
        user_project: Project that pays for the requests, if the bucket demands one.
        retries: As for `S3`.
        request_timeout: As for `S3`, in seconds.
        concurrency: As for `S3`.
        single_writer: As for `S3`.
        server_side_copies: As for `S3`.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        place = ckpt.storage.GCS("gs://bucket/run", user_project="research")
        mgr = ckpt.CheckpointManager(place)
        ```
    """

    url: str
    user_project: str | None = None
    retries: int = 5
    request_timeout: float = 60.0
    concurrency: int = 32
    single_writer: bool = False
    server_side_copies: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("GCS", self.url, "gs"))
        _check_requests(self)
        _check_writes(self)
        project: object = self.user_project
        if project is not None and not (isinstance(project, str) and project):
            raise invalid("user_project", project, "the name of a project", of="GCS")


@dataclass(frozen=True, slots=True)
class Memory:
    """A place in the memory of this process, for tests: it is gone when the process ends.

    Attributes:
        url: `memory://name/prefix`. All users of a name in this process share one store.
        request_timeout: As for `S3`, in seconds.
        concurrency: As for `S3`.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        async with ckpt.CheckpointManager(ckpt.storage.Memory("memory://tests/run")) as mgr:
            await mgr.save(step, state)
        ```
    """

    url: str
    request_timeout: float = 60.0
    concurrency: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("Memory", self.url, "memory"))
        _check_requests(self)


StoreConfig: TypeAlias = S3 | GCS | Memory


def parts_of(config: StoreConfig) -> tuple[str, str]:
    """Return the bucket and the prefix of a place, without slashes around the prefix."""
    bucket, _, prefix = config.url.partition("://")[2].partition("/")
    return bucket, prefix


def parent_of(config: StoreConfig) -> tuple[StoreConfig, str]:
    """Return the place that contains `config`, and the last name of `config`.

    Raises:
        InvalidArgumentError: `config` is a bucket.
    """
    parent, _, name = config.url.rpartition("/")
    if not parts_of(config)[1]:
        raise InvalidArgumentError(
            f"path={config.url!r:.300}: expected a checkpoint in a bucket, such as "
            f"'{config.url}/run/final', not a bucket"
        )
    return replace(config, url=parent), name


def check_endpoint(what: str, endpoint: object) -> str:
    """Return the URL of an endpoint without a slash at its end.

    Raises:
        InvalidArgumentError: `endpoint` is not a URL. The message does not show it: it may hold
            secrets.
    """
    if isinstance(endpoint, str) and not _CONTROL.search(endpoint):
        try:
            parts = urlsplit(endpoint)
            port_is_right = parts.port is None or parts.port > 0
        except ValueError:
            port_is_right = False
        if (
            port_is_right
            and parts.scheme in ("http", "https")
            and parts.hostname
            and "@" not in parts.netloc
            and not parts.query
            and not parts.fragment
        ):
            return endpoint.rstrip("/")
    raise InvalidArgumentError(
        f"{what}: expected the URL of a store, such as 'https://storage.example.com' or "
        "'http://127.0.0.1:9000', without user, query or fragment"
    )


def check_region(what: str, region: object) -> str:
    """Return the name of a region.

    Raises:
        InvalidArgumentError: `region` is not a region. The message does not show it.
    """
    if isinstance(region, str) and _REGION.match(region):
        return region
    raise InvalidArgumentError(
        f"{what}: expected the name of a region, such as 'eu-west-1': small letters, digits and -"
    )


def _checked_url(kind: str, url: object, scheme: str) -> str:
    """Return a valid URL without slashes at its end."""
    example = f"'{scheme}://{'name' if scheme == 'memory' else 'bucket'}/runs/a'"
    if not isinstance(url, str):
        raise invalid("url", url, f"a URL such as {example}", of=kind)
    start, mark, rest = url.partition("://")
    if not mark or start.lower() != scheme:
        reason = ""
        if re.match(r"^[A-Za-z0-9+.-]+:/[^/]", url):
            reason = "; a Path drops one of its two slashes: pass the string"
        raise invalid("url", url, f"a URL such as {example}{reason}", of=kind)
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:
        # The URL is not shown: it may contain a secret.
        raise InvalidArgumentError(
            f"{kind}(url=...): expected a URL such as {example}, without user, query or fragment. "
            "Give what does not fit in a URL as ckpt.storage.S3(...) or GCS(...)"
        )
    least = 1 if scheme == "memory" else _SHORTEST_BUCKET
    if not _BUCKET.match(bucket) or ".." in bucket or len(bucket) < least:
        raise InvalidArgumentError(
            f"{kind}(url={shown(url)}): {bucket!r:.80} cannot be the name of a bucket; expected "
            f"a URL such as {example}"
        )
    prefix = prefix.rstrip("/")
    names = prefix.split("/") if prefix else []
    if any(name in ("", ".", "..") for name in names) or _CONTROL.search(prefix):
        what = "names between single slashes, without '.', '..', backslashes, control characters"
        raise invalid("url", url, what, of=kind)
    try:
        length = len(prefix.encode())
    except UnicodeEncodeError:
        length = _LONGEST_KEY_BYTES + 1
    if length > _LONGEST_KEY_BYTES:
        what = f"a prefix of at most {_LONGEST_KEY_BYTES} bytes of UTF-8, since keys have 1024"
        raise invalid("url", url, what, of=kind)
    return f"{scheme}://{bucket}/{prefix}" if prefix else f"{scheme}://{bucket}"


def _check_requests(config: StoreConfig) -> None:
    kind = type(config).__name__
    number_of_seconds("request_timeout", config.request_timeout, of=kind, most=_LONGEST_SECONDS)
    concurrency = whole_number("concurrency", config.concurrency, of=kind, most=_MOST_AT_ONCE)
    object.__setattr__(config, "concurrency", concurrency)


def _check_writes(config: S3 | GCS) -> None:
    kind = type(config).__name__
    retries = whole_number("retries", config.retries, of=kind, least=0, most=_MOST_RETRIES)
    object.__setattr__(config, "retries", retries)
    true_or_false("single_writer", config.single_writer, of=kind)
    true_or_false("server_side_copies", config.server_side_copies, of=kind)
