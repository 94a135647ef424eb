"""An HTTP proxy in front of an S3 server that does harm on request.

    with Proxy(server.endpoint_url) as proxy:           # give clients proxy.url as their endpoint
        lost = proxy.on("UploadPart", lose_answer, skip=2)
        ...
        assert lost.met == 1

What no rule matches passes through unchanged. A rule is an operation, perhaps a key, and an action: a function of the
`Exchange`, which may forward the request, answer it, or cut the connection, in any order. Every request is logged.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

PATIENCE = 60.0
"""Seconds a test waits for a request to arrive, and a held request for its release."""
KEPT = 64 << 10
"""Bodies up to this many bytes stay in the log."""
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}
_BY_QUERY = {
    ("POST", "uploads"): "CreateMultipartUpload",
    ("PUT", "partNumber"): "UploadPart",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "versions"): "ListObjectVersions",
    ("GET", "versioning"): "GetBucketVersioning",
    ("GET", "lifecycle"): "GetBucketLifecycleConfiguration",
    ("GET", "list-type"): "ListObjectsV2",
}
_BY_METHOD = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """One request; `body` is there when it is small. `effect` is what the server answered; None: it has not seen the
    request (yet).
    """

    method: str
    operation: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    size: int
    client: str = ""
    effect: int | None = None
    body: bytes = b""

    @property
    def part(self) -> int:
        """Return the part number, 0 when there is none."""
        return int(self.query.get("partNumber", 0))


class Exchange:
    """A request in the hands of an action."""

    def __init__(self, handler: _Handler, request: Request) -> None:
        self.request = request
        self._handler = handler
        # Of this request: the handler goes on to the next one on its connection.
        self._path, self._headers = handler.path, handler.headers.items()
        self._body = b""

    def receive(self, piece: int = 1 << 30, between: Callable[[], None] = lambda: None) -> None:
        """Take the body from the client, `piece` bytes at a time. Done before an action is called that has no
        `receives`, since nothing can be forwarded or answered earlier.
        """
        pieces: list[bytes] = []
        while (left := self.request.size - sum(map(len, pieces))) > 0:
            pieces.append(self._handler.rfile.read(min(piece, left)))
            if not pieces[-1]:
                raise ConnectionResetError("the client was killed in the middle of its request")
            between()
        self._body = b"".join(pieces)
        self.request.body = self._body if len(self._body) <= KEPT else b""

    def forward(self, *, without: Container[str] = (), change: Callable[[bytes], bytes] = bytes) -> Answer:
        """Let the server have the request, `without` these headers and parameters and with its body changed; return the
        answer. Conditional ones go one at a time: moto checks the condition and writes in two steps, and once in a
        while lets two creates win.
        """
        conditional = self.request.headers.keys() & {"if-match", "if-none-match"}
        with self._handler.server.conditional if conditional else nullcontext():
            answer = self._send(without, change(self._body))
        self.request.effect = answer.status
        return answer

    def _send(self, without: Container[str], body: bytes) -> Answer:
        upstream = urlsplit(self._handler.server.upstream)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=PATIENCE)
        path, _, query = self._path.partition("?")
        query = "&".join(field for field in query.split("&") if field.partition("=")[0] not in without)
        try:
            connection.putrequest(
                self.request.method, f"{path}?{query}".rstrip("?"), skip_host=True, skip_accept_encoding=True
            )
            for name, value in self._headers:
                if name.lower() not in ("connection", "expect") and name.lower() not in without:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), dict(answer.getheaders()))
        finally:
            connection.close()

    def reply(
        self,
        answer: Answer,
        *,
        cut: int | None = None,
        piece: int = 1 << 30,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer the client, `piece` bytes at a time; with `cut` only that many bytes of the body come, and then the
        connection ends.
        """
        handler, length = self._handler, str(len(answer.body))
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() == "content-length" and self.request.method == "HEAD":
                length = value
            elif name.lower() not in _HOP_BY_HOP:
                handler.send_header(name, value)
        handler.send_header("Content-Length", length)
        handler.end_headers()
        if self.request.method != "HEAD":
            body = answer.body[:cut]
            for at in range(0, len(body), piece):
                handler.wfile.write(body[at : at + piece])
                between()
        if cut is not None:
            self.drop()

    def drop(self) -> None:
        """End the connection without a word."""
        self._handler.close_connection = True

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.connection.close()
        self.drop()


Action = Callable[[Exchange], None]


def passed(exchange: Exchange) -> None:
    """Do no harm."""
    exchange.reply(exchange.forward())


def lose_answer(exchange: Exchange) -> None:
    """The server has done it, the client does not learn of it."""
    exchange.forward()
    exchange.drop()


def lose_request(exchange: Exchange) -> None:
    """The server never sees it, the client gets no answer."""
    exchange.drop()


def reset(exchange: Exchange) -> None:
    """The connection is reset before the server sees the request."""
    exchange.reset()


def answered(status: int, body: bytes = b"", **headers: str) -> Action:
    """Answer so instead of the server."""
    return lambda exchange: exchange.reply(Answer(status, body, headers))


