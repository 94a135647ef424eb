"""What the memory store adds to the contract: determinism, and the orders that S3 leaves open, at their worst."""

from __future__ import annotations

import hashlib

from cachefs.store.base import CREATE_ONLY, PartInfo
from cachefs.store.memory import MemoryStore


def upload(store: MemoryStore, body: bytes) -> tuple[str, list[PartInfo]]:
    digest = hashlib.sha256(body).digest()
    upload_id = store.create_multipart("k")
    return upload_id, [PartInfo(1, store.upload_part("k", upload_id, 1, body, sha256=digest), len(body), digest)]


def test_two_runs_are_equal():
    def run() -> list[object]:
        store = MemoryStore(now=lambda: 7.0)
        store.put("a", b"1", condition=CREATE_ONLY)
        upload_id, parts = upload(store, b"2")
        store.complete_multipart("k", upload_id, parts, condition=CREATE_ONLY)
        return list(store.list_versions(""))

    assert run() == run()


def test_the_upload_started_last_is_current():
    store = MemoryStore()
    early, early_parts = upload(store, b"early")
    late, late_parts = upload(store, b"late")
    last = store.complete_multipart("k", late, late_parts, condition=None)
    older = store.complete_multipart("k", early, early_parts, condition=None)
    assert store.head("k").version_id == last.version_id
    assert store.get("k", older.version_id)[1] == b"early"


def test_a_body_is_copied():
    store = MemoryStore()
    body = bytearray(b"before")
    store.put("a", memoryview(body), condition=None)
    body[:] = b"after!"
    assert store.get("a")[1] == b"before"
