"""Redaction: secrets are removed from text that people will see, such as errors, logs and notes.

Paths and URLs of stores hold passwords, signatures and tokens, stores repeat them in their answers,
and messages end up in tickets and on screens. Text is removed only if it is certainly a secret;
text that merely looks random, such as a digest, stays.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from urllib.parse import quote

_HIDDEN = "***"

# `://`, `:/` (a URL that was made a Path) or `:\/\/` (within JSON), and the text up to a space.
_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{1,30}:(?:\\{0,2}/){1,2})([^\s'\"<>`]*)"
)
_AFTER_AUTHORITY = re.compile(r"[/?#\\]")

# Names of parameters whose values are secret, or give access together with others.
_PARAMETERS = (
    r"[\w.-]{0,40}(?:signature|credential|token|secret|passw(?:or)?d|passphrase|api[_-]?key"
    r"|access[_-]?key|access[_-]?key[_-]?id|account[_-]?key|private[_-]?key|accessid)"
)
# Parameters of a query. Some of these names are too common to mean a secret elsewhere.
_QUERY = re.compile(
    rf"((?:[?&;#]|&amp;|\\u0026|%26|%3[fF])(?:{_PARAMETERS}|sig|sas|key|auth|code|pass|pwd"
    r"|key-pair-id|policy)(?:=|%3[dD]))((?:(?!&|%26|\\u0026)[^\s'\"<>#;])+)",
    re.IGNORECASE,
)
# `name=value`, `name = "value"`, `"name": "value"` in connection strings and configurations.
_ASSIGNED = re.compile(
    rf"((?<![\w.-]){_PARAMETERS}(?:['\"]\s*:\s*(?=['\"])|['\"]?\s*=\s*))"
    r"(\"[^\"\n]*\"|'[^'\n]*'|(?:(?!\\u0026)[^\s'\",;&<>])+)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"((?<![\w-])(?:(?:proxy-)?authorization|x-[\w-]{0,40}(?:token|key|secret|signature)"
    r"|ocp-apim-subscription-key)['\"]?\s*[:=]\s*['\"]?)"
    r"(?:(basic|bearer|digest|negotiate|token|apikey|sharedkey)\s+)?([^\s'\",;&]+)",
    re.IGNORECASE,
)
_COOKIES = re.compile(
    r"((?<![\w-])(?:set-)?cookie['\"]?\s*:\s*['\"]?)([^\s'\"][^\r\n'\"]*)", re.IGNORECASE
)
_BEARER = re.compile(r"(\bbearer\s+)(?=\S*[\d._~+/=-]\S|\S{20})([\w.~+/=-]{8,})", re.IGNORECASE)
# Formats that services chose so that leaked secrets can be found.
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)"
    # An access key of AWS, with its secret where that follows.
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b(?:['\"]?[\s:,/=|]{1,4}['\"]?[A-Za-z0-9/+=]{16,})?"
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abposr]-|npm_|pypi-)[\w-]{20,}"
    r"|\bAIza[\w-]{35}|\bya29\.[\w.-]{20,}|\b1//0[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|PASS|APIKEY|CREDENTIALS?|SIGNATURE|AUTH|PAT|SAS)"
    r"(?:_|$)|_PWD$|_KEY$|^KEY$|(?:ACCESS|SECRET|PRIVATE|API)_?KEY",
    re.IGNORECASE,
)
# Names of variables that say where a secret is stored, or something public about it.
_NO_SECRET_NAME = re.compile(
    r"_(?:FILE|PATH|DIR|HOME|SOCK|URL|URI|NAME|TYPE|EXPIRATION)$|PUBLIC|^GOOGLE_APPLICATION",
    re.IGNORECASE,
)
# Shorter values would be found in the middle of words.
_LEAST_LENGTH = 8


def redact(text: str) -> str:
    """Return `text` with `***` in place of every secret that can be recognized.

    Replaced are the user and password of URLs, the values of parameters that hold signatures,
    tokens, keys or passwords, the values of `Authorization` and similar headers, keys and tokens of
    a known format, and the values of environment variables with names of secrets. A value that was
    cut short may not be recognized, so redact before you cut.

    Example:
        ```python
        assert redact("https://me:pw@host/run?sig=abc") == "https://***@host/run?sig=***"
        ```
    """
    for secret in _environment():
        text = text.replace(secret, _HIDDEN)
    text = _SHAPES.sub(_HIDDEN, text)
    text = _URL.sub(_without_user, text)
    text = _QUERY.sub(_hide_second, text)
    text = _HEADER.sub(_hide_header, text)
    text = _COOKIES.sub(_hide_second, text)
    text = _BEARER.sub(_hide_second, text)
    return _ASSIGNED.sub(_hide_assigned, text)


def _environment() -> list[str]:
    """Return the secret values of the environment in all spellings, the longest first."""
    found: set[str] = set()
    for name, value in os.environ.items():
        if (
            len(value) >= _LEAST_LENGTH
            and _SECRET_NAME.search(name)
            and not _NO_SECRET_NAME.search(name)
        ):
            found.update(_spellings(value))
    return sorted(found, key=len, reverse=True)


def _spellings(value: str) -> Iterator[str]:
    """Yield a value as it is written in plain text, in literals, in JSON and in URLs."""
    yield value
    yield repr(value)[1:-1]
    yield json.dumps(value)[1:-1]
    data = value.encode(errors="surrogateescape")
    yield quote(data)
    yield quote(data, safe="")


def _without_user(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    if scheme.lower() == "file:/":
        # A path follows, in which an @ is just a character.
        return match[0]
    authority = _AFTER_AUTHORITY.split(rest, 1)[0]
    if "@" in authority:
        return f"{scheme}{_HIDDEN}{rest[authority.rindex('@') :]}"
    host, _, port = authority.partition(":")
    port = port.rstrip(".,;:!?)]}")
    if host.startswith("[") or not port or port.isdigit():
        return match[0]
    # This is no port, so it is a password, which holds a slash or was cut short.
    end = rest.find("@", len(authority))
    return f"{scheme}{_HIDDEN}{rest[end if end >= 0 else len(authority) :]}"


def _hide_second(match: re.Match[str]) -> str:
    return f"{match[1]}{_HIDDEN}"


def _hide_header(match: re.Match[str]) -> str:
    kind = f"{match[2]} " if match[2] else ""
    return f"{match[1]}{kind}{_HIDDEN}"


def _hide_assigned(match: re.Match[str]) -> str:
    quoted = match[2][0] if match[2][0] in "'\"" else ""
    return f"{match[1]}{quoted}{_HIDDEN}{quoted}"