def refused(status: int, code: str) -> Action:
    """Answer with an error of S3 instead of the server."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>by request</Message></Error>'
    return answered(status, body.encode(), **{"Content-Type": "application/xml"})


def cut(length: int) -> Action:
    """The answer ends after `length` bytes of its body."""
    return lambda exchange: exchange.reply(exchange.forward(), cut=length)


def altered(change: Callable[[bytes], bytes]) -> Action:
    """The body of the answer is changed."""

    def alter(exchange: Exchange) -> None:
        answer = exchange.forward()
        exchange.reply(Answer(answer.status, change(answer.body), answer.headers))

    return alter


def slow(seconds: float, then: Action = passed) -> Action:
    """The request takes so much longer."""

    def wait(exchange: Exchange) -> None:
        time.sleep(seconds)
        then(exchange)

    return wait


class Hold:
    """Holds requests until `release`, then goes on with `then`: before the server has seen them, or after. With `lost`
    the answer is lost in the end.
    """

    def __init__(self, then: Action = passed, *, after: bool = False, lost: bool = False) -> None:
        self._then = then
        self._after = after
        self._lost = lost
        self._arrived = threading.Event()
        self._released = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        if self._after:
            answer = exchange.forward()
            self._wait()
            exchange.drop() if self._lost else exchange.reply(answer)
        else:
            self._wait()
            self._then(exchange)

    def _wait(self) -> None:
        self._arrived.set()
        self._released.wait(PATIENCE)

    def arrived(self) -> None:
        """Wait until a request is held; with `after` the server has done it then. Fails the test if none comes."""
        assert self._arrived.wait(PATIENCE), "no request to hold came"

    def release(self) -> None:
        """Let all go on."""
        self._released.set()


class Rule:
    """When to act: on requests that match, after the first `skip` of them, at most `times`; see Proxy.on."""

    def __init__(self, matches: Callable[[Request], bool], action: Action, skip: int, times: int | None) -> None:
        self._matches = matches
        self._skip = skip
        self._times = times
        self.action = action
        self.met = 0
        """How many requests it has acted on."""

    def takes(self, request: Request) -> bool:
        """Return whether to act on this one; counts it."""
        if (self._times is not None and self.met >= self._times) or not self._matches(request):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self.met += 1
        return True

    def end(self) -> None:
        """Act no more."""
        self._times = 0


class Proxy:
    """The proxy, serving from threads until the block ends, on an address of this host."""

    def __init__(self, upstream: str, address: str = "127.0.0.1") -> None:
        self._rules: list[Rule] = []
        self._log: list[Request] = []
        self._lock = threading.Lock()
        self._server = _Server(upstream, address, self._act)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Return the endpoint for clients."""
        return f"http://{self._server.server_address[0]}:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self._rules:
            if isinstance(rule.action, Hold):
                rule.action.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on(
        self,
        operation: str,
        action: Action,
        *,
        key: str = "",
        where: Callable[[Request], bool] = lambda request: True,
        skip: int = 0,
        times: int | None = 1,
    ) -> Rule:
        """Add a rule: for an S3 operation ("" for all) on keys in which `key`, a regular expression, is found.

        The newest rule that takes a request acts on it. `times` None is for ever.
        """

        def matches(request: Request) -> bool:
            return operation in ("", request.operation) and bool(re.search(key, request.key)) and where(request)

        rule = Rule(matches, action, skip, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def end(self) -> None:
        """End all rules."""
        for rule in self._rules:
            rule.end()

    def requests(self, operation: str = "", key: str = "") -> list[Request]:
        """Return the requests so far, in order of arrival."""
        with self._lock:
            return [
                request for request in self._log if operation in ("", request.operation) and re.search(key, request.key)
            ]

    def forget(self) -> None:
        """Start a new log."""
        with self._lock:
            self._log.clear()

    def _act(self, exchange: Exchange) -> None:
        # Whoever wants to take the body itself must be found before it has come; all others may look at it.
        action = self._find(exchange.request, receives=True)
        if action is None:
            exchange.receive()
            action = self._find(exchange.request, receives=False) or passed
        action(exchange)

    def _find(self, request: Request, *, receives: bool) -> Action | None:
        with self._lock:
            rules = [rule for rule in reversed(self._rules) if hasattr(rule.action, "receives") == receives]
            action = next((rule.action for rule in rules if rule.takes(request)), None)
            if action is not None or not receives:
                self._log.append(request)
            return action


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, upstream: str, address: str, act: Action) -> None:
        self.upstream = upstream
        self.act = act
        self.conditional = threading.Lock()
        super().__init__((address, 0), _Handler)

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients are killed here."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        try:
            self.server.act(Exchange(self, self._request(int(self.headers.get("Content-Length", 0)))))
        except OSError:  # the client has gone, or the server: both end the connection
            self.close_connection = True

    def _request(self, size: int) -> Request:
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        _, _, key = unquote(split.path).lstrip("/").partition("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        operation = _operation(self.command, key, query)
        return Request(self.command, operation, key, query, headers, size, client=self.client_address[0])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:  # it was reset
            pass

    def log_message(self, *_: object) -> None:
        """Say nothing: the requests are in the proxy's log."""


def _operation(method: str, key: str, query: Iterable[str]) -> str:
    for (verb, name), operation in _BY_QUERY.items():
        if verb == method and name in query:
            return operation
    if not key and method in ("HEAD", "PUT"):
        return "HeadBucket" if method == "HEAD" else "CreateBucket"
    return _BY_METHOD.get(method, method)
