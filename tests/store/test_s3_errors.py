"""What each answer of S3 means: the table, and the real client against answers that no emulator gives."""

from __future__ import annotations

import io
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import botocore.exceptions as boto
import pytest
import urllib3
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.parsers import ResponseParserError
from urllib3 import HTTPResponse

from cachefs.errors import (
    BadPart,
    ConditionConflict,
    ConditionFailed,
    CorruptError,
    DeniedError,
    InvalidError,
    NoStoreError,
    NoSuchUpload,
    NotFoundError,
    ProbeError,
    StoreError,
    UnavailableError,
    Unsupported,
)
from cachefs.store.base import CREATE_ONLY, Condition, PartInfo
from cachefs.store.s3 import S3Store
from cachefs.store.s3errors import from_answer, from_exception

SWAP = Condition(if_match='"e"')

TABLE = [
    # status, code, operation, If-Match sent, expected, reason
    (412, "PreconditionFailed", "PutObject", False, ConditionFailed, ""),
    (412, "PreconditionFailed", "CompleteMultipartUpload", True, ConditionFailed, ""),
    (412, "412", "PutObject", True, ConditionFailed, ""),
    (404, "NoSuchKey", "PutObject", True, ConditionFailed, ""),
    (404, "NoSuchKey", "PutObject", False, NotFoundError, ""),
    (404, "NoSuchKey", "GetObject", False, NotFoundError, ""),
    (404, "NoSuchVersion", "GetObject", False, NotFoundError, ""),
    (404, "404", "HeadObject", False, NotFoundError, ""),
    (404, "404", "HeadBucket", False, NoStoreError, ""),
    (404, "404", "GetObject", False, UnavailableError, "not-xml"),
    (404, "NoSuchBucket", "PutObject", True, NoStoreError, ""),
    (404, "NoSuchUpload", "UploadPart", False, NoSuchUpload, ""),
    (404, "NoSuchUpload", "CompleteMultipartUpload", True, NoSuchUpload, ""),
    (409, "ConditionalRequestConflict", "PutObject", False, ConditionConflict, ""),
    (409, "ConditionalRequestConflict", "PutObject", True, ConditionConflict, ""),
    (409, "OperationAborted", "PutObject", True, ConditionConflict, ""),
    (409, "409", "PutObject", True, ConditionConflict, ""),
    (500, "InternalError", "PutObject", False, UnavailableError, "5xx"),
    (500, "500", "GetObject", False, UnavailableError, "5xx"),
    (502, "502", "PutObject", True, UnavailableError, "5xx"),
    (504, "GatewayTimeout", "PutObject", True, UnavailableError, "5xx"),
    (503, "SlowDown", "UploadPart", False, UnavailableError, "throttled"),
    (503, "ServiceUnavailable", "UploadPart", False, UnavailableError, "throttled"),
    (503, "503", "HeadObject", False, UnavailableError, "throttled"),
    (429, "TooManyRequests", "PutObject", False, UnavailableError, "throttled"),
    (400, "RequestTimeout", "PutObject", False, UnavailableError, "timeout"),
    (400, "IncompleteBody", "PutObject", False, UnavailableError, "reset"),
    (400, "ExpiredToken", "PutObject", True, UnavailableError, "expired-credentials"),
    (403, "ExpiredToken", "CompleteMultipartUpload", False, UnavailableError, "expired-credentials"),
    (403, "RequestTimeTooSkewed", "PutObject", False, UnavailableError, "clock-skew"),
    (403, "AccessDenied", "PutObject", True, DeniedError, ""),
    (403, "SignatureDoesNotMatch", "GetObject", False, DeniedError, ""),
    (403, "InvalidAccessKeyId", "GetObject", False, DeniedError, ""),
    (403, "403", "HeadObject", False, DeniedError, ""),
    (401, "Unauthorized", "GetObject", False, DeniedError, ""),
    (400, "InvalidToken", "GetObject", False, DeniedError, ""),
    (403, "InvalidObjectState", "GetObject", False, StoreError, ""),
    (400, "BadDigest", "PutObject", False, BadPart, ""),
    (400, "XAmzContentSHA256Mismatch", "PutObject", False, BadPart, ""),
    (400, "InvalidPart", "CompleteMultipartUpload", False, BadPart, ""),
    (400, "InvalidPartOrder", "CompleteMultipartUpload", False, BadPart, ""),
    (400, "EntityTooSmall", "CompleteMultipartUpload", False, BadPart, ""),
    (400, "InvalidRequest", "CompleteMultipartUpload", False, BadPart, ""),
    (400, "InvalidRequest", "PutObject", False, StoreError, ""),
    (400, "400", "HeadObject", False, UnavailableError, "no-body"),
    (400, "400", "PutObject", False, UnavailableError, "not-xml"),
    (404, "", "GetObject", False, UnavailableError, "not-xml"),
    (501, "NotImplemented", "PutObject", False, Unsupported, ""),
    (501, "501", "PutObject", False, Unsupported, ""),
    (405, "MethodNotAllowed", "GetObject", False, Unsupported, ""),
    (405, "405", "HeadObject", False, Unsupported, ""),
    (301, "PermanentRedirect", "GetObject", False, StoreError, ""),
    (418, "Teapot", "GetObject", False, StoreError, ""),
]


