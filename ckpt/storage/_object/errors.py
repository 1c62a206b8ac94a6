"""Errors of object stores: what TensorStore raises, translated to plain words and advice.

TensorStore raises `ValueError` with a status code in its text, which may repeat the store's answer.
obstore, which copies objects, does the same with exceptions of its own.
"""

from __future__ import annotations

import errno
import re
from typing import Any, NamedTuple

from ckpt._redaction import redact
from ckpt.errors import StorageError

_STATUS = re.compile(r"^([A-Z_]{5,}): ?")
_HTTP = re.compile(
    r"(?:http_response_code='|status_code=|HTTP response code: |HTTP/1.1 | status code: )(\d{3})"
)
_DETAILS = re.compile(r" \[(?:source locations|http_response_|request_id|[a-z_]+=).*", re.DOTALL)
# The text of obstore: the request, its outcome, and the outcome again for programmers.
_TOLD = re.compile(r" - (Server returned .*?|HTTP error: .*?)\n\nDebug source:", re.DOTALL)
_LONGEST_REASON = 300


class _FailureKind(NamedTuple):
    """A kind of failure: its error number, the advice, and what is certain about the request.

    After a refusal, certainly nothing was done, and a retry would not help. After a request in
    vain, certainly nothing was done, and a retry may help. If the store is busy, retries are
    worthwhile as long as there is time. A request that was not sent has not reached any store.

    All this is true of the last time that the request was sent. Curl may have sent it before over a
    connection that broke, and then it may have been done.
    """

    number: int | None
    advice: str
    is_refusal: bool
    is_vain: bool = False
    is_busy: bool = False
    was_sent: bool = True


_NO_BUCKET = _FailureKind(
    errno.ENOENT,
    "The bucket does not exist. Make it first, or check its name, the endpoint and the region",
    True,
)
_NO_ACCESS = _FailureKind(
    errno.EACCES,
    "The credentials are wrong or missing, or do not allow this. See "
    "docs/how-to/object-stores.md for where they come from and what they have to allow; a root "
    "that may only be read is opened with mode='r'",
    True,
)
_BUSY = _FailureKind(
    errno.EBUSY,
    "The store asks for fewer requests. Lower concurrency=, or raise retries= of "
    "ckpt.storage.S3 or GCS",
    False,
)
# The store says that it did nothing this time.
_TURNED_AWAY = _BUSY._replace(is_vain=True, is_busy=True)
_IN_THE_WAY = _TURNED_AWAY._replace(
    advice="Something else was being done to the same object; try again"
)
_ELSEWHERE = _FailureKind(
    errno.EREMOTE,
    "The bucket has another region or endpoint. Give the right ones as region= or endpoint= "
    "of ckpt.storage.S3, or in AWS_REGION or AWS_ENDPOINT_URL_S3",
    True,
)
_EXPIRED = _FailureKind(
    errno.EACCES,
    "The session of the credentials has expired or never existed. Log in again, or use credentials "
    "that renew themselves",
    True,
)
_NO_ANSWER = _FailureKind(
    errno.EHOSTUNREACH,
    "The store does not answer. Check that the endpoint is right and can be reached from here",
    False,
)
_NO_CONNECTION = _NO_ANSWER._replace(is_vain=True, was_sent=False)
_NO_SUCH_HOST = _NO_ANSWER._replace(is_refusal=True, was_sent=False)
_NO_TLS = _FailureKind(
    errno.EPROTO,
    "No TLS connection to the endpoint is possible. Check whether it begins with http:// or "
    "https://, and its certificate",
    True,
    was_sent=False,
)
_NO_S3 = _FailureKind(
    errno.EPROTO,
    "The server does not speak S3. Check that the endpoint is the address of the store, not of its "
    "web page, and does not end with the bucket",
    True,
)
_NO_PATHS = _FailureKind(
    errno.ENOTSUP,
    "The store takes the name of the bucket only in the host name (virtual-hosted addressing), and "
    "with endpoint= it is in the path here. Use an endpoint of the store that accepts that, or "
    "another store; see docs/how-to/object-stores.md",
    True,
)
_NO_CREDENTIALS = _NO_ACCESS._replace(
    advice="No credentials were found. Set them, or choose another source with credentials= of "
    "ckpt.storage.S3; see docs/how-to/object-stores.md"
)
_NO_CONDITIONS = _FailureKind(
    errno.ENOTSUP,
    "The store does not support conditional writes (If-None-Match, If-Match), which every commit "
    "needs. Update it, use another one, or check that the endpoint is the address of a store",
    True,
)
_NOT_TAKEN = _FailureKind(errno.EINVAL, "The store does not accept the request", True)
_OTHER = _FailureKind(errno.EIO, "The store failed", False)
_GARBLED = _OTHER._replace(is_vain=True, is_busy=True)
_ELSEWHERE_CODES = re.compile(
    "AuthorizationHeaderMalformed|PermanentRedirect|TemporaryRedirect|IllegalLocationConstraint"
)
_EXPIRED_CODES = re.compile("ExpiredToken|InvalidToken|TokenRefreshRequired")
# Codes of Alibaba, Tencent and Volcengine; S3 itself has no code for it.
_NO_PATHS_CODES = re.compile(
    "SecondLevelDomainForbidden|PathStyleDomainForbidden|InvalidPathAccess"
)
# Status 400, but a retry may succeed: the request was garbled on its way.
_GARBLED_CODES = re.compile("RequestTimeout|IncompleteBody|BadDigest|ContentSHA256Mismatch")
_MAYBE_DONE = (408, 412, 425)


