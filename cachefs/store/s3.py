"""S3 and stores like it, through boto3. Nothing else in cachefs knows boto3.

Three clients differ in retries and patience: conditional requests are sent exactly once, because a retry would turn our
own success into a 412; a completion too, but it may take minutes (S3 API reference, CompleteMultipartUpload);
everything else is idempotent and has botocore's standard retries. Checksums are our own SHA-256 header, never
botocore's trailers, which many stores refuse; over https the payload is then not hashed again for the signature.
Keys given to the methods are whole keys, with the store's prefix.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from cachefs.errors import (
    CorruptError,
    InvalidError,
    NoSuchUpload,
    NotFoundError,
    ProbeError,
    StoreError,
    Unsupported,
)
from cachefs.store.base import (
    STREAM_CHUNK,
    Buffer,
    Condition,
    ExpiryRule,
    Listing,
    ObjectInfo,
    PartInfo,
    UploadInfo,
    VersionInfo,
)
from cachefs.store.listing import is_probe_key
from cachefs.store.s3answers import checksum, completed, condition_headers, expiry_rules, field, part_info, version_info
from cachefs.store.s3body import as_body
from cachefs.store.s3errors import from_exception

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 60.0
COMPLETE_TIMEOUT = 300.0
"""Seconds without a byte from the store."""


class S3Store:
    """One bucket. `connections` is the size of each client's pool: the most threads that send at once.

    Credentials, profile and region come from boto3's usual places. `session` is a boto3 Session, for tests.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        connections: int = 16,
        session: Any = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        with _translated("CreateClient"):
            client = _client_maker(session or boto3.session.Session(), endpoint_url, region, connections)
            self._bulk = client({"mode": "standard"}, READ_TIMEOUT)
            self._once = client({"mode": "standard", "total_max_attempts": 1}, READ_TIMEOUT)
            self._patient = client({"mode": "standard", "total_max_attempts": 1}, COMPLETE_TIMEOUT)

    def close(self) -> None:
        """Close the connections."""
        for client in (self._bulk, self._once, self._patient):
            client.close()

    def __enter__(self) -> S3Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def prefix(self) -> str:
        return self._prefix

    def check(self) -> None:
        with _translated("HeadBucket"):
            self._bulk.head_bucket(Bucket=self._bucket)

    def prepare(self) -> None:
        self.check()

    def versioning(self) -> bool:
        with _translated("GetBucketVersioning"):
            return bool(self._bulk.get_bucket_versioning(Bucket=self._bucket).get("Status") == "Enabled")

    def expiry_rules(self) -> list[ExpiryRule]:
        try:
            with _translated("GetBucketLifecycleConfiguration"):
                answer = self._bulk.get_bucket_lifecycle_configuration(Bucket=self._bucket)
        except StoreError as error:
            if _code(error) == "NoSuchLifecycleConfiguration":
                return []
            raise
        return expiry_rules(answer)

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        condition: Condition | None,
        sha256: bytes | None = None,
        metadata: Mapping[str, str] = {},
    ) -> ObjectInfo:
        client = self._bulk if condition is None else self._once
        extra = {} if sha256 is None else {"ChecksumSHA256": b64encode(sha256).decode()}
        with _translated("PutObject", condition):
            answer = client.put_object(
                **self._at(key), Body=as_body(body), Metadata=dict(metadata), **extra, **condition_headers(condition)
            )
        return self._written(key, answer, len(body), metadata)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] = {}) -> str:
        with _translated("CreateMultipartUpload"):
            answer = self._bulk.create_multipart_upload(
                **self._at(key), Metadata=dict(metadata), ChecksumAlgorithm="SHA256", ChecksumType="COMPOSITE"
            )
        return field(answer, "UploadId", "CreateMultipartUpload")

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer, *, sha256: bytes) -> str:
        with _translated("UploadPart"):
            answer = self._bulk.upload_part(
                **self._at(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=as_body(body),
                ChecksumSHA256=b64encode(sha256).decode(),
            )
        return field(answer, "ETag", "UploadPart")

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        pages = self._pages("ListParts", "list_parts", Key=key, UploadId=upload_id)
        return [part_info(part) for page in pages for part in page.get("Parts", [])]

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartInfo], *, condition: Condition | None
    ) -> ObjectInfo:
        """See ObjectStore. The answer does not carry the metadata given at the start: `metadata` is empty."""
        size = sum(part.size for part in parts)
        checked = {"ChecksumType": "COMPOSITE"} if all(part.sha256 for part in parts) else {}
        with _translated("CompleteMultipartUpload", condition):
            answer = self._patient.complete_multipart_upload(
                **self._at(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": [completed(given) for given in parts]},
                MpuObjectSize=size,
                **checked,
                **condition_headers(condition),
            )
        return self._written(key, answer, size, {})

    def abort_multipart(self, key: str, upload_id: str) -> None:
        try:
            with _translated("AbortMultipartUpload"):
                self._bulk.abort_multipart_upload(**self._at(key), UploadId=upload_id)
        except NoSuchUpload:
            pass

    def list_multiparts(self, prefix: str) -> list[UploadInfo]:
        return [
            UploadInfo(upload["Key"], upload["UploadId"], upload["Initiated"].timestamp())
            for page in self._pages("ListMultipartUploads", "list_multipart_uploads", Prefix=prefix)
            for upload in page.get("Uploads", [])
        ]

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        """See ObjectStore. A missing bucket looks like a missing key here: HEAD has no body (`check` can tell)."""
        try:
            with _translated("HeadObject"):
                answer = self._bulk.head_object(**self._at(key, version_id), ChecksumMode="ENABLED")
        except (NotFoundError, Unsupported):  # 405: the version is a delete marker
            return None
        return self._read(key, version_id, answer)

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        try:
            with self._opened(key, version_id) as answer:
                info = self._read(key, version_id, answer)
                body = answer["Body"].read()
        except NotFoundError:
            return None
        if len(body) != info.size:
            raise CorruptError(f"{key}: {len(body)} bytes came, {info.size} were announced")
        return info, body

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        with self._opened(key, version_id) as answer:
            left = self._read(key, version_id, answer).size
            while left:
                chunk = answer["Body"].read(min(STREAM_CHUNK, left))
                if not chunk:
                    raise CorruptError(f"{key} ended {left} bytes early")
                left -= len(chunk)
                yield chunk

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        wanted = f"bytes {offset}-{offset + length - 1}/"
        with self._opened(key, version_id, Range=f"bytes={offset}-{offset + length - 1}") as answer:
            self._read(key, version_id, answer)
            status, given = answer["ResponseMetadata"]["HTTPStatusCode"], str(answer.get("ContentRange", ""))
            if status != 206 or not given.startswith(wanted) or answer["ContentLength"] != length:
                raise CorruptError(f"{key}: asked for {wanted}, the answer is {status} {given or 'without a range'}")
            body: bytes = answer["Body"].read()
        if len(body) != length:
            raise CorruptError(f"{key}: {len(body)} bytes came, {length} were announced")
        return body

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        pages = tuple(self._pages("ListObjectsV2", "list_objects_v2", Prefix=prefix, Delimiter=delimiter))
        keys = sorted(entry["Key"] for page in pages for entry in page.get("Contents", []))
        prefixes = sorted(entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", []))
        return Listing(tuple(keys), tuple(prefixes))

    def list_versions(self, prefix: str) -> Iterator[VersionInfo]:
        for page in self._pages("ListObjectVersions", "list_object_versions", Prefix=prefix):
            yield from (version_info(entry, False) for entry in page.get("Versions", []))
            yield from (version_info(entry, True) for entry in page.get("DeleteMarkers", []))

    def delete_version(self, key: str, version_id: str) -> None:
        if not version_id:
            raise InvalidError(f"delete of {key} without a version id")
        try:
            with _translated("DeleteObject"):
                self._bulk.delete_object(**self._at(key, version_id))
        except NotFoundError:
            pass

    def probe_delete(self, key: str) -> None:
        if not is_probe_key(self._prefix, key):
            raise InvalidError(f"plain delete outside the probe: {key}")
        with _translated("DeleteObject"):
            self._once.delete_object(**self._at(key))

    def _at(self, key: str, version_id: str | None = None) -> dict[str, str]:
        where = {"Bucket": self._bucket, "Key": key}
        return where if version_id is None else {**where, "VersionId": version_id}

    def _pages(self, operation: str, method: str, **arguments: str) -> Iterator[dict[str, Any]]:
        """Iterate over the pages of a listing, all of them or an error: an empty answer is not an empty listing."""
        with _translated(operation):
            for page in self._bulk.get_paginator(method).paginate(Bucket=self._bucket, **arguments):
                field(page, "IsTruncated", operation)
                yield page

    @contextmanager
    def _opened(self, key: str, version_id: str | None, **extra: str) -> Iterator[dict[str, Any]]:
        """Give the answer to a GET; its connection is not used again unless the body was read to the end."""
        try:
            with _translated("GetObject"):
                answer: dict[str, Any] = self._bulk.get_object(**self._at(key, version_id), **extra)
        except Unsupported as error:
            raise NotFoundError(f"version {version_id} of {key} is a delete marker") from error  # 405
        with _translated("GetObject"):
            try:
                yield answer
            finally:
                answer["Body"].close()

    def _read(self, key: str, version_id: str | None, answer: Mapping[str, Any]) -> ObjectInfo:
        """Return what a HEAD or GET answer says. Raises CorruptError when it is about another version."""
        given = answer.get("VersionId")
        if version_id is not None and given not in (None, version_id):
            raise CorruptError(f"{key}: asked for version {version_id}, the answer is version {given}")
        return ObjectInfo(
            key=key,
            version_id=version_id or self._current_version(key, answer),
            etag=field(answer, "ETag", "GetObject"),
            size=int(field(answer, "ContentLength", "GetObject")),
            metadata={name.lower(): value for name, value in answer.get("Metadata", {}).items()},
            checksum=checksum(answer),
        )

    def _written(self, key: str, answer: Mapping[str, Any], size: int, metadata: Mapping[str, str]) -> ObjectInfo:
        meta = {name.lower(): value for name, value in metadata.items()}
        etag = field(answer, "ETag", "write")
        return ObjectInfo(key, self._version_id(answer), etag, size, meta, checksum(answer))

    def _current_version(self, key: str, answer: Mapping[str, Any]) -> str:
        """Return the version id of the current object. Raises ProbeError while the bucket keeps no versions, and
        CorruptError when it does again: this object will never have one.
        """
        try:
            return self._version_id(answer)
        except ProbeError as error:
            if not self.versioning():
                raise
            raise CorruptError(
                f"{key} was written while the bucket kept no versions: it cannot be pinned",
                hint="to bring back the version before it, delete this one by its version id, which is null",
            ) from error

    def _version_id(self, answer: Mapping[str, Any]) -> str:
        version_id = answer.get("VersionId")
        if not version_id or version_id == "null":
            raise ProbeError(
                f"bucket {self._bucket} gives no version ids: versioning is off or suspended",
                hint="enable versioning on the bucket; publication pins versions",
            )
        return str(version_id)


def _client_maker(
    session: Any, endpoint_url: str | None, region: str | None, connections: int
) -> Callable[[dict[str, Any], float], Any]:
    def client(retries: dict[str, Any], read_timeout: float) -> Any:
        config = Config(
            retries=retries,
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            max_pool_connections=connections,
            tcp_keepalive=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},  # over https only: botocore always signs over http
        )
        return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)

    return client


@contextmanager
def _translated(operation: str, condition: Condition | None = None) -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError, ResponseParserError, HTTPError, ssl.SSLError) as error:
        if_match = condition is not None and condition.if_match is not None
        raise from_exception(error, operation=operation, if_match=if_match) from error


def _code(error: Exception) -> str:
    cause = error.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, ClientError) else ""
