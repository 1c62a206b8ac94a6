"""Copies use the keys that TensorStore uses, or none: for each place and environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage import GCS, S3
from ckpt.storage._object.client import ObjectClient
from ckpt.storage._object.connection import connect
from ckpt.storage._object.errors import copy_failed
from ckpt.storage._object.server_copies import NoCopiesError, google_token, open_copier, s3_keys

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
FULL = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/keys"}
CONTAINER = {**FULL, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "/x"}
TASK = {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/keys"}
IDENTITY = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/x"}
FILES = """
[default]
aws_access_key_id = of-default
aws_secret_access_key = s

[train]
aws_access_key_id = of-train
aws_secret_access_key = s
aws_session_token = t

[role]
role_arn = arn:x
source_profile = train

[role-and-keys]
role_arn = arn:x
source_profile = train
aws_access_key_id = of-role
aws_secret_access_key = s
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets the environment of clouds: nothing but what is given."""

    def put(given: dict[str, str], files: str = "") -> None:
        for name in list(os.environ):
            if name.startswith(("AWS_", "CLOUDSDK_", "GOOGLE_", "TENSORSTORE_")):
                monkeypatch.delenv(name)
        (tmp_path / "credentials").write_text(files)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        for name, value in given.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("credentials", "given", "wanted"),
    [
        ("environment", KEYS, ("a", "b", None)),
        ("environment", {**KEYS, "AWS_SESSION_TOKEN": "c"}, ("a", "b", "c")),
        ("default", KEYS, ("a", "b", None)),
        ("default", {}, ("of-default", "s", None)),
        ("default", {"AWS_PROFILE": "train"}, ("of-train", "s", "t")),
        ("profile:train", KEYS, ("of-train", "s", "t")),
        ("profile:default", {**KEYS, "AWS_PROFILE": "train"}, ("of-default", "s", None)),
    ],
)
def test_keys_are_those_of_the_place(
    environment: Callable[..., None], credentials: str, given: dict[str, str], wanted: Any
) -> None:
    environment(given, FILES)
    keys_of = s3_keys(credentials)
    assert keys_of is not None
    found = keys_of()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == wanted


def test_keys_that_are_replaced_are_seen(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment(KEYS, FILES)
    of_environment, of_profile = s3_keys("environment"), s3_keys("profile:train")
    assert of_environment is not None
    assert of_profile is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "later")
    (tmp_path / "credentials").write_text(FILES.replace("of-train", "later"))
    assert of_environment()["access_key_id"] == of_profile()["access_key_id"] == "later"


def test_the_file_of_keys_has_priority_over_that_of_settings(
    environment: Callable[..., None], tmp_path: Path
) -> None:
    environment({}, "[train]\naws_access_key_id = right\n")
    settings = "[profile train]\naws_access_key_id = wrong\naws_secret_access_key = s\n"
    (tmp_path / "config").write_text(settings)
    keys_of = s3_keys("profile:train")
    assert keys_of is not None
    assert keys_of()["access_key_id"] == "right"


@pytest.mark.parametrize("others", ["", "[default]\naws_access_key_id = wrong\n"])
def test_a_profile_default_in_the_settings_has_priority_over_default(
    environment: Callable[..., None], tmp_path: Path, others: str
) -> None:
    environment({})
    keys = "[profile default]\naws_access_key_id = right\naws_secret_access_key = s\n"
    (tmp_path / "config").write_text(others + keys)
    keys_of = s3_keys("default")
    assert keys_of is not None
    assert keys_of()["access_key_id"] == "right"


@pytest.mark.parametrize(
    ("credentials", "given"),
    [
        ("imds", {}),
        ("ecs", CONTAINER),
        ("ecs", TASK),
        ("ecs", {**TASK, **FULL}),
        ("default", {"AWS_PROFILE": "none"}),
        ("default", {"AWS_PROFILE": "none", **IDENTITY}),
        ("default", {"AWS_PROFILE": "none", **CONTAINER}),
    ],
)
def test_keys_of_the_machine_are_found_by_obstore(
    environment: Callable[..., None], credentials: str, given: dict[str, str]
) -> None:
    environment(given, FILES)
    assert s3_keys(credentials) is None


@pytest.mark.parametrize(
    ("credentials", "given", "named"),
    [
        ("profile:none", KEYS, "'none'"),
        ("profile:role", KEYS, "'role'"),
        # TensorStore takes the role.
        ("profile:role-and-keys", {}, "'role-and-keys'"),
        ("default", {"AWS_PROFILE": "role-and-keys"}, "'role-and-keys'"),
        ("default", {"AWS_PROFILE": "role"}, "'role'"),
        ("default", {"AWS_PROFILE": "none", "AWS_ACCESS_KEY_ID": "a"}, "AWS_ACCESS_KEY_ID"),
        ("imds", KEYS, "AWS_ACCESS_KEY_ID"),
        ("imds", CONTAINER, "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
        ("imds", IDENTITY, "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("imds", {"AWS_EC2_METADATA_DISABLED": "true"}, "AWS_EC2_METADATA_DISABLED"),
        ("ecs", {**CONTAINER, **KEYS}, "AWS_ACCESS_KEY_ID"),
        ("ecs", {**CONTAINER, **IDENTITY}, "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("ecs", {}, "container"),
        ("ecs", FULL, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        ("default", {"AWS_PROFILE": "none", **FULL}, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
    ],
)
def test_nothing_is_copied_where_obstore_would_use_other_keys(
    environment: Callable[..., None], credentials: str, given: dict[str, str], named: str
) -> None:
    environment(given, FILES)
    with pytest.raises(NoCopiesError, match=named):
        s3_keys(credentials)


def test_damaged_files_are_named_and_their_text_is_not_shown(
    environment: Callable[..., None],
) -> None:
    environment({}, "aws_secret_access_key = tellNobody")
    with pytest.raises(NoCopiesError, match="credentials, which cannot be read") as caught:
        s3_keys("profile:train")
    assert "tellNobody" not in str(caught.value)


def opened(config: S3 | GCS) -> Any:
    connection = connect(config)
    keys = ObjectClient(config.url, connection.endpoint, connection.open, 1.0, 1)
    return open_copier(config, connection, keys)._store


@pytest.mark.parametrize(
    ("place", "given", "wanted"),
    [
        ({}, {"AWS_REGION": "eu-west-1"}, "https://bucket.s3.eu-west-1.amazonaws.com"),
        ({"region": "eu-west-2"}, {}, "https://bucket.s3.eu-west-2.amazonaws.com"),
        ({"endpoint": "http://a:1"}, {"AWS_ENDPOINT_URL_S3": "http://b:1"}, "http://a:1"),
        ({}, {"AWS_ENDPOINT_URL": "http://b:1"}, "http://b:1"),
        ({"region": "eu-west-2"}, {"AWS_ENDPOINT": "http://b:1"}, "https://bucket.s3.eu-west-2.am"),
    ],
)
def test_copies_go_where_other_requests_go(
    environment: Callable[..., None], place: dict[str, Any], given: dict[str, str], wanted: str
) -> None:
    pytest.importorskip("obstore")
    environment({**KEYS, **given})
    found = opened(S3("s3://bucket/run", **place))
    assert found.config["endpoint_url_s3"].startswith(wanted)
    assert found.prefix == "run"
    in_host = str("bucket" in wanted).lower()
    assert found.config["virtual_hosted_style_request"] == in_host


@pytest.mark.parametrize(
    ("config", "given", "named"),
    [
        (S3("s3://bucket"), KEYS, "region="),
        (S3("s3://bucket", region="x"), {"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, "AWS_SERVER_S"),
        (S3("s3://bucket", region="x"), {"AWS_PROXY_URL": "http://x"}, "AWS_PROXY_URL"),
        (GCS("gs://bucket"), {"GOOGLE_SERVICE_ACCOUNT": "/x"}, "GOOGLE_SERVICE_ACCOUNT"),
        (GCS("gs://bucket"), {"GOOGLE_BEARER_TOKEN": "x"}, "GOOGLE_BEARER_TOKEN"),
        (GCS("gs://bucket"), {"CLOUDSDK_CONFIG": "/x"}, "CLOUDSDK_CONFIG"),
        (GCS("gs://bucket"), {"GOOGLE_APPLICATION_CREDENTIALS": "/none"}, "GOOGLE_APPLICATION_CRE"),
        (GCS("gs://bucket"), {"TENSORSTORE_CA_BUNDLE": "/none"}, "TENSORSTORE_CA_BUNDLE"),
    ],
)
def test_what_obstore_would_do_otherwise_is_said(
    environment: Callable[..., None], config: S3 | GCS, given: dict[str, str], named: str
) -> None:
    pytest.importorskip("obstore")
    environment(given)
    with pytest.raises(NoCopiesError, match=named):
        opened(config)


def test_credentials_that_obstore_does_not_take_are_not_shown(
    environment: Callable[..., None], tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "file").write_text('"tellNobody"')
    environment({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "file")})
    with pytest.raises(
        NoCopiesError, match="does not accept its settings or credentials"
    ) as caught:
        opened(GCS("gs://bucket"))
    assert "tellNobody" not in str(caught.value)


def test_what_fails_before_a_request_is_told_by_its_kind() -> None:
    assert (
        str(copy_failed("gs://b/x", ValueError("tellNobody"))) == "cannot copy gs://b/x: ValueError"
    )


def test_the_place_of_the_tools_of_google_does_not_matter_with_credentials(
    environment: Callable[..., None],
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_AUTH_TOKEN_FOR_TESTING"):
        environment({"CLOUDSDK_CONFIG": "/x", name: "y"})
        assert google_token() == ("y" if "TOKEN" in name else None)


def test_the_token_of_tests_is_the_token_of_copies(environment: Callable[..., None]) -> None:
    environment({"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x", "GOOGLE_BEARER_TOKEN": "y"})
    assert google_token() == "x"
    environment({})
    assert google_token() is None
