"""Server-side copies: a new step gets objects of the step before without uploading them.

Every step stays whole by itself, since a copy is an object of its own. Whatever goes wrong, the
caller writes the file instead: a copy saves work, and must not fail a save.

Credentials for copies: the keys that TensorStore uses for the same place, found the same way. A
copy must have the same identity as the writes beside it. So nothing is copied if it is not certain
which keys TensorStore uses, or if obstore would look elsewhere.

Copies by obstore: S3's CopyObject, and the same of Google Cloud Storage. TensorStore, which makes
all other requests, has no copies. obstore is optional. It reads settings from the environment by
itself, so settings that TensorStore would not see there are overruled or refused.
"""

from __future__ import annotations

import configparser
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio

from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import StorageError
from ckpt.storage._object.attempts import ObjectAttempt
from ckpt.storage._object.client import ObjectClient, more_seconds
from ckpt.storage._object.config import GCS, S3, parts_of
from ckpt.storage._object.connection import Connection, credentials_of, key_files
from ckpt.storage._object.errors import RequestFailed, copy_failed, timed_out
from ckpt.storage._store import CopiesObjects, Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

logger = logging.getLogger("ckpt")

# A copy takes two requests, and a write takes one. A smaller object is written as quickly.
SMALLEST_BYTES = 1 << 20
# Size of the largest object that S3 copies in one request.
LARGEST_BYTES = 5 << 30


class NoCopiesError(Exception):
    """Objects cannot be copied here. The text says why, and what to do, without a full stop."""


class MemoryCopier:
    def __init__(self, keys: Store) -> None:
        self._keys = keys

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        found = await self._keys.get(source)
        if found is None:
            return None
        await self._keys.put(target, found.data)
        return len(found.data)


class ServerSideCopies:
    """Copies files of step directories into attempts, as long as the store does so.

    Attributes:
        are_possible: True if objects can be copied, as far as known.
    """

    def __init__(self, keys: Store, open_copier: Callable[[], CopiesObjects] | None) -> None:
        """Copy objects of `keys`.

        Args:
            keys: The objects.
            open_copier: Returns the copier; raises `NoCopiesError`. Called in a thread, once there
                is something to copy. None copies nothing.
        """
        self.are_possible = open_copier is not None
        self._keys = keys
        self._open_copier = open_copier
        self._copier: CopiesObjects | None = None
        self._opening: anyio.Lock | None = None
        # Attempt in which the store last refused a copy; None once a copy was made since.
        self._refused_in: str | None = None

    async def share(
        self, attempt: ObjectAttempt, place: str, files: Mapping[str, int]
    ) -> list[str]:
        """Copy files into an attempt; return the paths of the copied ones.

        Args:
            attempt: The attempt.
            place: The step directory, with its folder that has the files.
            files: Size in bytes of every file, by its path in `place`. Files that are written as
                quickly, or are too large for a copy, are left out.
        """
        worth = {
            path: size for path, size in files.items() if SMALLEST_BYTES <= size <= LARGEST_BYTES
        }
        copier = await self._opened() if worth and not attempt.copies_failed else None
        if copier is None:
            return []
        shared: list[str] = []
        failures: list[StorageError] = []

        async def copy(path: str) -> None:
            # A store that fails would hold up the save at every file.
            if attempt.copies_failed or not self.are_possible:
                return
            try:
                if await self._is_copied(copier, attempt, f"{place}/{path}", path, worth[path]):
                    shared.append(path)
            except StorageError as error:
                # If several copies fail at the same time, the first failure is reported.
                if not attempt.copies_failed:
                    failures.append(error)
                attempt.copies_failed = True

        await for_each(copy, worth)
        if failures:
            self._tell(failures[0], attempt, len(worth) - len(shared), len(worth))
        elif shared:
            self._refused_in = None
        return shared

    async def _is_copied(
        self, copier: CopiesObjects, attempt: ObjectAttempt, source: str, path: str, nbytes: int
    ) -> bool:
        """Copy one file; return True if the attempt has all of it now."""
        target, is_over = attempt.key(path), False
        try:
            found = await copier.copy(source, target, nbytes)
            is_over = True
        except StorageError as error:
            is_over = _is_refusal(error)
            raise
        finally:
            # After a failure or a cancellation, the store may still carry out the copy.
            attempt.abandoned = attempt.abandoned or not is_over
        if found is not None and found != nbytes:
            # The source was cut or changed. The attempt must not hold more than its manifest lists.
            await self._drop(target)
        return found == nbytes

    async def _drop(self, key: str) -> None:
        try:
            await self._keys.delete(key)
        except StorageError as error:
            logger.warning("a copy that is not whole is left at %s: %s", self._keys.location, error)

    async def _opened(self) -> CopiesObjects | None:
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            open_copier = self._open_copier
            if open_copier is not None and self._copier is None and self.are_possible:
                try:
                    self._copier = await run_in_thread(open_copier)
                except NoCopiesError as error:
                    self._stop(str(error))
                except Exception as error:
                    # A broken installation must not fail a save.
                    self._stop(f"they cannot be copied ({type(error).__name__})")
        return self._copier if self.are_possible else None

    def _tell(self, error: StorageError, attempt: ObjectAttempt, count: int, total: int) -> None:
        before = self._refused_in
        if _is_refusal(error):
            self._refused_in = attempt.id
            # A single refusal may come from a session that has expired and will be renewed.
            if before not in (None, attempt.id):
                self._stop(f"{error.message}. Pass server_side_copies=False to stop trying")
                return
        logger.warning(
            "%s: %d of %d unchanged files could not be copied, and are written instead: %s",
            self._keys.location,
            count,
            total,
            error,
        )

    def _stop(self, reason: str) -> None:
        """Copy nothing from now on, and say so once."""
        if self.are_possible:
            self.are_possible = False
            logger.warning(
                "%s: arrays that do not change are uploaded with every step: %s",
                self._keys.location,
                reason,
            )


