"""What an answer of S3, or none, means to us. Pure tables and two functions; sources are the S3 API reference ("Error
responses") and botocore's exceptions.
"""

from __future__ import annotations

import ssl

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from cachefs.errors import (
    BadPart,
    CachefsError,
    ConditionConflict,
    ConditionFailed,
    DeniedError,
    InvalidError,
    NoStoreError,
    NoSuchUpload,
    NotFoundError,
    StoreError,
    UnavailableError,
    Unsupported,
)

_UNAVAILABLE = {
    "ExpiredToken": "expired-credentials",
    "ExpiredTokenException": "expired-credentials",
    "TokenRefreshRequired": "expired-credentials",
    "RequestExpired": "expired-credentials",
    "RequestTimeTooSkewed": "clock-skew",
    "RequestTimeout": "timeout",
    "RequestTimeoutException": "timeout",
    "IncompleteBody": "reset",
    "SlowDown": "throttled",
    "SlowDownRead": "throttled",
    "SlowDownWrite": "throttled",
    "Throttling": "throttled",
    "ThrottlingException": "throttled",
    "TooManyRequests": "throttled",
    "TooManyRequestsException": "throttled",
    "RequestLimitExceeded": "throttled",
    "RequestThrottled": "throttled",
    "BandwidthLimitExceeded": "throttled",
    "OperationAborted": "conflict",
}
"""Codes that say nothing about the request itself, whatever their status is, and the reason we give."""

_BAD_PART = frozenset(
    {
        "BadDigest",
        "InvalidDigest",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "InvalidPart",
        "InvalidPartOrder",
        "EntityTooSmall",
        "EntityTooLarge",
    }
)
_DENIED = frozenset({"AuthorizationHeaderMalformed", "InvalidToken", "MissingSecurityHeader"})
_ABSENT = frozenset({"NoSuchKey", "NoSuchVersion"})

_BY_EXCEPTION: tuple[tuple[type[Exception], str], ...] = (
    (boto.ConnectTimeoutError, "timeout"),
    (boto.ReadTimeoutError, "timeout"),
    (boto.EndpointConnectionError, "unreachable"),
    (boto.ProxyConnectionError, "unreachable"),
    (boto.SSLError, "tls"),
    (ResponseParserError, "not-xml"),
    (boto.CredentialRetrievalError, "expired-credentials"),
    (boto.TokenRetrievalError, "expired-credentials"),
    (boto.SSOError, "expired-credentials"),
    (boto.HTTPClientError, "reset"),
    (boto.ConnectionError, "reset"),
    (boto.IncompleteReadError, "reset"),
    (HTTPError, "reset"),
    (ssl.SSLError, "reset"),
)
"""Exceptions without an answer, narrow ones first. The last two come out of the middle of a body: botocore's
StreamingBody translates no more than a timeout and a broken connection.
"""

_CREDENTIALS_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role"


def from_answer(status: int, code: str, message: str, *, operation: str, if_match: bool = False) -> CachefsError:
    """Return the error for an answer with `code` in its body; botocore puts the status there when there is no XML body.

    `operation` is the S3 operation's name, `if_match` whether the request carried If-Match. A 200 with an error body
    arrives here as 500: botocore rewrites it.
    """
    text = f"{operation}: {status} {code}{': ' if message else ''}{message}"
    bodyless = operation.startswith("Head")
    if status == 409:
        return ConditionConflict(text)
    if code in _UNAVAILABLE:
        return UnavailableError(text, reason=_UNAVAILABLE[code], hint=_hint(_UNAVAILABLE[code]))
    if status in (429, 503):
        return UnavailableError(text, reason="throttled")
    if status == 501 or code in ("NotImplemented", "MethodNotAllowed") or (bodyless and status == 405):
        return Unsupported(text)
    if status >= 500:
        return UnavailableError(text, reason="5xx")
    if status == 412:
        return ConditionFailed(text)
    if code == "NoSuchBucket" or (operation == "HeadBucket" and status == 404):
        return NoStoreError(text, hint="check the bucket's name, and the endpoint")
    if code == "NoSuchUpload":
        return NoSuchUpload(text)
    if code in _ABSENT or (bodyless and status == 404):
        return ConditionFailed(text) if if_match else NotFoundError(text)
    if code in _BAD_PART or (code == "InvalidRequest" and operation == "CompleteMultipartUpload"):
        return BadPart(text)  # InvalidRequest there: the size announced is not the parts' sum
    if code == "InvalidObjectState":
        return StoreError(text, hint="the object is in an archive tier: restore it first (RestoreObject)")
    if status in (401, 403) or code in _DENIED:
        return DeniedError(text, hint="check the credentials and the bucket policy")
    if 300 <= status < 400:
        return StoreError(text, hint="the bucket is elsewhere: check the region and the endpoint")
    if not code or code.isdigit():
        # a HEAD has no body that could say more: AWS answers 400 there for expired credentials too
        reason, why = ("no-body", "no reason given") if bodyless else ("not-xml", "the body is not S3's XML")
        return UnavailableError(f"{text} ({why})", reason=reason)
    return StoreError(text)


def not_s3(operation: str, field: str) -> UnavailableError:
    """Return the error for an answer that says success and lacks what every S3 answer has: something else answered."""
    return UnavailableError(f"{operation}: the answer has no {field} (is a proxy answering?)", reason="not-xml")


def from_exception(error: Exception, *, operation: str, if_match: bool = False) -> CachefsError:
    """Return the error for anything that botocore raises, or lets through."""
    if isinstance(error, boto.ClientError):
        answer = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return from_answer(
            status, str(answer.get("Code", "")), str(answer.get("Message", "")), operation=operation, if_match=if_match
        )
    text = f"{operation}: {error}"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound):
        return DeniedError(text, hint=_CREDENTIALS_HINT)
    if isinstance(error, boto.ParamValidationError | boto.InvalidRegionError | boto.NoRegionError):
        return InvalidError(text)
    for kind, reason in _BY_EXCEPTION:
        if isinstance(error, kind):
            return UnavailableError(text, reason=reason, hint=_hint(reason))
    return UnavailableError(text, reason="client")


def _hint(reason: str) -> str:
    match reason:
        case "expired-credentials":
            return "renew the credentials; the request is tried again with the new ones"
        case "clock-skew":
            return "set this machine's clock: the store refuses requests signed 15 minutes off"
        case "unreachable":
            return "check the endpoint and the network"
    return ""