@pytest.mark.parametrize(
    ("status", "code", "operation", "if_match", "expected", "reason"),
    TABLE,
    ids=[f"{row[0]}-{row[1]}-{row[2]}-{row[3]}" for row in TABLE],
)
def test_answers(status, code, operation, if_match, expected, reason):
    error = from_answer(status, code, "message", operation=operation, if_match=if_match)
    assert type(error) is expected
    assert getattr(error, "reason", "") == reason
    assert str(status) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (boto.ConnectTimeoutError(endpoint_url="u"), UnavailableError, "timeout"),
        (boto.ReadTimeoutError(endpoint_url="u"), UnavailableError, "timeout"),
        (boto.EndpointConnectionError(endpoint_url="u"), UnavailableError, "unreachable"),
        (boto.ProxyConnectionError(proxy_url="u"), UnavailableError, "unreachable"),
        (boto.ConnectionClosedError(endpoint_url="u"), UnavailableError, "reset"),
        (boto.HTTPClientError(error="e"), UnavailableError, "reset"),
        (boto.ResponseStreamingError(error="e"), UnavailableError, "reset"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), UnavailableError, "reset"),
        (boto.SSLError(endpoint_url="u", error="e"), UnavailableError, "tls"),
        (urllib3.exceptions.SSLError("e"), UnavailableError, "reset"),
        (ssl.SSLError(1, "e"), UnavailableError, "reset"),
        (ResponseParserError("no xml"), UnavailableError, "not-xml"),
        (boto.CredentialRetrievalError(provider="p", error_msg="m"), UnavailableError, "expired-credentials"),
        (boto.UnauthorizedSSOTokenError(), UnavailableError, "expired-credentials"),
        (boto.BotoCoreError(), UnavailableError, "client"),
        (boto.NoCredentialsError(), DeniedError, ""),
        (boto.PartialCredentialsError(provider="p", cred_var="v"), DeniedError, ""),
        (boto.ProfileNotFound(profile="p"), DeniedError, ""),
        (boto.ParamValidationError(report="r"), InvalidError, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_exceptions_without_an_answer(error, expected, reason):
    found = from_exception(error, operation="PutObject")
    assert type(found) is expected
    assert getattr(found, "reason", "") == reason


class Script(ThreadingHTTPServer):
    """Answers every request with the next scripted answer: (status, headers, body), or None to hang up."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: list[tuple[int, dict[str, str], bytes] | None] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []

    def handle_error(self, request, client_address) -> None:
        """Clients hang up on purpose here."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Script = self.server  # type: ignore[assignment]
        server.requests.append((self.command, self.path, dict(self.headers), body))
        answer = server.answers.pop(0)
        self.close_connection = True
        if answer is None:
            return
        status, headers, content = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def log_message(self, format, *args) -> None:
        """Stay quiet."""


@contextmanager
def scripted() -> Iterator[tuple[Script, S3Store]]:
    with Script() as script:
        thread = threading.Thread(target=script.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        session = boto3.session.Session("key", "secret", region_name="us-east-1")
        try:
            with S3Store(
                "bucket", "p", endpoint_url=f"http://127.0.0.1:{script.server_port}", session=session
            ) as store:
                yield script, store
        finally:
            script.shutdown()
            thread.join()


@pytest.fixture
def wire() -> Iterator[tuple[Script, S3Store]]:
    with scripted() as pair:
        yield pair


WRITTEN = {"ETag": '"e"', "x-amz-version-id": "v1"}
PART = PartInfo(1, '"e"', 4, b"\0" * 32)
ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>m</Message></Error>"


@pytest.mark.parametrize("condition", [CREATE_ONLY, SWAP], ids=["create", "swap"])
@pytest.mark.parametrize("answer", [None, (500, {}, ERROR), (503, {}, b"busy"), (502, {}, b"<html>bad gateway</html>")])
def test_conditional_puts_are_sent_once(wire, condition, answer):
    script, store = wire
    script.answers = [answer]
    with pytest.raises(UnavailableError):
        store.put("p/a", b"body", condition=condition)
    assert len(script.requests) == 1
    headers = script.requests[0][2]
    assert headers.get("If-None-Match") == ("*" if condition is CREATE_ONLY else None)
    assert headers.get("If-Match") == ('"e"' if condition is SWAP else None)


@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_over_https_the_body_is_not_hashed_again(kind):
    sent = []

    def answer(request, **_):
        sent.append(request)
        return AWSResponse(request.url, 200, HeadersDict(WRITTEN), HTTPResponse(io.BytesIO(), preload_content=False))

    session = boto3.session.Session("key", "secret", region_name="us-east-1")
    with S3Store("bucket", "p", endpoint_url="https://store.invalid", session=session) as store:
        store._once.meta.events.register("before-send.s3.PutObject", answer)
        store.put("p/a", kind(b"body"), condition=CREATE_ONLY, sha256=b"\1" * 32)
    [request] = sent
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert headers["x-amz-content-sha256"] in ("UNSIGNED-PAYLOAD", b"UNSIGNED-PAYLOAD")
    assert headers["x-amz-checksum-sha256"] in ("AQEB" * 10 + "AQE=", ("AQEB" * 10 + "AQE=").encode())
    assert headers["content-length"] in ("4", b"4")
    assert not {"transfer-encoding", "content-encoding", "x-amz-trailer"} & headers.keys()


def test_reads_are_tried_again(wire):
    script, store = wire
    script.answers = [None, (200, WRITTEN, b"body")]
    assert store.get("p/a")[1] == b"body"
    assert len(script.requests) == 2


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bodies_are_sent_whole_again_after_a_failure(wire, kind):
    script, store = wire
    script.answers = [(500, {}, ERROR), (200, {"ETag": '"e"'}, b"")]
    assert store.upload_part("p/a", "u", 1, kind(b"body" * 1000), sha256=b"\1" * 32) == '"e"'
    assert [request[3] for request in script.requests] == [b"body" * 1000] * 2
    headers = {name.lower(): value for name, value in script.requests[0][2].items()}
    assert headers["x-amz-checksum-sha256"].startswith("AQEB")
    assert "x-amz-trailer" not in headers
    assert not [name for name in headers if "crc" in name or name == "transfer-encoding"]


@pytest.mark.parametrize(
    "content",
    [ERROR, b"   \n\n" + ERROR, b"<CompleteMultipartUploadResult><ETag>", b"", b"<html>ok</html>"],
    ids=["error", "spaces-error", "truncated", "empty", "html"],
)
def test_a_completion_that_did_not_really_succeed(wire, content):
    script, store = wire
    script.answers = [(200, {"x-amz-version-id": "v1"}, content)]
    with pytest.raises(UnavailableError):
        store.complete_multipart("p/a", "u", [PART], condition=CREATE_ONLY)
    assert len(script.requests) == 1


def test_a_completion_says_what_it_expects(wire):
    script, store = wire
    body = b'<CompleteMultipartUploadResult><ETag>"e-1"</ETag></CompleteMultipartUploadResult>'
    script.answers = [(200, {"x-amz-version-id": "v1"}, body)]
    info = store.complete_multipart("p/a", "u", [PART], condition=CREATE_ONLY)
    assert (info.version_id, info.etag, info.size) == ("v1", '"e-1"', 4)
    headers = {name.lower(): value for name, value in script.requests[0][2].items()}
    assert headers["x-amz-mp-object-size"] == "4"
    assert headers["x-amz-checksum-type"] == "COMPOSITE"
    assert headers["if-none-match"] == "*"


def test_a_delete_in_a_bucket_that_is_not_there_has_deleted_nothing(wire):
    script, store = wire
    script.answers = [
        (404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"),
        (404, {}, b"<Error><Code>NoSuchKey</Code></Error>"),
    ]
    with pytest.raises(NoStoreError):
        store.delete_version("p/a", "v1")
    store.delete_version("p/a", "v1")


@pytest.mark.parametrize("version_id", [None, "", "null"])
def test_a_write_without_a_version_id(wire, version_id):
    script, store = wire
    script.answers = [(200, {"ETag": '"e"'} | ({} if version_id is None else {"x-amz-version-id": version_id}), b"")]
    with pytest.raises(ProbeError, match="versioning"):
        store.put("p/a", b"body", condition=CREATE_ONLY)


@pytest.mark.parametrize(("state", "error"), [("Suspended", ProbeError), ("Enabled", CorruptError)])
def test_an_object_without_a_version_id_is_waited_for_only_while_versions_are_suspended(wire, state, error):
    """With versions again it still has none, and a create-only key is not written twice."""
    script, store = wire
    xml = f"<VersioningConfiguration><Status>{state}</Status></VersioningConfiguration>".encode()
    script.answers = [(200, {"ETag": '"e"', "x-amz-version-id": "null"}, b""), (200, {}, xml)]
    with pytest.raises(error, match="version"):
        store.head("p/a")


PARTIAL = {"ETag": '"e"', "x-amz-version-id": "v1", "Content-Range": "bytes 2-5/100"}


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, WRITTEN, b"cdef"),
        (200, PARTIAL, b"cdef"),
        (206, WRITTEN, b"cdef"),
        (206, PARTIAL | {"Content-Range": "bytes 0-3/100"}, b"cdef"),
        (206, PARTIAL | {"Content-Range": "bytes 2-50/100"}, b"cdef"),
        (206, PARTIAL, b"cde"),
        (206, PARTIAL, b"cdefg"),
        (206, PARTIAL | {"x-amz-version-id": "v2"}, b"cdef"),
    ],
)
def test_only_the_right_range_is_accepted(wire, status, headers, body):
    script, store = wire
    script.answers = [(206, PARTIAL, b"cdef"), (status, headers, body)]
    assert store.get_range("p/a", "v1", 2, 4) == b"cdef"
    assert script.requests[0][2]["Range"] == "bytes=2-5"
    with pytest.raises(CorruptError):
        store.get_range("p/a", "v1", 2, 4)


