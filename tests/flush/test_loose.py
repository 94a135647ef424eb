from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from cachefs.flush.loose import LooseMirror
from cachefs.flush.throttle import Throttle
from cachefs.store.hop import Inline
from tests.flush.world import PART, World, content
from tests.store.faults import Call, Rule, denied, lost_answer, rules, throttled


class Mirror:
    def __init__(self, world: World, throttle: Throttle | None = None) -> None:
        self.world = world
        self.tree = world.staging.tree
        self.loose = LooseMirror(
            world.journal,
            world.store,
            world.keys,
            Inline(),
            world.staging.tree_fd,
            "default",
            interval=30,
            part_size=PART,
            throttle=throttle,
            is_loose=lambda path: b"step-" not in path,
        )

    def write(self, path: str, body: bytes, *, age: float = 60) -> Path:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
        then = file.stat().st_mtime_ns - int(age * 1e9)
        os.utime(file, ns=(then, then))
        self.loose.note(path.encode())
        return file

    def body(self, key: str) -> bytes | None:
        found = self.world.memory.get(key)
        return found[1] if found else None

    def paths(self) -> list[str]:
        with self.world.journal.read() as txn:
            return [record.path for record in txn.loose.scan()]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.loose.run)
            yield
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        async with self.running():
            await self.world.until(lambda: not self.loose.pending())


@pytest.fixture
def mirror(world: World, autojump_clock) -> Mirror:
    return Mirror(world)


@pytest.mark.parametrize("size", [0, 5, PART, PART + 1, 5 * PART])
async def test_files_of_every_size(autojump_clock, mirror: Mirror, size: int):
    mirror.write("exp/logs/events", content(size))
    mirror.write("top.txt", content(3))
    await mirror.settle()
    assert mirror.body("runs/exp/logs/loose/events") == content(size)
    assert mirror.body("runs/default/loose/top.txt") == content(3)
    assert mirror.paths() == ["exp/logs/events", "top.txt"]
    assert mirror.world.memory.list_multiparts("") == []


async def test_an_unchanged_file_is_not_sent_again(autojump_clock, mirror: Mirror):
    mirror.write("a/f", b"1")
    await mirror.settle()
    mirror.loose.note(b"a/f")
    await mirror.settle()
    assert mirror.world.count("put") == 1


async def test_a_changed_file_is_sent_after_the_interval(autojump_clock, mirror: Mirror):
    async with mirror.running():
        mirror.write("a/f", b"1")
        await mirror.world.until(lambda: not mirror.loose.pending())
        start = trio.current_time()
        mirror.write("a/f", b"2", age=50)
        mirror.write("a/f", b"3", age=40)
        await mirror.world.until(lambda: not mirror.loose.pending())
        assert trio.current_time() - start >= 29
    assert mirror.body("runs/a/loose/f") == b"3"
    assert mirror.world.count("put") == 2


async def test_a_file_written_just_now_is_left_to_settle(autojump_clock, mirror: Mirror):
    mirror.write("a/f", b"1", age=0)
    await mirror.settle()
    assert mirror.body("runs/a/loose/f") == b"1"


@pytest.mark.parametrize("size", [50, 4 * PART])
async def test_a_file_that_changes_while_it_is_read_is_read_again(
    autojump_clock, mirror: Mirror, size: int, monkeypatch: pytest.MonkeyPatch
):
    file = mirror.write("a/f", content(size))
    real, changes = os.preadv, []

    def preadv(fd, buffers, offset):
        count = real(fd, buffers, offset)
        if len(changes) < 2:
            changes.append(offset)
            file.write_bytes(content(size - len(changes), 9))
            os.utime(file, ns=(len(changes), len(changes)))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    await mirror.settle()
    assert mirror.body("runs/a/loose/f") == content(size - 2, 9)
    assert len(list(mirror.world.memory.list_versions("runs/a/loose/f"))) == 1
    mirror.write("b", b"")
    await mirror.settle()
    assert mirror.world.memory.list_multiparts("") == []


