"""An S3 endpoint that throws bytes away, so that the client's own cost shows. `python -m integration.bench.sink PORT`

Understands just enough of the protocol for cachefs (versions, conditions, ranges of small objects) and for rclone:
bodies above KEEP bytes are counted and dropped: ranges of them read as zeros.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import sys
import threading
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

KEEP = 1 << 20
_XML = '<?xml version="1.0" encoding="UTF-8"?>'


class Part(NamedTuple):
    """One part of an upload; small ones keep their bytes."""

    size: int
    body: bytes | None
    checksum: str


class Store:
    """What is remembered: for each key its versions as (version id, ETag, size, body or None, headers)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.versions: dict[str, list[tuple[str, str, int, bytes | None, dict[str, str]]]] = {}
        self.uploads: dict[str, tuple[dict[str, str], dict[int, Part]]] = {}
        self.serial = 0

    def number(self) -> str:
        self.serial += 1
        return f"{self.serial:08d}"


def answer(store: Store, method: str, target: str, headers: dict[str, str], size: int, body: bytes | None) -> bytes:
    """Carry a request out; return the raw response."""
    path, _, query = target.partition("?")
    key, asked = unquote(path), parse_qs(query, keep_blank_values=True)
    with store.lock:
        if method == "PUT" and "partNumber" in asked:
            part = Part(size, body, headers.get("x-amz-checksum-sha256", ""))
            store.uploads[asked["uploadId"][0]][1][int(asked["partNumber"][0])] = part
            return response(200, {"ETag": f'"p{size}"'})
        if method == "PUT":
            return put(store, key, headers, size, body)
        if method == "POST" and "uploads" in asked:
            upload = store.number()
            store.uploads[upload] = (headers, {})
            return response(200, {}, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>", "Initiate")
        if method == "POST" and "uploadId" in asked:
            done = complete(store, key, headers, asked["uploadId"][0])
            return done if b" 200 " not in done[:20] else multipart(done)
        if method in ("GET", "HEAD"):
            return get(store, method, key, asked, headers)
        if method == "DELETE":
            return delete(store, key, asked)
    return response(501, {})


def complete(store: Store, key: str, headers: dict[str, str], upload: str) -> bytes:
    """Make a version of the parts of an upload, with their composite checksum."""
    begun, numbered = store.uploads[upload]
    parts = [part for _, part in sorted(numbered.items())]
    bodies = [part.body for part in parts]
    whole = b"".join(bodies) if None not in bodies else None  # type: ignore[arg-type]
    conditions = {name: value for name, value in headers.items() if name.startswith("if-")}
    digest = hashlib.sha256(b"".join(base64.b64decode(part.checksum) for part in parts)).digest()
    checksum = f"{base64.b64encode(digest).decode()}-{len(parts)}"
    wanted = {**begun, **conditions, "x-amz-checksum-sha256": checksum}
    return put(store, key, wanted, sum(part.size for part in parts), whole)


def multipart(done: bytes) -> bytes:
    """Give the answer to a completed upload its body."""
    head = dict(re.findall(r"(ETag|x-amz-version-id): (\S+)", done.decode()))
    tag = head["ETag"].replace('"', "&quot;")
    return response(200, head, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag>", "Complete")


def put(store: Store, key: str, headers: dict[str, str], size: int, body: bytes | None) -> bytes:
    """Store a version unless the condition forbids it."""
    known = store.versions.setdefault(key, [])
    known_now = known and known[-1][1]
    if "if-none-match" in headers and known_now:
        return response(412, {}, "<Error><Code>PreconditionFailed</Code>", "Error")
    if "if-match" in headers and known_now != headers["if-match"]:
        return response(412, {}, "<Error><Code>PreconditionFailed</Code>", "Error")
    tag = f'"{hashlib.md5(body).hexdigest() if body is not None else store.number()}"'
    version = store.number()
    kept = ("x-amz-meta-", "x-amz-checksum-sha256")
    meta = {name: value for name, value in headers.items() if name.startswith(kept)}
    known.append((version, tag, size, body, meta))
    return response(200, {"ETag": tag, "x-amz-version-id": version})


def delete(store: Store, key: str, asked: dict[str, list[str]]) -> bytes:
    """Abort an upload, delete a version, or put a delete marker (an entry without a tag) on the key."""
    known = store.versions.setdefault(key, [])
    if "uploadId" in asked:
        store.uploads.pop(asked["uploadId"][0], None)
    elif "versionId" in asked:
        store.versions[key] = [one for one in known if one[0] != asked["versionId"][0]]
    else:
        known.append((store.number(), "", 0, None, {}))
    return response(204, {})


def get(store: Store, method: str, key: str, asked: dict[str, list[str]], headers: dict[str, str]) -> bytes:
    """Answer a read, or one of the listings a client may ask for (always empty)."""
    if "versioning" in asked:
        return response(200, {}, "<VersioningConfiguration><Status>Enabled</Status>", "Versioning")
    if "versions" in asked:
        return response(200, {}, listing(store, key.strip("/"), asked["prefix"][0]), "List")
    if key.count("/") < 2 or key.endswith("/"):
        return response(200, {}, "<ListBucketResult><IsTruncated>false</IsTruncated>", "List")
    wanted = asked.get("versionId", [""])[0]
    found = [one for one in store.versions.get(key, []) if wanted in ("", one[0])]
    if not found or not found[-1][1]:
        return response(404, {}, "<Error><Code>NoSuchKey</Code>", "Error")
    version, tag, size, body, meta = found[-1]
    about = {"ETag": tag, "x-amz-version-id": version, "Last-Modified": "Sun, 29 Nov 2026 00:00:00 GMT", **meta}
    if method == "HEAD":
        return response(200, {**about, "Content-Length": str(size)})
    ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
    if ranged is None:
        return response(200, about, raw=body or b"")
    first, last = int(ranged[1]), min(int(ranged[2]), size - 1)
    about["Content-Range"] = f"bytes {first}-{last}/{size}"
    return response(206, about, raw=bytes(last + 1 - first) if body is None else body[first : last + 1])


def listing(store: Store, bucket: str, prefix: str) -> str:
    """Return the versions under a prefix."""
    entries = [
        f"<Key>{key.removeprefix(f'/{bucket}/')}</Key><VersionId>{version}</VersionId><IsLatest>false</IsLatest>"
        "<LastModified>2026-11-29T00:00:00Z</LastModified>"
        + (f"<ETag>{tag.replace(chr(34), '&quot;')}</ETag><Size>{size}</Size>" if tag else "")
        for key, versions in store.versions.items()
        if key.startswith(f"/{bucket}/{prefix}")
        for version, tag, size, _, _ in versions
    ]
    tagged = "".join(
        f"<{kind}>{e}</{kind}>" for e in entries for kind in ["Version" if "ETag" in e else "DeleteMarker"]
    )
    return f"<ListVersionsResult><IsTruncated>false</IsTruncated>{tagged}"


def response(status: int, headers: dict[str, str], xml: str = "", close: str = "", raw: bytes = b"") -> bytes:
    """Build a response; `xml` is closed by its own root tag."""
    if xml:
        root = re.match(r"<(\w+)", xml)[1]  # type: ignore[index]
        raw = f"{_XML}{xml}</{root}>".encode()
        headers = {**headers, "Content-Type": "application/xml"}
    lines = [f"HTTP/1.1 {status} {close or 'Answer'}", *(f"{name}: {value}" for name, value in headers.items())]
    if "Content-Length" not in headers:
        lines.append(f"Content-Length: {len(raw)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + raw


def serve(store: Store, connection: socket.socket) -> None:
    """Answer the requests of one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer, scratch = b"", memoryview(bytearray(1 << 20))
    while True:
        while b"\r\n\r\n" not in buffer:
            data = connection.recv(65536)
            if not data:
                return
            buffer += data
        head, buffer = buffer.split(b"\r\n\r\n", 1)
        first, *rest = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, value in (line.split(":", 1) for line in rest)}
        size = int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        kept: list[bytes] | None = [] if size <= KEEP else None
        left = size
        while left:
            if buffer:
                piece, buffer = buffer[:left], buffer[left:]
            else:
                count = connection.recv_into(scratch, min(left, len(scratch)))
                if not count:
                    return
                piece = bytes(scratch[:count]) if kept is not None else b""
                left -= 0 if kept is not None else count
            if kept is not None:
                kept.append(piece)
                left -= len(piece)
            elif piece:
                left -= len(piece)
        connection.sendall(answer(store, method, target, headers, size, None if kept is None else b"".join(kept)))


def main(port: int) -> None:
    """Serve until killed."""
    store = Store()
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(store, connection), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
