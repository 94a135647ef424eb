"""What others do to the keys of a save: other bytes, markers, later versions, uploads that end from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration.faults import before, damaged, flip, ignored, meanwhile
from integration.proxy import Hold, Request
from integration.world import (
    MIB,
    PART,
    SHARD,
    World,
    assert_same,
    attempts,
    await_state,
    on_both,
    save,
    tensors,
)

pytestmark = [pytest.mark.mount, pytest.mark.server]

SURE = ("node", "--probe-interval", "0")
"""A node that does not probe the store once more, and wait, before it calls a save damaged."""
LARGE, SMALL = "model-1.safetensors", "model-2.safetensors"


class Others:
    """Somebody with rights on the bucket."""

    def __init__(self, world: World) -> None:
        self._client = world.bucket.client
        self._bucket = world.bucket.bucket
        self._uploads: dict[str, str] = {}

    def write(self, body: bytes) -> Callable[[Request], None]:
        """Write other bytes to the key of a request, with no condition."""
        return lambda request: self._client.put_object(Bucket=self._bucket, Key=request.key, Body=body)

    def hide(self, request: Request) -> None:
        """Put a delete marker on the key of a request."""
        self._client.delete_object(Bucket=self._bucket, Key=request.key)

    def abort(self, request: Request) -> None:
        """Abort the upload of a request, as a lifecycle rule does."""
        self._client.abort_multipart_upload(Bucket=self._bucket, Key=request.key, UploadId=request.query["uploadId"])

    def begin(self, request: Request) -> None:
        """Begin an upload of their own to the key of a request."""
        begun = self._client.create_multipart_upload(Bucket=self._bucket, Key=request.key)
        self._uploads[request.key] = begun["UploadId"]

    def complete(self, body: bytes) -> list[str]:
        """Complete all that was begun, with no condition; return the keys."""
        for key, upload in self._uploads.items():
            at = {"Bucket": self._bucket, "Key": key, "UploadId": upload}
            etag = self._client.upload_part(**at, PartNumber=1, Body=body)["ETag"]
            self._client.complete_multipart_upload(**at, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
        return list(self._uploads)

    def versions(self, key: str) -> tuple[int, int]:
        """Return the number of versions and of markers of a key."""
        listed = self._client.list_object_versions(Bucket=self._bucket, Prefix=key)
        return len(listed.get("Versions", [])), len(listed.get("DeleteMarkers", []))


def files(step: int) -> dict[str, bytes]:
    """Return the files of one save: one in three parts, one in one request."""
    return {LARGE: tensors(2 * PART + MIB, step), SMALL: tensors(9, step)}


def test_other_bytes_under_a_key_of_ours_end_that_save_and_no_other(world: World) -> None:
    """Wherever another writer was first with other bytes, nothing is overwritten, the save is abandoned with the
    reason, and the next one is published (races 16, 17, 21, 26).
    """
    node, others = world.node(*SURE), Others(world)
    same_size = bytes(len(files(0)[LARGE]))

    def instead_of_the_upload(request: Request) -> None:
        others.abort(request)
        others.write(same_size)(request)

    taken: dict[str, tuple[str, str, Callable[[Request], None]]] = {
        "a file in one request": ("PutObject", SMALL, others.write(b"other")),
        "a file in parts": ("CompleteMultipartUpload", LARGE, others.write(b"other")),
        "a file whose upload was aborted": ("CompleteMultipartUpload", LARGE, instead_of_the_upload),
        "a member's report": ("PutObject", "/members/", others.write(b"{}")),
        "the manifest": ("PutObject", "/manifest.json$", others.write(b"{}")),
    }
    for step, (operation, key, act) in enumerate(taken.values(), 1):
        world.proxy.forget()
        rule = world.proxy.on(operation, before(act), key=key)
        save(node.mnt / "run" / f"step-{step}", files(step))
        await_state(node, f"run/step-{step}", "abandoned")
        assert rule.met == 1
        (seen,) = attempts(node, f"run/step-{step}")
        assert "other bytes" in seen["error"] or "not a valid" in seen["error"], seen["error"]
        refused = next(request for request in world.proxy.requests(operation, key))
        assert refused.effect in (404, 412)
        assert others.versions(refused.key) == (1, 0)
    assert world.bucket.pointer("run")["published"] is None
    saved = save(node.mnt / "run" / "step-9", files(9))
    await_state(node, "run/step-9")
    world.verify(node, "run", saved)


@on_both
def test_a_pin_holds_under_markers_and_later_versions(world: World, tmp_path: Path) -> None:
    """Markers over our objects, before the answer comes and after they are pinned; a later object; an older upload that
    is completed last: what was published is what was saved, and no key is written a second time (races 16, 19, 25).
    """
    node, others = world.node(), Others(world)
    lost = meanwhile(others.hide, lambda exchange, _answer: exchange.drop())
    early = "model-3.safetensors", "model-4.safetensors"
    world.proxy.on("CompleteMultipartUpload", lost, key=early[0])
    world.proxy.on("PutObject", lost, key=early[1])
    world.proxy.on("CreateMultipartUpload", before(others.begin), key=LARGE)
    manifest = Hold()
    world.proxy.on("PutObject", manifest, key="/manifest.json$")
    given = {**files(1), early[0]: tensors(PART + MIB), early[1]: tensors(10), "model-5.safetensors": tensors(11)}
    saved = save(node.mnt / "run" / "step-1", given)
    manifest.arrived()
    shards = {request.key.partition("-")[2]: request for request in world.proxy.requests("PutObject", SHARD)}
    (overtaken,) = others.complete(bytes(PART))
    others.write(b"later")(shards[SMALL])
    others.hide(shards["model-5.safetensors"])
    manifest.release()
    await_state(node, "run/step-1")
    created = [r.key for r in world.proxy.requests("", SHARD) if r.method != "GET" and r.effect in (200, 204)]
    assert len(world.proxy.requests("CompleteMultipartUpload", SHARD)) == 2
    assert len(shards) == len(world.proxy.requests("PutObject", SHARD)) == 4, created
    assert others.versions(overtaken) == others.versions(shards[SMALL].key) == (2, 0)
    assert others.versions(shards[early[1]].key) == others.versions(shards["model-5.safetensors"].key) == (1, 1)
    restored = node.restore("run", tmp_path / "out", "--endpoint-url", world.proxy.url)
    assert_same({name: (restored / "step-1" / name).read_bytes() for name in saved}, saved)
    world.verify(node, "run", saved)


@on_both
def test_an_upload_that_expired_is_begun_again(world: World) -> None:
    """A lifecycle rule aborts an upload between two parts, and another before it is completed: all parts go again, in a
    new upload (race 23).
    """
    node, others = world.node("node", "--upload-concurrency", "1"), Others(world)
    given = {LARGE: tensors(2 * PART + MIB), SMALL: tensors(PART + MIB)}
    world.proxy.on("UploadPart", before(others.abort), key=LARGE, skip=1)
    world.proxy.on("CompleteMultipartUpload", before(others.abort), key=SMALL)
    saved = save(node.mnt / "run" / "step-1", given)
    await_state(node, "run/step-1")
    for name, parts in ((LARGE, 3), (SMALL, 2)):
        completed = world.proxy.requests("CompleteMultipartUpload", name)[-1]
        sent = [
            r.part
            for r in world.proxy.requests("UploadPart", name)
            if r.query["uploadId"] == completed.query["uploadId"]
        ]
        assert (completed.effect, sorted(sent)) == (200, list(range(1, parts + 1)))
        assert len(world.proxy.requests("CreateMultipartUpload", name)) == 2
    world.verify(node, "run", saved)


DAMAGED = [("UploadPart", LARGE, "part 1"), ("PutObject", SMALL, SMALL)]


@pytest.mark.parametrize("world", ["ministack"], indirect=True)
def test_a_part_damaged_on_its_way_is_sent_again_where_the_store_checks(world: World) -> None:
    """BadDigest: the part is read and sent again, and the save is published (race 24)."""
    node = world.node()
    rules = [world.proxy.on(operation, damaged(flip), key=name) for operation, name, _ in DAMAGED]
    saved = save(node.mnt / "run" / "step-1", files(1))
    await_state(node, "run/step-1")
    assert [rule.met for rule in rules] == [1, 1]
    for operation, name, _ in DAMAGED:
        answers = [request.effect for request in world.proxy.requests(operation, name)]
        assert answers.count(400) == 1
        assert len(answers) == answers.count(200) + 1
    world.verify(node, "run", saved)


def test_a_part_damaged_on_its_way_is_found_by_the_restore_test_where_the_store_does_not_check(world: World) -> None:
    """The server takes the wrong bytes: the restore test names the file, and they are not published (race 24)."""
    node = world.node(*SURE)
    for step, (operation, name, _) in enumerate(DAMAGED, 1):
        rule = world.proxy.on(operation, damaged(flip), key=name)
        save(node.mnt / "run" / f"step-{step}", files(step))
        await_state(node, f"run/step-{step}", "abandoned")
        (seen,) = attempts(node, f"run/step-{step}")
        assert rule.met == 1
        assert name in seen["error"]
    assert world.bucket.pointer("run")["published"] is None
    saved = save(node.mnt / "run" / "step-9", files(9))
    await_state(node, "run/step-9")
    world.verify(node, "run", saved)


def test_a_restore_test_that_does_not_read_the_pinned_bytes_fails(world: World) -> None:
    """The store ignores the range, or the version: what comes back is whole, right or newer, and is not what was asked
    for (race 27).
    """
    node, others = world.node(*SURE), Others(world)
    manifest = Hold()

    def whole_version(step: int) -> None:
        world.proxy.on("GetObject", ignored("range"), key=SHARD, times=None)
        save(node.mnt / "run" / f"step-{step}", files(step))

    def newest_version(step: int) -> None:
        world.proxy.on("PutObject", manifest, key="/manifest.json$")
        save(node.mnt / "run" / f"step-{step}", files(step))
        manifest.arrived()
        (shard,) = [r for r in world.proxy.requests("PutObject", SHARD) if SMALL in r.key]
        others.write(files(step)[SMALL])(shard)
        world.proxy.on("GetObject", ignored("versionId"), key=SHARD, times=None)
        world.proxy.on("HeadObject", ignored("versionId"), key=SHARD, times=None)
        manifest.release()

    for step, ask in enumerate((whole_version, newest_version), 1):
        world.proxy.forget()
        ask(step)
        await_state(node, f"run/step-{step}", "abandoned")
        (seen,) = attempts(node, f"run/step-{step}")
        assert "asked for" in seen["error"], seen["error"]
        world.proxy.end()
    assert world.bucket.pointer("run")["published"] is None
    saved = save(node.mnt / "run" / "step-9", files(9))
    await_state(node, "run/step-9")
    world.verify(node, "run", saved)