@pytest.mark.parametrize("size", [PART // 2, 4 * PART])
async def test_a_file_that_never_stops_changing_is_not_read_again_and_again(
    autojump_clock, mirror: Mirror, size: int, monkeypatch: pytest.MonkeyPatch
):
    """Else a large one would be sent all the time, and never to its end; others are mirrored meanwhile."""
    file = mirror.write("a/f", content(size))
    real, began = os.preadv, []

    def preadv(fd, buffers, offset):
        if os.fstat(fd).st_ino == file.stat().st_ino:
            if offset == 0:
                began.append(trio.current_time())
            os.utime(file, ns=(len(began), len(began) * 1000 + offset))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    async with mirror.running():
        await trio.sleep(40)
        mirror.write("b/f", b"1")
        await mirror.world.until(lambda: mirror.body("runs/b/loose/f") == b"1", seconds=10)
        await trio.sleep(400)
        assert [round(at - began[0]) for at in began] == [0, 30, 90, 210]
        monkeypatch.undo()
        await mirror.world.until(lambda: mirror.body("runs/a/loose/f") == content(size))


@pytest.mark.parametrize("size", [PART // 2, 4 * PART])
async def test_mirrors_keep_to_the_bandwidth(autojump_clock, world: World, size: int):
    mirror = Mirror(world, Throttle(PART))
    for number in range(4):
        mirror.write(f"a/{number}", content(size))
    began = trio.current_time()
    await mirror.settle()
    assert trio.current_time() - began >= 4 * size / PART - 1, "the last part may go at once"


@pytest.mark.parametrize("size", [5, 3 * PART])
async def test_failures_are_tried_again_and_shown(autojump_clock, mirror: Mirror, size: int):
    mirror.write("a/f", content(size))
    mirror.write("b/f", content(size))
    mirror.world.store.plan = rules(
        *(
            Rule(operation, fault, key=lambda key: "/a/" in key, nth=nth)
            for operation in ("put", "upload_part", "complete_multipart", "abort_multipart")
            for nth, fault in enumerate([throttled, denied, lost_answer], 1)
        )
    )
    async with mirror.running():
        await mirror.world.until(lambda: mirror.body("runs/b/loose/f") is not None)
        assert set(mirror.loose.errors) == {b"a/f"}
        await mirror.world.until(lambda: not mirror.loose.pending())
    assert mirror.loose.errors == {}
    assert mirror.body("runs/a/loose/f") == content(size)


async def test_a_removed_file_keeps_its_mirror_and_loses_its_record(autojump_clock, mirror: Mirror):
    for path in ("a/f", "a/g", "a/d/h", "ab"):
        mirror.write(path, b"1")
    await mirror.settle()
    (mirror.tree / "a/f").unlink()
    mirror.loose.forget(b"a/f")
    await mirror.settle()
    assert mirror.paths() == ["a/d/h", "a/g", "ab"]
    (mirror.tree / "a").rename(mirror.tree / "z")
    mirror.loose.note(b"a")
    await mirror.settle()
    assert mirror.paths() == ["ab"]
    assert mirror.body("runs/a/loose/f") == b"1"


async def test_a_moved_directory_is_mirrored_without_its_generations(autojump_clock, mirror: Mirror):
    for path in ("a/f", "a/d/g", "a/step-1/model"):
        mirror.write(path, b"1")
    mirror.loose = Mirror(mirror.world).loose
    mirror.loose.note(b"a")
    await mirror.settle()
    assert mirror.paths() == ["a/d/g", "a/f"]


async def test_links_fifos_and_ways_out_are_not_mirrored(autojump_clock, mirror: Mirror, tmp_path: Path):
    (tmp_path / "secret").write_bytes(b"x")
    (mirror.tree / "out").symlink_to(tmp_path)
    (mirror.tree / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(mirror.tree / "fifo")
    for path in (b"out/secret", b"link", b"fifo", b"nothing/there"):
        mirror.loose.note(path)
    await mirror.settle()
    assert mirror.world.memory.list("").keys == ()
    assert mirror.loose.errors == {}


async def test_an_impossible_key_is_an_error_that_stops_nothing(autojump_clock, mirror: Mirror):
    deep = "/".join(["d" * 200] * 6)
    mirror.write(f"{deep}/f", b"1")
    mirror.write("ok", b"1")
    await mirror.settle()
    assert "longer than" in mirror.loose.errors[f"{deep}/f".encode()]
    assert mirror.paths() == ["ok"]


async def test_a_note_during_the_upload_is_not_lost(autojump_clock, mirror: Mirror):
    file = mirror.write("a/f", b"1")
    noted = []

    def plan(call: Call):
        if call.operation == "put" and not noted:
            noted.append(True)
            file.write_bytes(b"22")
            os.utime(file, ns=(7, 7))
            mirror.loose.note(b"a/f")

    mirror.world.store.plan = plan
    await mirror.settle()
    assert mirror.body("runs/a/loose/f") == b"22"
