"""What a flush brings into the store, in which order, and what it does with files that must not be published."""

from __future__ import annotations

import errno
import hashlib
import os

import msgspec
import pytest
import trio

from cachefs.errors import DAMAGE
from cachefs.formats.records import State
from tests.flush.world import PART, World, content, xxh3


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 10 * PART + 7])
async def test_files_of_every_size(autojump_clock, world: World, size: int):
    world.save("a", {"f": content(size)})
    await world.drained()
    world.check("a")
    shard = world.shard("a", "f")
    body = content(size)
    digests = [hashlib.sha256(body[i : i + PART]).digest() for i in range(0, max(size, 1), PART)]
    assert shard.digests == tuple(digests)
    assert shard.part_size == PART
    assert (world.count("put"), world.count("upload_part")) == ((1, 0) if size <= PART else (0, len(digests)))
    assert world.hooks == 1


async def test_a_save_without_files_is_flushed_once_staged(autojump_clock, world: World):
    world.save("a", {}, state=State.OPEN)
    async with world.running():
        await trio.sleep(60)  # seconds of the clock that jumps
        assert world.attempt("a").state is State.OPEN
        world.change("a", state=State.STAGED)
        await world.flusher.drain()
    world.check("a")


async def test_nothing_is_sent_before_the_announcement_or_when_fenced(autojump_clock, world: World):
    world.save("a", {"f": content(5)}, opened_epoch=None)
    world.save("b", {"f": content(5)}, run="other")
    world.journal.write_now(
        lambda txn: txn.runs.put("other", msgspec.structs.replace(txn.runs.get("other"), fenced_by="x"))
    )
    async with world.running():
        await trio.sleep(60)
        assert world.flusher.pending() == (1, 5)
        assert world.count("put") == 0
        world.change("a", opened_epoch=1)
        await world.flusher.drain()
    world.check("a")
    assert world.attempt("b").state is State.STAGED
    assert world.count("put") == 1


async def test_a_closed_save_is_sent_before_it_is_staged(autojump_clock, world: World):
    world.save("a", {"f": content(5)}, state=State.OPEN)
    async with world.running():
        await world.until(lambda: world.shard("a", "f").pin is not None)
        assert world.attempt("a").state is State.OPEN
        world.change("a", state=State.STAGED)
        await world.flusher.drain()
    world.check("a")


async def test_the_order_is_closed_before_open_and_oldest_first(autojump_clock, world: World):
    world.settings = msgspec.structs.replace(world.settings, upload_concurrency=1)
    world.restart()
    world.save("early", {"e": content(5)}, early=True)
    world.save("old", {"b": content(3), "a": content(4)})
    world.save("new", {"c": content(5)})
    async with world.running():
        await world.until(lambda: world.shard("early", "e").pin is not None)
    names = [call.key.rsplit("-", 1)[-1] for call in world.store.calls if call.operation == "put"]
    assert names == ["a", "b", "c", "e"]
    assert world.attempt("early").state is State.OPEN


async def test_an_early_file_is_kept_through_the_close(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)}, early=True)
    async with world.running():
        await world.until(lambda: world.shard("a", "f").pin is not None)
        world.change_shard("a", "f", early=False)
        world.change("a", state=State.STAGED, closed_at=2.0)
        await world.flusher.drain()
    world.check("a")
    assert world.count("upload_part") == 3