def test_streams_that_break(wire):
    script, store = wire
    script.answers = [(200, WRITTEN | {"Content-Length": "100"}, b"short")]
    with pytest.raises(UnavailableError) as caught:
        list(store.get_stream("p/a", "v1"))
    assert caught.value.reason == "reset"


@pytest.mark.parametrize("raised", [urllib3.exceptions.SSLError("bad record mac"), ssl.SSLError(1, "bad record mac")])
def test_tls_that_breaks_in_the_middle_of_a_body(wire, monkeypatch, raised):
    def read(*_arguments, **_options):
        raise raised

    script, store = wire
    monkeypatch.setattr(HTTPResponse, "read", read)
    script.answers = [(206, PARTIAL, b"cdef"), (200, WRITTEN, b"body"), (200, WRITTEN, b"body")]
    for act in (
        lambda: store.get_range("p/a", "v1", 2, 4),
        lambda: list(store.get_stream("p/a", "v1")),
        lambda: store.get("p/a", "v1"),
    ):
        with pytest.raises(UnavailableError) as caught:
            act()
        assert caught.value.reason == "reset"


def test_a_page_of_html_is_not_an_absent_object(wire):
    script, store = wire
    script.answers = [(404, {}, b"<html>no such site</html>")]
    with pytest.raises(UnavailableError) as caught:
        store.get("p/a")
    assert caught.value.reason == "not-xml"


