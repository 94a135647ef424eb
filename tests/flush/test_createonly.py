"""Unclear create-only writes: whatever the answer was, exactly one version exists and it is the one returned."""

from __future__ import annotations

import hashlib

import pytest

from cachefs.errors import ConditionConflict, CorruptError, NoSuchUpload, UnavailableError
from cachefs.store.base import CREATE_ONLY, ObjectInfo, PartInfo
from cachefs.store.createonly import WRITE_ID, Found, Wanted, classify, complete_create_only, create_only
from cachefs.store.hop import Inline
from cachefs.store.memory import MemoryStore
from tests.store.faults import (
    FaultyStore,
    Rule,
    conflict,
    lost_answer,
    lost_request,
    precondition_failed,
    refused,
    rules,
    throttled,
)

HOP = Inline()
BODY = b"bytes of a shard"
DIGEST = hashlib.sha256(BODY).digest()
TREE = hashlib.sha256(DIGEST).hexdigest()


def faulty(*given: Rule) -> FaultyStore:
    return FaultyStore(MemoryStore(), rules(*given))


async def put(store: FaultyStore, write_id: str = "w1", body: bytes = BODY) -> ObjectInfo:
    return await create_only(store, HOP, "k", body, write_id=write_id, sha256=hashlib.sha256(body).digest())


def start(store: FaultyStore) -> tuple[str, list[PartInfo]]:
    upload = store.create_multipart("k", metadata={WRITE_ID: "w1"})
    etag = store.upload_part("k", upload, 1, BODY, sha256=DIGEST)
    return upload, [PartInfo(1, etag, len(BODY), DIGEST)]


async def complete(store: FaultyStore, upload: str, parts: list[PartInfo]) -> ObjectInfo:
    return await complete_create_only(store, HOP, "k", upload, parts, write_id="w1", sha256=TREE)


def only_version(store: FaultyStore) -> str:
    versions = list(store.inner.list_versions("k"))
    assert len(versions) == 1
    return versions[0].version_id


@pytest.mark.parametrize(
    ("info", "found"),
    [
        (None, Found.ABSENT),
        (ObjectInfo("k", "v", "e", 3, {WRITE_ID: "w"}, "aa"), Found.OURS),
        (ObjectInfo("k", "v", "e", 3, {WRITE_ID: "w"}, None), Found.OURS),
        (ObjectInfo("k", "v", "e", 3, {WRITE_ID: "w"}, "bb"), Found.OTHER),
        (ObjectInfo("k", "v", "e", 4, {WRITE_ID: "w"}, "aa"), Found.OTHER),
        (ObjectInfo("k", "v", "e", 3, {WRITE_ID: "x"}, "aa"), Found.SAME_BYTES),
        (ObjectInfo("k", "v", "e", 3, {"sha256": "aa"}, None), Found.SAME_BYTES),
        (ObjectInfo("k", "v", "e", 3, {"sha256": "bb", WRITE_ID: "w"}, "aa"), Found.OTHER),
        (ObjectInfo("k", "v", "e", 3, {}, None), Found.OTHER),
    ],
)
def test_classify(info: ObjectInfo | None, found: Found):
    assert classify(info, Wanted("w", 3, "aa")) is found


async def test_a_clear_put_needs_no_read_back():
    store = faulty()
    info = await put(store)
    assert info.version_id == only_version(store)
    assert store.operations() == ["put"]


async def test_a_lost_answer_is_found_in_the_same_call():
    store = faulty(Rule("put", lost_answer))
    assert (await put(store)).version_id == only_version(store)


async def test_a_lost_request_stays_unknown_until_the_identical_retry():
    store = faulty(Rule("put", lost_request))
    with pytest.raises(UnavailableError, match="not created yet"):
        await put(store)
    assert (await put(store)).version_id == only_version(store)


async def test_412_over_our_own_write_is_success():
    store = faulty(Rule("put", lost_answer), Rule("head", throttled))
    with pytest.raises(UnavailableError):
        await put(store)
    assert (await put(store)).version_id == only_version(store)
    assert store.operations()[-2:] == ["put", "head"]


async def test_412_over_other_bytes_is_a_conflict_and_writes_nothing():
    store = faulty()
    await put(store, "w0", b"something else")
    with pytest.raises(CorruptError, match="other bytes"):
        await put(store)
    only_version(store)


async def test_412_over_the_same_bytes_returns_their_version():
    store = faulty()
    first = await put(store, "w0")
    assert await put(store, "w1") == first


@pytest.mark.parametrize("fault", [conflict, precondition_failed])
async def test_an_absent_key_after_409_or_412_means_send_again(fault):
    store = faulty(Rule("put", fault))
    with pytest.raises(UnavailableError) as caught:
        await put(store)
    assert caught.value.reason == "conflict"
    assert (await put(store)).version_id == only_version(store)


async def test_a_write_below_a_delete_marker_is_found():
    store = FaultyStore(MemoryStore(), rules(Rule("put", lost_answer), Rule("head", throttled)))
    with pytest.raises(UnavailableError):
        await create_only(store, HOP, ".probe/k", BODY, write_id="w1", sha256=DIGEST)
    store.probe_delete(".probe/k")
    store.plan = rules(Rule("put", lost_request))
    found = await create_only(store, HOP, ".probe/k", BODY, write_id="w1", sha256=DIGEST)
    assert [v.version_id for v in store.list_versions(".probe/k") if not v.is_marker] == [found.version_id]


async def test_a_write_below_a_later_one_is_pinned_by_its_own_version():
    store = faulty(Rule("put", lost_answer), Rule("head", throttled))
    with pytest.raises(UnavailableError):
        await put(store)
    ours = only_version(store)
    store.put("k", b"a writer that ignores conditions", condition=None)
    assert (await put(store)).version_id == ours


async def test_a_lost_answer_on_complete_is_found():
    store = faulty(Rule("complete_multipart", lost_answer))
    assert (await complete(store, *start(store))).version_id == only_version(store)


async def test_no_such_upload_after_our_own_complete_is_success():
    store = faulty(Rule("complete_multipart", lost_answer), Rule("head", throttled))
    upload, parts = start(store)
    with pytest.raises(UnavailableError):
        await complete(store, upload, parts)
    assert (await complete(store, upload, parts)).version_id == only_version(store)


async def test_no_such_upload_of_an_aborted_upload_asks_for_a_new_one():
    store = faulty()
    upload, parts = start(store)
    store.abort_multipart("k", upload)
    with pytest.raises(NoSuchUpload):
        await complete(store, upload, parts)


async def test_an_aborted_upload_and_another_object_is_a_conflict():
    store = faulty()
    upload, parts = start(store)
    store.abort_multipart("k", upload)
    store.put("k", b"x" * len(BODY), condition=CREATE_ONLY)
    with pytest.raises(CorruptError):
        await complete(store, upload, parts)


async def test_409_on_complete_asks_for_a_new_upload():
    store = faulty(Rule("complete_multipart", refused(ConditionConflict("409"))))
    with pytest.raises(NoSuchUpload):
        await complete(store, *start(store))


async def test_412_on_complete_over_ours_aborts_the_upload_that_is_not_needed():
    store = faulty()
    first = await complete(store, *start(store))
    assert (await complete(store, *start(store))) == first
    assert store.list_multiparts("") == []


async def test_a_complete_that_never_arrived_is_repeated_as_it_was():
    store = faulty(Rule("complete_multipart", lost_request))
    upload, parts = start(store)
    with pytest.raises(UnavailableError):
        await complete(store, upload, parts)
    assert (await complete(store, upload, parts)).version_id == only_version(store)