@pytest.mark.parametrize("damage", ["truncated", "bits", "gone", "empty"])
@pytest.mark.parametrize("size", [PART // 2, 4 * PART])
async def test_damaged_files_end_their_save_and_no_other(autojump_clock, world: World, damage: str, size: int):
    world.save("bad", {"ok": content(9), "f": content(size)})
    world.save("good", {"f": content(2 * PART)})
    file = world.file("bad", "f")
    stat = file.stat()
    if damage == "gone":
        world.pins.drop("bad", "bad-f")
    else:
        body = file.read_bytes()
        changed = {"truncated": body[:-1], "empty": b"", "bits": body[:-1] + bytes([body[-1] ^ 1])}[damage]
        file.write_bytes(changed)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await world.drained()
    world.check("good")
    bad = world.attempt("bad")
    assert bad.state is State.ABANDONED
    assert bad.error.startswith("f ")
    assert world.shard("bad", "f").error == bad.error
    assert world.memory.head(world.shard("bad", "f").key) is None
    assert world.flusher.statistics().abandoned == 1


@pytest.mark.parametrize("size", [PART // 2, PART, 5 * PART])
async def test_files_of_every_size_keep_to_the_bandwidth(autojump_clock, world: World, size: int):
    world.settings = msgspec.structs.replace(world.settings, bandwidth=PART)
    world.restart()
    world.save("a", {f"f{number}": content(size, number) for number in range(8)})
    began = trio.current_time()
    await world.drained()
    world.check("a")
    assert trio.current_time() - began >= 8 * size / PART - min(size / PART, 1), "the last part may go at once"


@pytest.mark.parametrize("code", sorted({*DAMAGE, errno.ENOENT, errno.ELOOP}))
async def test_a_file_that_the_disk_has_lost_ends_its_save_and_no_other(
    autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch, code: int
):
    world.save("bad", {"f": content(9)})
    world.save("good", {"f": content(2 * PART)})
    bad, read = world.file("bad", "f").stat().st_ino, os.preadv

    def preadv(fd, buffers, offset):
        if os.fstat(fd).st_ino == bad:
            raise OSError(code, os.strerror(code))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    await world.drained(600)
    world.check("good")
    assert world.attempt("bad").state is State.ABANDONED


async def test_a_time_that_was_set_later_is_no_damage_when_the_hash_agrees(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    os.utime(world.file("a", "f"), ns=(5, 5))
    await world.drained()
    world.check("a")


async def test_an_early_file_that_changed_waits_for_the_tracker(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)}, early=True)
    os.truncate(world.file("a", "f"), PART)
    async with world.running():
        await world.until(lambda: world.shard("a", "f").error != "")
    assert world.attempt("a").state is State.OPEN
    assert world.memory.list("").keys == ()


async def test_a_pin_that_moved_to_a_copy_is_read_from_the_copy(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    file = world.file("a", "f")
    world.pins.release_inode(file.stat().st_ino)
    file.write_bytes(b"training goes on")
    await world.drained()
    world.check("a")


async def test_a_pin_that_moves_while_it_is_read(autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch):
    """The trainer writes into the old inode right after the part was read from it: the part is read again."""
    world.save("a", {"f": content(3 * PART)})
    file = world.file("a", "f")
    real, moved = os.preadv, []

    def preadv(fd, buffers, offset):
        if offset == PART and not moved:
            moved.append(True)
            world.pins.release_inode(file.stat().st_ino)
            file.write_bytes(b"\0" * 3 * PART)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    await world.drained()
    assert moved
    world.check("a")


async def test_a_hash_filled_in_meanwhile_must_agree(autojump_clock, world: World):
    world.save("a", {"f": content(5)}, state=State.OPEN)
    world.change_shard("a", "f", identity=msgspec.structs.replace(world.shard("a", "f").identity, xxh3=None))
    original = world.store.plan

    def plan(call):
        identity = world.shard("a", "f").identity
        world.change_shard("a", "f", identity=msgspec.structs.replace(identity, xxh3=xxh3(b"other")))
        return original(call)

    world.store.plan = plan
    async with world.running():
        await world.until(lambda: world.attempt("a").state is State.ABANDONED)
    assert world.shard("a", "f").pin is None


async def test_thousands_of_small_files_in_threads_with_bounded_memory(world: World):
    world.use_threads()
    world.save("a", {f"f{number:04}": content(number % PART, number) for number in range(2000)})
    assert world.flusher.pending() == (2000, sum(number % PART for number in range(2000)))
    await world.drained()
    world.check("a")
    statistics = world.flusher.statistics()
    assert statistics.flushed_files == 2000
    assert statistics.most_bytes_in_flight <= 4 * PART
    assert statistics.bytes_in_flight == 0
    assert world.count("put") == 2000
    assert world.flusher.pending() == (0, 0)


async def test_a_large_file_in_threads_with_bounded_memory(world: World):
    world.use_threads()
    world.save("a", {"f": content(200 * PART + 1)})
    await world.drained()
    world.check("a")
    assert world.flusher.statistics().most_bytes_in_flight <= 4 * PART


async def test_the_part_size_of_a_begun_file_outlives_the_settings(autojump_clock, world: World):
    world.save("a", {"f": content(3 * PART)})
    world.store.crash_after = 3
    assert await world.crashes()
    world.settings = msgspec.structs.replace(world.settings, part_size=10 * PART)
    world.restart()
    await world.drained()
    world.check("a")
    assert len(world.shard("a", "f").digests) == 3
