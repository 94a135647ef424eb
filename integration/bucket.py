"""What a stranger finds in the bucket: reads it with boto3 alone, no line of cachefs involved.

Follows pointer -> manifest -> shards by pinned versions, and checks every size and SHA-256 on the way.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


class Bucket:
    """A bucket prefix as boto3 sees it."""

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""

    def get(self, key: str, version: str | None = None) -> bytes:
        """Return an object's bytes, of one version if given."""
        pinned = {"VersionId": version} if version else {}
        return self.client.get_object(Bucket=self.bucket, Key=key, **pinned)["Body"].read()

    def pointer(self, run: str) -> dict[str, Any]:
        """Return a run's pointer."""
        return json.loads(self.get(f"{self.prefix}runs/{run}/pointer.json"))

    def manifest(self, run: str) -> dict[str, Any]:
        """Return the manifest that a run's pointer names, after checking its digest."""
        return self._manifest(self.pointer(run))

    def _manifest(self, pointer: dict[str, Any]) -> dict[str, Any]:
        pin = pointer["published"]["manifest"]
        body = self.get(pin["key"], pin["version_id"])
        assert (len(body), hashlib.sha256(body).hexdigest()) == (pin["size"], pin["sha256"])
        return json.loads(body)

    def files(self, run: str) -> dict[str, bytes]:
        """Return the files of the published generation by path, each checked against the manifest."""
        return self.named(self.pointer(run))

    def named(self, pointer: dict[str, Any]) -> dict[str, bytes]:
        """Return the files of the generation that one version of a pointer names."""
        found: dict[str, bytes] = {}
        for shard in self._manifest(pointer)["shards"]:
            pin = shard["pin"]
            body = self.get(pin["key"], pin["version_id"])
            size = shard["part_size"] or max(1, len(body))
            parts = [hashlib.sha256(body[at : at + size]).digest() for at in range(0, len(body), size)]
            parts = parts or [hashlib.sha256(b"").digest()]
            assert [part.hex() for part in parts] == shard["parts"]
            tree = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()
            assert (len(body), tree.hex()) == (pin["size"], pin["sha256"])
            found.update(dict.fromkeys(shard["paths"], body))
        return found

    def versions(self, key: str) -> list[str]:
        """Return the version ids of one key; a delete marker among them fails the test."""
        listed = self.client.list_object_versions(Bucket=self.bucket, Prefix=key)
        assert not [marker for marker in listed.get("DeleteMarkers", []) if marker["Key"] == key]
        return [version["VersionId"] for version in listed.get("Versions", []) if version["Key"] == key]

    def keys(self, under: str = "runs/") -> list[str]:
        """Return all keys below the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + under)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]
