"""Places in object stores as users name them: a URL, and what a URL has no room for.

This module needs neither jax nor tensorstore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import urlsplit

from ckpt._redaction import redact
from ckpt.errors import InvalidArgumentError

__all__ = [
    "GCS",
    "S3",
    "Memory",
    "StoreConfig",
    "check_endpoint",
    "check_region",
    "parent_of",
    "parts_of",
]

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
            those Amazon is asked, and other stores are told `us-east-1`.
        credentials: Where the keys come from: `default` (environment, files, then the machine),
            `environment`, `anonymous`, `imds`, `ecs`, or `profile:NAME` of the AWS files.
        retries: How often a request is repeated that the store could not serve.
        request_timeout: How long one request may take, including repetitions, in seconds.
            Requests with data get a second more for every MiB.
        concurrency: How many requests are in flight at once.
        single_writer: Promise that nobody else writes below `url` at the same time. Then stores
            that ignore the conditions of writes are accepted, too.

    Raises:
        InvalidArgumentError: An attribute is invalid.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    credentials: str = "default"
    retries: int = 5
    request_timeout: float = 60.0
    concurrency: int = 32
    single_writer: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("S3", self.url, "s3"))
        _check_common(self)
        if self.endpoint is not None:
            object.__setattr__(self, "endpoint", check_endpoint("S3(endpoint=...)", self.endpoint))
        if self.region is not None:
            check_region(f"S3(region={_shown(self.region)})", self.region)
        given: object = self.credentials
        if not isinstance(given, str) or (given not in _CREDENTIALS and not _PROFILE.match(given)):
            # Not shown: the user may have given the keys themselves.
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

    Raises:
        InvalidArgumentError: An attribute is invalid.
    """

    url: str
    user_project: str | None = None
    retries: int = 5
    request_timeout: float = 60.0
    concurrency: int = 32
    single_writer: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("GCS", self.url, "gs"))
        _check_common(self)
        project: object = self.user_project
        if project is not None and not (isinstance(project, str) and project):
            raise InvalidArgumentError(
                f"GCS(user_project={_shown(project)}): expected the name of a project"
            )


@dataclass(frozen=True, slots=True)
class Memory:
    """A place in the memory of this process, for tests: it is gone when the process ends.

    Attributes:
        url: `memory://name/prefix`. All users of a name in this process share one store.
        request_timeout: As for `S3`, in seconds.
        concurrency: As for `S3`.

    Raises:
        InvalidArgumentError: An attribute is invalid.
    """

    url: str
    request_timeout: float = 60.0
    concurrency: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url("Memory", self.url, "memory"))
        _check_common(self)


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
        InvalidArgumentError: It is not a URL. The message does not show it: it may hold secrets.
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
        InvalidArgumentError: It is not a region. The message does not show it.
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
        raise InvalidArgumentError(f"{kind}(url={_shown(url)}): expected a URL such as {example}")
    start, mark, rest = url.partition("://")
    if not mark or start.lower() != scheme:
        reason = ""
        if re.match(r"^[A-Za-z0-9+.-]+:/[^/]", url):
            reason = "; a Path drops one of its two slashes: give the string"
        raise InvalidArgumentError(
            f"{kind}(url={_shown(url)}): expected a URL such as {example}{reason}"
        )
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:
        # Not shown: it may hold secrets.
        raise InvalidArgumentError(
            f"{kind}(url=...): expected a URL such as {example}, without user, query or fragment. "
            "Give what does not fit in a URL as ckpt.storage.S3(...) or GCS(...)"
        )
    least = 1 if scheme == "memory" else _SHORTEST_BUCKET
    if not _BUCKET.match(bucket) or ".." in bucket or len(bucket) < least:
        raise InvalidArgumentError(
            f"{kind}(url={_shown(url)}): {bucket!r:.80} cannot be the name of a bucket; expected "
            f"a URL such as {example}"
        )
    prefix = prefix.rstrip("/")
    names = prefix.split("/") if prefix else []
    if any(name in ("", ".", "..") for name in names) or _CONTROL.search(prefix):
        raise InvalidArgumentError(
            f"{kind}(url={_shown(url)}): expected names between single slashes, none of them '.' "
            "or '..', without backslashes and control characters"
        )
    try:
        length = len(prefix.encode())
    except UnicodeEncodeError:
        length = _LONGEST_KEY_BYTES + 1
    if length > _LONGEST_KEY_BYTES:
        raise InvalidArgumentError(
            f"{kind}(url={_shown(url)}): expected a prefix of at most {_LONGEST_KEY_BYTES} bytes "
            "of UTF-8; keys have 1024 at most"
        )
    return f"{scheme}://{bucket}/{prefix}" if prefix else f"{scheme}://{bucket}"


def _check_common(config: StoreConfig) -> None:
    kind = type(config).__name__
    _check_number(kind, "request_timeout", config.request_timeout, _LONGEST_SECONDS)
    _check_count(kind, "concurrency", config.concurrency, 1, _MOST_AT_ONCE)
    if isinstance(config, Memory):
        return
    _check_count(kind, "retries", config.retries, 0, _MOST_RETRIES)
    if type(config.single_writer) is not bool:
        raise InvalidArgumentError(
            f"{kind}(single_writer={_shown(config.single_writer)}): expected True or False"
        )


def _check_number(kind: str, name: str, value: object, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise InvalidArgumentError(
            f"{kind}({name}={_shown(value)}): expected a number of seconds above 0 and up to "
            f"{most:.0f}"
        )


def _check_count(kind: str, name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgumentError(
            f"{kind}({name}={_shown(value)}): expected a whole number from {least} to {most}"
        )


def _shown(value: object) -> str:
    # Redacted before it is cut: a part of a secret is not recognized.
    return redact(repr(value))[:120]
