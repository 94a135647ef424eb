"""What every backend promises: the store protocol of base.py, with S3's documented semantics."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from cachefs.errors import (
    BadPart,
    ConditionConflict,
    ConditionFailed,
    CorruptError,
    InvalidError,
    NoSuchUpload,
    NotFoundError,
    UnavailableError,
)
from cachefs.store.base import CREATE_ONLY, STREAM_CHUNK, Condition, ObjectStore, PartInfo
from tests.store.backends import Backend

WRONG = Condition(if_match='"00000000000000000000000000000000"')


def sha(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def key(store: ObjectStore, tail: str) -> str:
    return f"{store.prefix}/{tail}" if store.prefix else tail


def upload(store: ObjectStore, name: str, bodies: list[bytes], **metadata: str) -> tuple[str, list[PartInfo]]:
    upload_id = store.create_multipart(name, metadata=metadata)
    parts = [
        PartInfo(number, store.upload_part(name, upload_id, number, body, sha256=sha(body)), len(body), sha(body))
        for number, body in enumerate(bodies, 1)
    ]
    return upload_id, parts


def bodies_of(backend: Backend) -> list[bytes]:
    return [bytes([65]) * backend.part_size, b"the end"]


def test_answers_and_has_versions(store):
    store.check()
    store.prepare()
    assert store.versioning()
    assert "://" in store.url


def test_create_only_once(store):
    name = key(store, "runs/r/attempts/x/manifest.json")
    info = store.put(name, b"one", condition=CREATE_ONLY, sha256=sha(b"one"), metadata={"write-id": "w1"})
    assert info.key == name
    assert info.version_id not in ("", "null")
    assert (info.size, info.metadata) == (3, {"write-id": "w1"})
    with pytest.raises(ConditionFailed):
        store.put(name, b"two", condition=CREATE_ONLY)
    current, body = store.get(name)
    assert (current.version_id, current.etag, body) == (info.version_id, info.etag, b"one")
    assert current.metadata == {"write-id": "w1"}


def test_compare_and_swap(store):
    name = key(store, "pointer.json")
    with pytest.raises(ConditionFailed):
        store.put(name, b"0", condition=WRONG)
    assert store.head(name) is None
    first = store.put(name, b"1", condition=CREATE_ONLY)
    with pytest.raises(ConditionFailed):
        store.put(name, b"x", condition=WRONG)
    second = store.put(name, b"2", condition=Condition(if_match=first.etag))
    assert second.etag != first.etag
    with pytest.raises(ConditionFailed):
        store.put(name, b"y", condition=Condition(if_match=first.etag))
    assert store.get(name)[1] == b"2"
    assert store.get(name, first.version_id)[1] == b"1"


def test_unconditional_puts_make_versions(store):
    name = key(store, "loose/log.txt")
    ids = [store.put(name, body, condition=None).version_id for body in (b"1", b"1", b"3")]
    assert len(set(ids)) == 3
    assert [store.get(name, version_id)[1] for version_id in ids] == [b"1", b"1", b"3"]
    found = list(store.list_versions(name))
    assert {version.version_id for version in found} == set(ids)
    assert [version.version_id for version in found if version.is_latest] == [ids[-1]]
    assert all(abs(version.modified - time.time()) < 3600 and version.size == 1 for version in found)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bodies_of_every_buffer_kind(store, kind):
    for body in (b"", b"abc", bytes(range(256)) * 5000):
        info = store.put(key(store, "b"), kind(body), condition=None, sha256=sha(body))
        assert info.size == len(body)
        assert store.get(key(store, "b"))[1] == body


def test_wrong_sha256_of_a_put(store, backend):
    name = key(store, "a")
    if backend.verifies_sha256:
        with pytest.raises(BadPart):
            store.put(name, b"body", condition=CREATE_ONLY, sha256=sha(b"other"))
        assert store.head(name) is None
    else:
        assert store.put(name, b"body", condition=CREATE_ONLY, sha256=sha(b"other"))


def test_head_reports_the_checksum(store, backend):
    name = key(store, "a")
    store.put(name, b"body", condition=CREATE_ONLY, sha256=sha(b"body"))
    assert store.head(name).checksum == (sha(b"body").hex() if backend.reports_sha256_of_puts else None)


def test_reading_what_is_not_there(store):
    name = key(store, "a")
    info = store.put(name, b"body", condition=CREATE_ONLY)
    store.delete_version(name, info.version_id)
    assert store.head(name) is None
    assert store.get(name) is None
    assert store.head(name, info.version_id) is None
    assert store.get(name, info.version_id) is None
    with pytest.raises(NotFoundError):
        store.get_range(name, info.version_id, 0, 1)
    with pytest.raises(NotFoundError):
        list(store.get_stream(name, info.version_id))
    store.delete_version(name, info.version_id)  # already gone is fine


def test_ranges(store, backend):
    name = key(store, "a")
    first = store.put(name, bytes(range(200)), condition=None)
    store.put(name, b"newer", condition=None)
    if not backend.ranges_of_versions:
        with pytest.raises(CorruptError):
            store.get_range(name, first.version_id, 10, 20)
        return
    assert store.get_range(name, first.version_id, 10, 20) == bytes(range(10, 30))
    assert store.get_range(name, first.version_id, 199, 1) == bytes([199])
    assert store.get_range(name, first.version_id, 5, 0) == b""
    with pytest.raises(CorruptError):
        store.get_range(name, first.version_id, 190, 20)


def test_streams_pinned_versions(store):
    name = key(store, "a")
    body = bytes(range(256)) * (3 * STREAM_CHUNK // 512)
    first = store.put(name, body, condition=None)
    store.put(name, b"newer", condition=None)
    chunks = list(store.get_stream(name, first.version_id))
    assert b"".join(chunks) == body
    assert all(len(chunk) <= STREAM_CHUNK for chunk in chunks)
    assert len(chunks) > 1
    empty = store.put(name, b"", condition=None)
    assert b"".join(store.get_stream(name, empty.version_id)) == b""


def test_multipart(store, backend):
    name = key(store, "shards/m0/s-model.bin")
    bodies = bodies_of(backend)
    upload_id, parts = upload(store, name, bodies, **{"write-id": "w"})
    listed = store.list_parts(name, upload_id)
    assert [(part.number, part.etag, part.size) for part in listed] == [
        (part.number, part.etag, part.size) for part in parts
    ]
    assert [part.sha256 for part in listed] == [
        part.sha256 if backend.reports_sha256_of_parts else None for part in parts
    ]
    assert [(found.key, found.upload_id) for found in store.list_multiparts(store.prefix)] == [(name, upload_id)]
    assert store.head(name) is None
    info = store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    assert info.size == sum(map(len, bodies))
    head = store.head(name)
    assert (head.version_id, head.size, head.metadata) == (info.version_id, info.size, {"write-id": "w"})
    assert head.checksum == hashlib.sha256(b"".join(map(sha, bodies))).hexdigest()
    assert b"".join(store.get_stream(name, info.version_id)) == b"".join(bodies)
    assert store.list_multiparts(store.prefix) == []
    with pytest.raises(NoSuchUpload if backend.refuses_parts_of_gone_uploads else UnavailableError):
        store.upload_part(name, upload_id, 3, b"late", sha256=sha(b"late"))
    with pytest.raises(NoSuchUpload):
        store.list_parts(name, upload_id)


def test_multipart_with_a_hole_or_out_of_order(store, backend):
    name = key(store, "s")
    upload_id, parts = upload(store, name, bodies_of(backend))
    missing = PartInfo(3, parts[0].etag, 1, sha(b"x"))
    with pytest.raises(BadPart):
        store.complete_multipart(name, upload_id, [*parts, missing], condition=CREATE_ONLY)
    assert store.head(name) is None
    if backend.refuses_parts_out_of_order:
        with pytest.raises(BadPart):
            store.complete_multipart(name, upload_id, parts[::-1], condition=CREATE_ONLY)
        assert store.head(name) is None
    else:
        assert store.complete_multipart(name, upload_id, parts[::-1], condition=CREATE_ONLY)


def test_a_part_can_be_sent_again(store, backend):
    name = key(store, "s")
    bodies = bodies_of(backend)
    upload_id, parts = upload(store, name, [b"x" * backend.part_size, bodies[1]])
    etag = store.upload_part(name, upload_id, 1, bodies[0], sha256=sha(bodies[0]))
    parts[0] = PartInfo(1, etag, len(bodies[0]), sha(bodies[0]))
    info = store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    assert b"".join(store.get_stream(name, info.version_id)) == b"".join(bodies)


def test_small_parts_are_refused(store, backend):
    name = key(store, "s")
    upload_id, parts = upload(store, name, [b"small", b"end"])
    if backend.refuses_small_parts:
        with pytest.raises(BadPart):
            store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    else:
        assert store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY).size == 8


def test_wrong_sha256_of_a_part(store, backend):
    name = key(store, "s")
    upload_id = store.create_multipart(name)
    if backend.verifies_sha256:
        with pytest.raises(BadPart):
            store.upload_part(name, upload_id, 1, b"body", sha256=sha(b"other"))
        assert store.list_parts(name, upload_id) == []
    else:
        assert store.upload_part(name, upload_id, 1, b"body", sha256=sha(b"other"))


def test_wrong_total_size(store, backend):
    name = key(store, "s")
    upload_id, parts = upload(store, name, [b"body"])
    wrong = [PartInfo(1, parts[0].etag, 5, parts[0].sha256)]
    if backend.verifies_total_size:
        with pytest.raises(BadPart):
            store.complete_multipart(name, upload_id, wrong, condition=CREATE_ONLY)
        assert store.head(name) is None
    else:
        assert store.complete_multipart(name, upload_id, wrong, condition=CREATE_ONLY)


def test_completion_is_create_only(store):
    name = key(store, "s")
    store.put(name, b"first", condition=CREATE_ONLY)
    upload_id, parts = upload(store, name, [b"second"])
    with pytest.raises(ConditionFailed):
        store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    assert store.get(name)[1] == b"first"
    assert len(store.list_parts(name, upload_id)) == 1  # the upload is still there, to be aborted
    store.abort_multipart(name, upload_id)
    store.abort_multipart(name, upload_id)
    with pytest.raises(NoSuchUpload):
        store.list_parts(name, upload_id)


def test_completion_under_if_match(store, backend):
    name = key(store, "s")
    first = store.put(name, b"first", condition=CREATE_ONLY)
    second = store.put(name, b"second", condition=Condition(if_match=first.etag))
    upload_id, parts = upload(store, name, [b"third"])
    if backend.completes_if_match:
        with pytest.raises(ConditionFailed):
            store.complete_multipart(name, upload_id, parts, condition=Condition(if_match=first.etag))
        store.complete_multipart(name, upload_id, parts, condition=Condition(if_match=second.etag))
    else:
        store.complete_multipart(name, upload_id, parts, condition=Condition(if_match=first.etag))
    assert store.get(name)[1] == b"third"


def test_completing_twice(store, backend):
    name = key(store, "s")
    upload_id, parts = upload(store, name, [b"body"])
    info = store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    if backend.forgets_completed_uploads:
        with pytest.raises(NoSuchUpload):
            store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    else:
        again = store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
        assert again.version_id == info.version_id
    assert len(list(store.list_versions(name))) == 1


def test_delete_during_an_upload(store, backend):
    name = key(store, ".probe/x/s")
    store.put(name, b"first", condition=CREATE_ONLY)
    upload_id, parts = upload(store, name, [b"second"])
    store.probe_delete(name)
    if backend.conflicts_on_delete_during_upload:
        with pytest.raises(ConditionConflict):
            store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)
    else:
        store.complete_multipart(name, upload_id, parts, condition=CREATE_ONLY)


def test_uploads_carry_their_date(store, backend):
    upload(store, key(store, "s"), [b"body"])
    [found] = store.list_multiparts(store.prefix)
    assert (abs(found.initiated - time.time()) < 3600) == backend.dates_uploads


def test_conditions_over_a_delete_marker(store):
    name = key(store, ".probe/x/a")
    info = store.put(name, b"1", condition=CREATE_ONLY)
    store.probe_delete(name)
    assert store.head(name) is None
    assert store.get(name) is None
    assert store.get(name, info.version_id)[1] == b"1"
    with pytest.raises(ConditionFailed):
        store.put(name, b"2", condition=Condition(if_match=info.etag))
    [marker] = [version for version in store.list_versions(name) if version.is_marker]
    assert marker.is_latest
    assert store.head(name, marker.version_id) is None
    assert store.get(name, marker.version_id) is None
    with pytest.raises(NotFoundError):
        store.get_range(name, marker.version_id, 0, 1)
    store.put(name, b"3", condition=CREATE_ONLY)
    assert store.get(name)[1] == b"3"


def test_plain_deletes_stay_in_the_probe(store):
    store.put(key(store, "a"), b"1", condition=CREATE_ONLY)
    for name in ("a", "runs/.probe/a", ".probe"):
        with pytest.raises(InvalidError):
            store.probe_delete(key(store, name))
    assert store.get(key(store, "a"))


def test_deleting_versions(store):
    name = key(store, "a")
    ids = [store.put(name, body, condition=None).version_id for body in (b"1", b"2", b"3")]
    store.delete_version(name, ids[1])
    assert store.get(name)[1] == b"3"
    store.delete_version(name, ids[2])
    assert store.get(name)[1] == b"1"
    store.delete_version(name, ids[0])
    assert list(store.list_versions(store.prefix)) == []
    assert store.list(store.prefix).keys == ()
    assert store.put(name, b"4", condition=CREATE_ONLY).version_id not in ids


def test_listing(store, backend):
    names = ["runs/a", "runs/a/x", "runs/a/y/z", "runs/b%20c/x", "runs/ü/x", "top", "tops/a"]
    for name in names:
        store.put(key(store, name), b"1", condition=CREATE_ONLY)
    hidden = key(store, ".probe/only/deleted")
    store.put(hidden, b"1", condition=CREATE_ONLY)
    store.probe_delete(hidden)
    root = key(store, "")
    assert store.list(root).keys == tuple(sorted(key(store, name) for name in names))
    assert store.list(key(store, "runs/a/")).keys == (key(store, "runs/a/x"), key(store, "runs/a/y/z"))
    assert store.list(key(store, "to")).keys == (key(store, "top"), key(store, "tops/a"))
    by_run = store.list(key(store, "runs/"), delimiter="/")
    assert by_run.keys == (key(store, "runs/a"),)
    assert by_run.prefixes == tuple(key(store, run) for run in ("runs/a/", "runs/b%20c/", "runs/ü/"))
    tops = store.list(root, delimiter="/").prefixes
    assert (key(store, ".probe/") not in tops) == backend.hides_prefixes_of_deleted_keys


@pytest.mark.parametrize(
    "tail",
    [
        "dots/../x",
        "dots/./x",
        ".hidden/..x",
        "at@/b@",
        "percent%2F/%41",
        "a b+c=d,e",
        "plain/" + "n" * 180 + "é" * 90 + "/x",
        "ends.with.dot.",
        "x" * 200 + "." * 300,
    ],
)
def test_keys_of_every_kind(store, tail):
    name = key(store, f"keys/{tail}")
    info = store.put(name, tail.encode(), condition=CREATE_ONLY)
    assert store.get(name, info.version_id)[1] == tail.encode()
    assert store.list(key(store, "keys/")).keys == (name,)
    assert [version.key for version in store.list_versions(key(store, "keys/"))] == [name]


def test_more_keys_than_one_page(store, backend):
    count = 1005
    store_many(store, count)
    assert len(store.list(key(store, "many/")).keys) == count
    assert sum(1 for _ in store.list_versions(key(store, "many/"))) == count


def store_many(store: ObjectStore, count: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store.put(key(store, f"many/{n:05d}"), b"", condition=None), range(count)))


@pytest.mark.parametrize("swap", [False, True], ids=["create", "swap"])
def test_one_of_many_writers_wins(store, swap):
    name = key(store, "contested")
    condition = Condition(if_match=store.put(name, b"0", condition=CREATE_ONLY).etag) if swap else CREATE_ONLY
    barrier = Barrier(8)

    def write(number: int) -> bool:
        barrier.wait(30)
        try:
            store.put(name, f"writer {number}".encode(), condition=condition)
        except (ConditionFailed, ConditionConflict):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(write, range(8)))
    assert sum(won) == 1
    assert store.get(name)[1] == f"writer {won.index(True)}".encode()