class RequestFailed(StorageError):
    """One request to a store failed.

    Attributes:
        status: TensorStore's status, such as `OUT_OF_RANGE`; empty if there is none.
        is_refusal: True if the store certainly did nothing, and a retry would not help.
        is_vain: True if the store certainly did nothing, and a retry may help.
        is_busy: True if the store itself has said that it did nothing.
        is_under_way: True if the request has not ended, so that its outcome is unknown.
        was_sent: True if a store may have received the last try.
        is_only: True if the request was certainly tried only once. Otherwise the fields above
            describe the last try, and nothing is certain if that try was not sent.
    """

    def __init__(
        self, message: str, status: str, kind: _FailureKind, *, is_under_way: bool, is_only: bool
    ) -> None:
        super().__init__(message, errno=kind.number)
        self.status = status
        self.is_refusal = kind.is_refusal and (kind.was_sent or is_only)
        self.is_vain = kind.is_vain and (kind.was_sent or is_only)
        self.is_busy = kind.is_busy
        self.is_under_way = is_under_way
        self.was_sent = kind.was_sent
        self.is_only = is_only

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as the class that callers can catch in other processes.
        known = {name: getattr(self, name) for name in ("errno", "step", "item", "leaf")}
        return StorageError, (self.message,), known

    def final(self) -> RequestFailed:
        """Return this error as a refusal: certainly nothing was done, and no retry follows."""
        self.is_refusal = True
        return self

    def unknown(self) -> StorageError:
        """Return the error for a request with an unknown outcome."""
        return StorageError(
            f"{self.message}. It is unknown whether it was written",
            errno=self.errno,
        )


# Tracebacks name the class that a caller can catch.
RequestFailed.__module__, RequestFailed.__qualname__ = StorageError.__module__, "StorageError"


def timed_out(what: str, where: str, seconds: float) -> RequestFailed:
    return RequestFailed(
        f"cannot {what} {where}: no answer within {seconds:.0f} s. Check that the endpoint is "
        "right and can be reached from here, or raise request_timeout=",
        "DEADLINE_EXCEEDED",
        _FailureKind(errno.ETIMEDOUT, "", is_refusal=False),
        is_under_way=True,
        is_only=False,
    )


def refused(what: str, where: str, error: Exception, *, is_only: bool = True) -> RequestFailed:
    """Return the error of a request that failed in TensorStore.

    Args:
        what: The operation, for the message.
        where: The object, for the message.
        error: The error that TensorStore raised.
        is_only: True if curl had no older connection over which it could have sent the request
            before.
    """
    # Redacted in the cause, too, which tracebacks show: the store's answer may repeat the request.
    text = redact(str(error))
    error.args = (text,)
    found = _STATUS.match(text)
    status = found[1] if found else ""
    reason = _DETAILS.sub("", text[found.end() :] if found else text).strip()
    reason = " ".join(reason.split())[:_LONGEST_REASON]
    kind = _kind(status, text)
    return RequestFailed(
        f"cannot {what} {where}: {reason.rstrip('.') or status}. {kind.advice}",
        status,
        kind,
        is_under_way=False,
        is_only=is_only,
    )


def copy_failed(where: str, error: Exception) -> RequestFailed:
    """Return the error of a copy inside the store that failed in obstore; it gives no advice."""
    text = str(error)
    told = _TOLD.search(text)
    text = redact(told[1] if told else text)
    # An error without an answer may repeat a credential, so only its type is shown.
    reason = " ".join((text if told else type(error).__name__).split())[:_LONGEST_REASON]
    return RequestFailed(
        f"cannot copy {where}: {reason.rstrip('.')}",
        "",
        _kind("", text),
        is_under_way=False,
        is_only=False,
    )


def _kind(status: str, text: str) -> _FailureKind:
    http = _HTTP.search(text)
    code = int(http[1]) if http else 0
    if "Failed to get credentials" in text or "Failed to create credentials" in text:
        return _NO_CREDENTIALS
    if _EXPIRED_CODES.search(text):
        return _EXPIRED
    if _NO_PATHS_CODES.search(text):
        return _NO_PATHS
    if code in (301, 302, 307, 308) or _ELSEWHERE_CODES.search(text):
        return _ELSEWHERE
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED") or code in (401, 403):
        return _NO_ACCESS
    if "etag not found" in text or "Malformed List response" in text:
        return _NO_S3
    if "NoSuchBucket" in text or (status == "NOT_FOUND" and code in (0, 404)):
        return _NO_BUCKET
    if code == 501 or "NotImplemented" in text:
        return _NO_CONDITIONS
    if code == 409:
        return _IN_THE_WAY
    if code == 429 or "SlowDown" in text:
        return _TURNED_AWAY
    if code == 503:
        return _BUSY
    if code == 400 and _GARBLED_CODES.search(text):
        return _GARBLED
    if 300 <= code < 500 and code not in _MAYBE_DONE:
        return _NOT_TAKEN
    return _kind_without_answer(status, text)


def _kind_without_answer(status: str, text: str) -> _FailureKind:
    if "SSL connect error" in text or "SSL peer certificate" in text:
        return _NO_TLS
    if "resolve host" in text:
        return _NO_SUCH_HOST
    if "Could not connect" in text:
        return _NO_CONNECTION
    if "CURL" in text or status == "UNAVAILABLE":
        return _NO_ANSWER
    if status in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        return _NOT_TAKEN
    return _OTHER