def _is_refusal(error: StorageError) -> bool:
    return isinstance(error, RequestFailed) and error.is_refusal


Keys = dict[str, Any]

_KEY, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
# Keys may be replaced while the program runs, so they are looked up again.
_KNOWN_FOR = timedelta(minutes=1)
_RELATIVE, _FULL = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"
# Without this file obstore asks the machine, even if there is a full URI.
_FULL_TOKEN = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
_OTHER_SOURCES = {"role_arn", "credential_process", "sso_session", "sso_start_url"}
_WEB_IDENTITY = "AWS_WEB_IDENTITY_TOKEN_FILE"
# Variables that obstore heeds and TensorStore does not know.
_GOOGLE_KEYS = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
)


def s3_keys(given: str) -> Callable[[], Keys] | None:
    """Return a function that looks up the keys of an S3 place; None if obstore does so itself.

    Args:
        given: `S3.credentials`, but not `anonymous`.

    Raises:
        NoCopiesError: obstore cannot have the same keys.
    """
    wanted = credentials_of(given)
    kind = wanted["type"]
    if kind == "environment":
        return partial(_looked_up, _of_environment)
    if kind in ("profile", "default"):
        profile = wanted["profile"]
        section = _section(profile)
        # TensorStore takes the role, even if there are keys beside it.
        if _KEY in section and _SECRET in section and "role_arn" not in section:
            return partial(_looked_up, partial(_of_profile, profile))
        if kind == "profile" or section.keys() & _OTHER_SOURCES:
            raise NoCopiesError(
                f"the profile {profile!r} has no keys of its own, which copies inside the store "
                "need. Use keys in the environment or in the files of Amazon's tools"
            )
    _check_machine(kind)
    return None


def google_token() -> str | None:
    """Return the token of tests if there is one, or None if obstore finds Google's credentials.

    Raises:
        NoCopiesError: obstore would take other credentials than TensorStore.
    """
    token = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    is_given = token or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if os.environ.get("CLOUDSDK_CONFIG") and not is_given:
        raise NoCopiesError(
            "CLOUDSDK_CONFIG is in the environment, and copies inside the store would look for "
            "credentials elsewhere. Use GOOGLE_APPLICATION_CREDENTIALS"
        )
    found = [name for name in _GOOGLE_KEYS if os.environ.get(name)]
    if found and not token:
        raise NoCopiesError(
            f"{found[0]} in the environment is for other programs, and copies inside the store "
            "would use it. Unset it, and use GOOGLE_APPLICATION_CREDENTIALS"
        )
    return token