def test_another_version_than_the_one_asked_for(wire):
    script, store = wire
    script.answers = [(200, WRITTEN, b"body")] * 3
    with pytest.raises(CorruptError):
        store.get("p/a", "v0")
    with pytest.raises(CorruptError):
        list(store.get_stream("p/a", "v0"))
    with pytest.raises(CorruptError):
        store.head("p/a", "v0")


def test_a_listing_is_whole_or_an_error(wire):
    script, store = wire
    page = b"""<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>
    <Contents><Key>p/a</Key></Contents></ListBucketResult>"""
    script.answers = [(200, {}, page), *[(500, {}, ERROR)] * 5]
    with pytest.raises(UnavailableError):
        store.list("p/")


@pytest.mark.parametrize("content", [b"", b"<html>welcome</html>"], ids=["empty", "html"])
def test_an_empty_answer_is_not_an_empty_listing(wire, content):
    script, store = wire
    script.answers = [(200, {}, content)] * 4
    with pytest.raises(UnavailableError):
        store.list("p/")
    with pytest.raises(UnavailableError):
        list(store.list_versions("p/"))
    with pytest.raises(UnavailableError):
        store.list_multiparts("p/")
    with pytest.raises(UnavailableError):
        store.list_parts("p/a", "u")


def test_deletes_name_a_version(wire):
    script, store = wire
    with pytest.raises(InvalidError):
        store.delete_version("p/a", "")
    with pytest.raises(InvalidError):
        store.probe_delete("p/a")
    assert script.requests == []


