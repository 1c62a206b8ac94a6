"""Copies by obstore: S3's CopyObject, and the same of Google Cloud Storage.

TensorStore, which makes all other requests, has no copies. obstore is optional. It reads settings
from the environment by itself, so settings that TensorStore would not see there are overruled or
refused.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio

from ckpt.storage._object.client import ObjectClient, more_seconds
from ckpt.storage._object.config import GCS, S3, parts_of
from ckpt.storage._object.connection import Connection
from ckpt.storage._object.errors import copy_failed, timed_out
from ckpt.storage._object.sharing.copies import NoCopiesError
from ckpt.storage._object.sharing.credentials import google_token, s3_keys

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

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