def _looked_up(look: Callable[[], Mapping[str, str]]) -> Keys:
    found = look()
    return {
        "access_key_id": found.get(_KEY, ""),
        "secret_access_key": found.get(_SECRET, ""),
        "token": found.get(_TOKEN) or None,
        "expires_at": datetime.now(UTC) + _KNOWN_FOR,
    }


def _of_environment() -> Mapping[str, str]:
    return {name: os.environ.get(name.upper(), "") for name in (_KEY, _SECRET, _TOKEN)}


def _of_profile(profile: str) -> Mapping[str, str]:
    try:
        return _section(profile)
    except NoCopiesError:
        # The file is being written. Without keys this copy fails, and the next one looks again.
        return {}


def _section(profile: str) -> dict[str, str]:
    """Return the settings of a profile in the files of Amazon's tools; the file of keys wins."""
    paths = key_files()
    found: dict[str, str] = {}
    in_config = [f"profile {profile}", *(["default"] if profile == "default" else [])]
    for path, names in (
        (paths["config_file"], in_config),
        (paths["credentials_file"], [profile]),
    ):
        parser = configparser.RawConfigParser(default_section="")
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, ValueError) as error:
            raise NoCopiesError(
                f"copies inside the store need the keys in {path}, which cannot be read "
                f"({type(error).__name__})"
            ) from None
        # If `[profile default]` is there, `[default]` is not looked at.
        name = next(filter(parser.has_section, names), None)
        if name is not None:
            found |= dict(parser.items(name))
    return found


def _check_machine(kind: str) -> None:
    """Raise if obstore would look for keys elsewhere than in this machine or container."""
    environment = {name for name, value in os.environ.items() if value}
    is_container = bool(environment & {_RELATIVE, _FULL})
    in_the_way = environment & {_KEY.upper(), _SECRET.upper()}
    if kind != "default":
        in_the_way |= environment & {_WEB_IDENTITY}
    if kind == "imds":
        in_the_way |= environment & {_RELATIVE, _FULL}
    if in_the_way:
        raise NoCopiesError(
            f"{min(in_the_way)} is in the environment, and copies inside the store would use it "
            f"instead of credentials={kind!r}. Unset it"
        )
    if kind == "ecs" and not is_container:
        raise NoCopiesError("this is no container that gives credentials to copies")
    if _FULL in environment and not environment & {_RELATIVE, _FULL_TOKEN, _WEB_IDENTITY}:
        raise NoCopiesError(
            f"copies inside the store need {_FULL_TOKEN} to use the credentials of {_FULL}"
        )
    is_disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if is_disabled and not is_container and _WEB_IDENTITY not in environment:
        raise NoCopiesError(
            "there are no credentials for copies inside the store, and "
            "AWS_EC2_METADATA_DISABLED=true forbids to ask the machine"
        )


_GOOGLE = "https://storage.googleapis.com"
_GOOGLE_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_FIRST_DELAY, _LONGEST_DELAY = timedelta(seconds=0.1), timedelta(seconds=4)
# Settings that obstore takes from the environment and that cannot be overruled: encryption, the
# source of keys, and the server through which requests go.
_UNKNOWN = (
    "SERVER_SIDE_ENCRYPTION",
    "SSE_KMS_KEY_ID",
    "SSE_BUCKET_KEY_ENABLED",
    "SSE_CUSTOMER_KEY_BASE64",
    "METADATA_ENDPOINT",
    "PROXY_URL",
)


class ObstoreCopier:
    """Copies objects of one place in S3 or GCS."""

    def __init__(self, store: Any, keys: ObjectClient) -> None:
        """Copy objects of a store.

        Args:
            store: obstore's store, at the place of `keys`.
            keys: The objects; copies take slots of its requests.
        """
        self._store = store
        self._keys = keys

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        import obstore

        where = self._keys.where(target)
        seconds = self._keys.seconds + more_seconds(nbytes)
        async with self._keys.slot():
            with anyio.move_on_after(seconds):
                try:
                    await obstore.copy_async(self._store, source, target)
                    found = await obstore.head_async(self._store, target)
                    return int(found["size"])
                except FileNotFoundError:
                    return None
                except Exception as error:
                    # The error is not the cause, since it repeats the store's answer.
                    raise copy_failed(where, error) from None
        raise timed_out("copy", where, seconds)