def test_no_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with Script() as script, S3Store("bucket", endpoint_url=f"http://127.0.0.1:{script.server_port}") as store:
        with pytest.raises(DeniedError) as caught:
            store.put("a", b"", condition=CREATE_ONLY)
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint
        assert script.requests == []


@pytest.mark.server
def test_an_answer_lost_on_its_way(moto_server):
    """The write landed although the caller saw a reset: reading back is the only way to know."""
    with moto_server.store(moto_server.bucket()) as store:

        def lose(**_):
            raise boto.ConnectionClosedError(endpoint_url="u")

        events = store._once.meta.events
        events.register("before-parse.s3.PutObject", lose)
        with pytest.raises(UnavailableError) as caught:
            store.put("a", b"mine", condition=CREATE_ONLY, metadata={"write-id": "w1"})
        events.unregister("before-parse.s3.PutObject", lose)
        assert caught.value.reason == "reset"
        with pytest.raises(ConditionFailed):
            store.put("a", b"mine", condition=CREATE_ONLY, metadata={"write-id": "w1"})
        assert store.head("a").metadata == {"write-id": "w1"}
        assert len(list(store.list_versions("a"))) == 1


@pytest.mark.server
@pytest.mark.parametrize("name", ["moto", "ministack"])
def test_a_bucket_that_is_not_there(request, name):
    server = request.getfixturevalue(f"{name}_server")
    with server.store("no-such-bucket") as store:
        for act in (
            store.check,
            lambda: store.put("a", b"", condition=CREATE_ONLY),
            lambda: store.put("a", b"", condition=SWAP),
            lambda: store.get("a"),
            lambda: store.list(""),
            lambda: list(store.list_versions("")),
            lambda: store.create_multipart("a"),
            lambda: store.delete_version("a", "v1"),
        ):
            with pytest.raises(NoStoreError):
                act()
