"""Pinned files: their bytes never change, and nobody who uses the mount can tell that they are pinned."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from cachefs.mount.attributes import Update
from cachefs.staging import pins as pins_module
from cachefs.staging.changes import Kind


async def test_opening_with_o_trunc_gives_a_fresh_inode_and_the_pin_keeps_the_old_bytes(world):
    """Mode, times of the directory, user attributes and the node id stay; the user's link count is 1 all the time."""
    handle = await world.create(b"x.pt", mode=0o640)
    await world.content.write(handle, 0, b"first")
    await world.content.release(handle)
    os.setxattr(world.staging.tree / "x.pt", "user.note", b"mine")
    node = world.node(b"x.pt")
    world.pin(b"x.pt")
    assert world.links(b"x.pt") == 1
    directory = world.staging.tree.stat()

    handle = await world.open(b"x.pt", os.O_WRONLY | os.O_TRUNC)
    await world.content.write(handle, 0, b"second")
    await world.content.release(handle)

    assert world.pinned() == b"first"
    assert await world.read(b"x.pt") == b"second"
    assert world.node(b"x.pt") is node
    assert world.links(b"x.pt") == 1
    now = world.staging.tree.stat()
    assert (now.st_mtime_ns, now.st_atime_ns) == (directory.st_mtime_ns, directory.st_atime_ns)
    assert os.getxattr(world.staging.tree / "x.pt", "user.note") == b"mine"
    assert (world.staging.tree / "x.pt").stat().st_mode & 0o777 == 0o640
    assert os.listdir(world.staging.scratch) == []


async def test_readers_of_a_truncated_file_see_what_a_local_disk_would_show_them(world):
    """They share the file with the writer: first nothing, then the new bytes, under the handle they have."""
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt")
    reader = await world.open(b"x.pt")
    assert world.content.read(reader, 0, 10) == b"first"
    writer = await world.open(b"x.pt", os.O_WRONLY | os.O_TRUNC)
    assert world.content.read(reader, 0, 10) == b""
    await world.content.write(writer, 0, b"new")
    assert world.content.read(reader, 0, 10) == b"new"


@pytest.mark.parametrize("change", ["write", "truncate to a part", "truncate to nothing"])
async def test_any_other_change_moves_the_pin_to_a_copy(world, change):
    """The user's file keeps its inode, so hard links and open readers stay what they are."""
    await world.put(b"x.pt", b"0123456789")
    await world.names.link(world.node(b"x.pt").id, 1, b"other")
    reader = await world.open(b"other")
    world.pin(b"x.pt")
    assert world.links(b"x.pt") == 2
    ino = (world.staging.tree / "x.pt").stat().st_ino

    if change == "write":
        handle = await world.open(b"x.pt", os.O_RDWR)
        await world.content.write(handle, 8, b"XYZ")
        await world.content.release(handle)
    else:
        await world.attributes.update(world.node(b"x.pt"), Update(size=4 if "part" in change else 0))

    now = {"write": b"01234567XYZ", "truncate to a part": b"0123", "truncate to nothing": b""}[change]
    assert world.pinned() == b"0123456789"
    assert world.content.read(reader, 0, 20) == now
    assert await world.read(b"x.pt") == await world.read(b"other") == now
    assert (world.staging.tree / "x.pt").stat().st_ino == ino
    assert world.links(b"x.pt") == 2
    assert os.listdir(world.staging.scratch) == []


async def test_a_hard_link_of_a_pinned_file_stays_one_when_it_is_opened_with_o_trunc(world):
    await world.put(b"x.pt", b"first")
    await world.names.link(world.node(b"x.pt").id, 1, b"best.pt")
    world.pin(b"x.pt")
    handle = await world.open(b"best.pt", os.O_WRONLY | os.O_TRUNC)
    await world.content.write(handle, 0, b"second")
    await world.content.release(handle)
    assert await world.read(b"x.pt") == b"second"
    assert world.pinned() == b"first"
    assert world.links(b"x.pt") == 2


async def test_several_pins_on_one_file_all_keep_their_bytes(world):
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt", "a", "s")
    world.pin(b"x.pt", "b", "s")
    assert world.links(b"x.pt") == 1
    handle = await world.open(b"x.pt", os.O_RDWR)
    await world.content.write(handle, 0, b"FIRST")
    await world.content.release(handle)
    assert world.pinned("a") == world.pinned("b") == b"first"
    assert world.links(b"x.pt") == 1


async def test_rotation_of_a_pinned_file_frees_the_name_only(world):
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt")
    await world.unlink(b"x.pt")
    assert world.names.lookup(1, b"x.pt") is None
    assert world.pinned() == b"first"
    await world.put(b"x.pt", b"second")
    assert (world.pinned(), await world.read(b"x.pt")) == (b"first", b"second")


async def test_an_open_waits_again_when_its_save_is_closed_while_the_pins_were_being_moved(world, monkeypatch):
    """The copy takes time; a save that closes meanwhile pins the file again, and the writer must not touch that pin."""
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt", "a")
    original = pins_module.clone

    def pin_again_after_the_copy(source, target):
        original(source, target)
        monkeypatch.setattr(pins_module, "clone", original)
        trio.from_thread.run_sync(world.pin, b"x.pt", "b")

    monkeypatch.setattr(pins_module, "clone", pin_again_after_the_copy)
    handle = await world.open(b"x.pt", os.O_WRONLY)
    await world.content.write(handle, 0, b"FIRST")
    await world.content.release(handle)
    assert world.pinned("a") == world.pinned("b") == b"first"
    assert await world.read(b"x.pt") == b"FIRST"


async def test_two_opens_at_once_copy_a_pinned_file_once(world, monkeypatch):
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt")
    copies = []
    original = pins_module.clone
    monkeypatch.setattr(pins_module, "clone", lambda *args: (copies.append(args), original(*args)))
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(world.open, b"x.pt", os.O_RDWR)
    assert len(copies) == 1
    assert world.pinned() == b"first"


async def test_an_open_fails_cleanly_when_the_copy_does_not_fit(world, monkeypatch):
    """ENOSPC for the writer; the pin stays, nothing is open, and the next try works."""
    await world.put(b"x.pt", b"first")
    world.pin(b"x.pt")

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pins_module, "clone", full)
        with pytest.raises(OSError, match="No space left"):
            await world.open(b"x.pt", os.O_RDWR)
    assert world.node(b"x.pt").writers == 0
    assert world.pinned() == b"first"
    world.observer.told()
    await world.open(b"x.pt", os.O_RDWR)
    assert world.observer.told() == [(Kind.OPENED, b"x.pt")]


async def test_an_operation_that_was_held_back_reports_the_path_of_that_moment(world):
    """The directory may be renamed by another operation that was held back as well."""
    await world.mkdir(b"old")
    await world.put(b"old/x.pt", b"x")
    world.observer.told()
    world.observer.hold(b"old/x.pt")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.unlink, b"old/x.pt")
        await trio.testing.wait_all_tasks_blocked()
        assert world.observer.waiting == 1
        await world.rename(b"old", b"new")
        world.observer.let_go(b"old/x.pt")
    assert world.observer.told() == [(Kind.RENAMED, b"new"), (Kind.REMOVED, b"new/x.pt")]