def open_copier(config: S3 | GCS, connection: Connection, keys: ObjectClient) -> ObstoreCopier:
    """Return a copier of objects of a place. It reads the environment, and sends nothing.

    Raises:
        NoCopiesError: obstore is not installed, or cannot have the same settings.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import GCSStore, S3Store
    except ImportError:
        raise NoCopiesError(
            "copies inside the store need obstore, which is not installed. Install "
            "'ckpt-jax[copies]', or pass server_side_copies=False"
        ) from None
    _refuse_unknown("AWS" if isinstance(config, S3) else "GOOGLE")
    bucket, prefix = parts_of(config)
    try:
        if isinstance(config, S3):
            keys_of = None if config.credentials == "anonymous" else s3_keys(config.credentials)
            store: Any = S3Store(
                bucket,
                prefix=prefix or None,
                config=_s3(config, connection),
                client_options=_client(config),
                retry_config=_retries(config),
                # obstore's type does not allow for a missing time.
                credential_provider=cast("Any", keys_of),
            )
        else:
            token = google_token()
            store = GCSStore(
                bucket,
                prefix=prefix or None,
                config={
                    "base_url": connection.endpoint or _GOOGLE,
                    "skip_signature": False,
                    **({} if token is None else {"bearer_token": token}),
                },
                client_options=_client(config),
                retry_config=_retries(config),
            )
    except (BaseError, ValueError) as error:
        # The text of the error may repeat a file of credentials.
        files = f" ({_GOOGLE_FILE})" if os.environ.get(_GOOGLE_FILE) else ""
        raise NoCopiesError(
            f"obstore, which makes copies inside the store, does not accept its settings or "
            f"credentials{files * isinstance(config, GCS)}: {type(error).__name__}. Check them, or "
            "pass server_side_copies=False"
        ) from None
    return ObstoreCopier(store, keys)


def _s3(config: S3, connection: Connection) -> S3Config:
    bucket, endpoint = parts_of(config)[0], connection.endpoint
    if not connection.region:
        raise NoCopiesError(
            "copies inside the store need the region of the bucket. Give it as region= of "
            "ckpt.storage.S3, or in AWS_REGION"
        )
    # As in TensorStore: Amazon gets the bucket in the host name, unless the bucket has dots.
    in_host = not endpoint and "." not in bucket
    host = f"s3.{connection.region}.amazonaws.com"
    return {
        # In the environment, this name has priority over the other one, which would be overruled.
        "aws_endpoint_url_s3": endpoint or f"https://{f'{bucket}.' * in_host}{host}",
        "region": connection.region,
        "virtual_hosted_style_request": in_host,
        "skip_signature": config.credentials == "anonymous",
        "request_payer": False,
        "s3_express": False,
    }


def _client(config: S3 | GCS) -> ClientConfig:
    options: ClientConfig = {
        "allow_http": True,
        "allow_invalid_certificates": False,
        # No limit here: `copy` limits the time of a whole copy.
        "timeout": timedelta(days=1),
    }
    if isinstance(config, GCS) and config.user_project is not None:
        options["default_headers"] = {"x-goog-user-project": config.user_project}
    bundle = os.environ.get("TENSORSTORE_CA_BUNDLE")
    if bundle:
        try:
            with open(bundle, "rb") as file:
                options["root_certificate"] = file.read()
        except OSError as error:
            raise NoCopiesError(f"TENSORSTORE_CA_BUNDLE cannot be read: {error}") from None
    return options


def _retries(config: S3 | GCS) -> RetryConfig:
    return {
        "max_retries": config.retries,
        "retry_timeout": timedelta(seconds=config.request_timeout),
        "backoff": {"init_backoff": _FIRST_DELAY, "max_backoff": _LONGEST_DELAY},
    }


def _refuse_unknown(prefix: str) -> None:
    for name in _UNKNOWN:
        if os.environ.get(f"{prefix}_{name}"):
            raise NoCopiesError(
                f"{prefix}_{name} is in the environment, which copies inside the store would heed "
                "and uploads do not. Unset it"
            )
