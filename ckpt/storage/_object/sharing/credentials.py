"""Credentials for copies: the keys that TensorStore uses for the same place, found the same way.

A copy must have the same identity as the writes beside it. So nothing is copied if it is not
certain which keys TensorStore uses, or if obstore would look elsewhere.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from ckpt.storage._object.connection import credentials_of, key_files
from ckpt.storage._object.sharing.copies import NoCopiesError

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
