"""What is surely a secret is taken out of text, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import _redaction as redaction
from ckpt._format.manifest_head import digest
from ckpt._redaction import redact

KEY_ID = "AKIAIOSFODNN7EXAMPLE"
KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"

FOUND = {
    # Users and passwords of URLs.
    "https://me:hunter2@host/run": "https://***@host/run",
    "s3://me:p@ss:word@bucket/run": "s3://***@bucket/run",
    "https://ghp@github.com/x.git": "https://***@github.com/x.git",
    "postgres://me:a/b?c@host:5432/db": "postgres://***@host:5432/db",
    "'gs://me:hunter2@bucket/x'": "'gs://***@bucket/x'",
    "s3:/me:hunter2@bucket/run": "s3:/***@bucket/run",
    r'{"url":"https:\/\/me:hunter2@host\/x"}': r'{"url":"https:\/\/***@host\/x"}',
    "file://me:hunter2@host/x": "file://***@host/x",
    "cut at https://me:hunt": "cut at https://***",
    "ab://b:1/x cd://d:e@f/y": "ab://b:1/x cd://***@f/y",
    "redis+tls://:hunter2@host": "redis+tls://***@host",
    # Signed URLs.
    "https://h/k?X-Amz-Date=1&X-Amz-Signature=0f5e&X-Amz-Expires=60": (
        "https://h/k?X-Amz-Date=1&X-Amz-Signature=***&X-Amz-Expires=60"
    ),
    "https://h/k?x-amz-security-token=FwoG%2FZXI": "https://h/k?x-amz-security-token=***",
    "https://h/k?X-Goog-Credential=me%40p&X-Goog-Signature=0f": (
        "https://h/k?X-Goog-Credential=***&X-Goog-Signature=***"
    ),
    "https://h/k?GoogleAccessId=me&Expires=1&Signature=a%2Fb%3D": (
        "https://h/k?GoogleAccessId=***&Expires=1&Signature=***"
    ),
    "https://h/c/b?sv=2024&sig=a%2Fb+c=&se=2026": "https://h/c/b?sv=2024&sig=***&se=2026",
    "https://h/k?a=1&amp;token=abc&amp;b=2": "https://h/k?a=1&amp;token=***&amp;b=2",
    r"https://h/k?a=1\u0026access_token=abc\u0026b=2": (
        r"https://h/k?a=1\u0026access_token=***\u0026b=2"
    ),
    "http://h/?next=%3Ftoken%3Dabc%26b%3D2": "http://h/?next=%3Ftoken%3D***%26b%3D2",
    "https://h/#access_token=abc&state=1": "https://h/#access_token=***&state=1",
    "https://h/?key=abc": "https://h/?key=***",
    # Headers.
    "Authorization: Bearer abc.def": "Authorization: Bearer ***",
    "authorization: Basic bWU6cHc=": "authorization: Basic ***",
    "{'Authorization': 'Bearer abc'}": "{'Authorization': 'Bearer ***'}",
    "Proxy-Authorization=abc": "Proxy-Authorization=***",
    "sent 'Bearer ya99abcdefgh' to it": "sent 'Bearer ***' to it",
    "X-Auth-Token: abc": "X-Auth-Token: ***",
    "x-api-key: abc, accept: *": "x-api-key: ***, accept: *",
    "Cookie: a=b; c=d\nx": "Cookie: ***\nx",
    f"Authorization: AWS4-HMAC-SHA256 Credential={KEY_ID}/2026/s3, Signature=0f5e": (
        "Authorization: *** Credential=***, Signature=***"
    ),
    # Configurations.
    "AccountName=me;AccountKey=a/b+c==;EndpointSuffix=x": (
        "AccountName=me;AccountKey=***;EndpointSuffix=x"
    ),
    f"aws_secret_access_key = {KEY}": "aws_secret_access_key = ***",
    '{"password": "two words", "b": 1}': '{"password": "***", "b": 1}',
    "connect(user='me', password='hunter2')": "connect(user='me', password='***')",
    # Shapes.
    f"{KEY_ID}:{KEY}": "***",
    f"('{KEY_ID}', '{KEY}')": "('***')",
    f"the key {KEY_ID} is unknown": "the key *** is unknown",
    f"got {JWT}": "got ***",
    "ghp_" + "a1" * 18: "***",
    "hf_" + "Ab" * 17: "***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx": "***\nx",
}

KEPT = [
    "",
    "cannot read /data/run@2/5/state/d/" + digest(b"x") + ": No such file or directory",
    "file:///data/run@2/x and file:/data/a@b",
    "s3://bucket/run@v2/5 and https://host:8080/a@b and http://[::1]:80/a@b",
    "step 5, item 'token', leaf 'params.secret': chunk 0 of 2 is not what was saved",
    "  layers.token: not stored, wanted float32[8] (is it 'layers.password'?)",
    "Bearer authentication is required, or a token",
    "the key 'w' has no key=..., adapt=ckpt.Adapt(rename={'a': 'b'})",
    "see https://host: it says why; path='https://host/x?step=5&attempt=ab12'",
    "PartitionSpec('data',) TPU_0(process=0,(0,0,0,0)) float32[4, 8]",
    "user@host:/data and git@github.com:me/x.git",
]


@pytest.mark.parametrize("text", FOUND)
def test_a_secret_is_taken_out(text: str) -> None:
    assert redact(text) == FOUND[text]
    # Also in the middle of other text, and in a literal.
    assert redact(f"cannot open {text}") == f"cannot open {FOUND[text]}"


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": KEY,
    "HF_TOKEN": "abcdefgh",
    "DB_PASSWORD": 'it\'s "two"\nlines/ö',
    "WANDB_API_KEY": digest(b"w"),
    "MYSQL_PWD": "correct horse",
    "GIT_CREDENTIALS": "me:pw-1234",
    "client_secret": "lower-case",
}
PLAIN = {
    "PWD": "/data/run",
    "HF_TOKEN_PATH": "/data/token",
    "TOKENIZERS_PARALLELISM": "disabled",
    "GOOGLE_APPLICATION_CREDENTIALS": "/data/key.json",
    "SSH_AUTH_SOCK": "/tmp/ssh/agent",
    "SSL_CERT_FILE": "/etc/ssl/cert",
    "SHORT_TOKEN": "1234567",
    "KEYBOARD": "us-layout",
}


def test_values_of_the_environment_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **PLAIN}.items():
        monkeypatch.setenv(name, value)
    for value in SECRETS.values():
        assert redact(f"<{value}>") == "<***>"
        assert redact(f"<{value!r}>") in ("<'***'>", '<"***">')
    assert redact("it%27s%20%22two%22%0Alines/%C3%B6") == "***"
    assert redact('{"a": "it\'s \\"two\\"\\nlines/\\u00f6"}') == '{"a": "***"}'
    for value in PLAIN.values():
        assert redact(value) == value


def test_the_longest_value_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert redact("abcdefgh-and-more") == "***"


PIECES = st.sampled_from(
    [*FOUND, "://", ":/", "@", "?", "&", "sig=", "token=", "'", '"', "\\", ":", "%", "\n", " "]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=12).map("".join))
def test_any_text_is_taken(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(alphabet="abcdefgh 0123456789./-_[](),'", max_size=200))
def test_plain_text_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    ["a", " ", "a:/", "a:a@", "?sig=", "password=", "bearer ", "x-a-", "a.", "token", "eyJ",
     "-----BEGIN PRIVATE KEY-----", "AKIA", "authorization: ", "'", "%3F", "\\", "&amp;key="],
)  # fmt: skip
def test_long_text_takes_no_endless_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    assert len(redact(text)) <= len(text)
    assert len(redact(f"https://{text}")) <= len(text) + 20


def test_it_needs_nothing_of_the_package() -> None:
    file = Path(redaction.__file__)
    assert "ckpt" not in file.read_text()
    script = f"import runpy; print(runpy.run_path({str(file)!r})['redact']('ab://c:d@e'))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "ab://***@e\n"
