"""Files that are written past their handles, as a map does on the kernel data path: open until the last of it ends."""

from __future__ import annotations

import os

import pytest
import trio

from cachefs.mount.attributes import Update
from cachefs.staging.changes import Kind


@pytest.fixture
def kernel(world):
    """A tree of which the kernel serves files, so that a handle's end says little."""
    world.tree.passthrough.served = True
    return world


async def closed_under_a_map(world, path: bytes) -> int:
    """Create a file and release it while somebody writes it; return that writer's descriptor."""
    handle = await world.create(path)
    writer = os.open(world.staging.tree / os.fsdecode(path), os.O_RDWR)
    await world.content.release(handle)
    return writer


async def test_the_close_is_told_when_the_last_writer_is_gone_under_the_name_of_then(kernel):
    writer = await closed_under_a_map(kernel, b"x.pt")
    await kernel.rename(b"x.pt", b"y.pt")
    assert [(change.kind, change.path, change.writers) for change in kernel.observer.changes] == [
        (Kind.CREATED, b"x.pt", 1),
        (Kind.RENAMED, b"y.pt", 1),
    ]
    kernel.observer.told()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.tree.mapped.run)
        os.close(writer)
        with trio.fail_after(60):
            while not kernel.observer.changes:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert kernel.observer.told() == [(Kind.CLOSED, b"y.pt")]
    assert (kernel.node(b"y.pt").writers, len(kernel.tree.handles)) == (0, 0)


async def test_what_follows_a_close_is_told_after_it(kernel):
    """The kernel lets go of the file a moment after it says so: the rename that closes a save must not miss it."""
    writer = await closed_under_a_map(kernel, b"x.pt")
    os.close(writer)
    kernel.observer.told()
    await kernel.rename(b"x.pt", b"y.pt")
    assert [(change.kind, change.path, change.writers) for change in kernel.observer.changes] == [
        (Kind.CLOSED, b"x.pt", 0),
        (Kind.RENAMED, b"y.pt", 0),
    ]


async def test_an_overwrite_comes_after_the_close_of_what_it_overwrites(kernel):
    """Training that saves to one path again and again writes as many saves as it says."""
    writer = await closed_under_a_map(kernel, b"x.pt")
    os.close(writer)
    kernel.observer.told()
    await kernel.open(b"x.pt", os.O_WRONLY | os.O_TRUNC)
    assert kernel.observer.told() == [(Kind.CLOSED, b"x.pt"), (Kind.TRUNCATED, b"x.pt")]


async def test_other_handles_come_and_go_meanwhile(kernel):
    """The file can be opened, written, and given a size; its close is told once."""
    writer = await closed_under_a_map(kernel, b"x.pt")
    handle = await kernel.open(b"x.pt", os.O_RDWR)
    await kernel.content.release(handle)
    await kernel.attributes.update(kernel.node(b"x.pt"), Update(size=10))
    assert Kind.CLOSED not in [kind for kind, _ in kernel.observer.told()]
    os.close(writer)
    await kernel.tree.mapped.look()
    await kernel.tree.mapped.look()
    assert kernel.observer.told() == [(Kind.CLOSED, b"x.pt")]


async def test_a_file_that_was_removed_is_nobodys_business(kernel):
    """Before it was released, or after: no close is told, and nothing of it is kept."""
    handle = await kernel.create(b"before")
    writer = os.open(kernel.staging.tree / "before", os.O_RDWR)
    await kernel.unlink(b"before")
    await kernel.content.release(handle)
    assert len(kernel.tree.mapped) == 0
    os.close(writer)
    writer = await closed_under_a_map(kernel, b"after")
    await kernel.unlink(b"after")
    os.close(writer)
    kernel.observer.told()
    await kernel.tree.mapped.look()
    assert (kernel.observer.told(), len(kernel.tree.handles)) == ([], 0)


async def test_a_file_that_is_found_written_is_open_until_its_writer_of_an_earlier_mount_closes_it(world):
    """A loose file too; its attributes are not kept meanwhile, and asked for again afterwards."""
    (world.staging.tree / "train.log").write_bytes(b"old")
    (world.staging.tree / "other").write_bytes(b"old")
    writer = os.open(world.staging.tree / "train.log", os.O_WRONLY | os.O_APPEND)
    ended = []
    world.tree.mapped.ended = ended.append
    node, other = world.node(b"train.log"), world.node(b"other")
    assert (node.past, node.writers, other.past, other.writers) == (True, 1, False, 0)
    os.write(writer, b", new")
    assert world.tree.stat(node).st_size == 8
    os.close(writer)
    await world.tree.mapped.look()
    assert (node.past, node.writers, ended) == (False, 0, [node])
    assert world.observer.told() == [(Kind.CLOSED, b"train.log")]


async def test_where_the_kernel_serves_nothing_the_handles_say_all(world):
    writer = await closed_under_a_map(world, b"x.pt")
    assert world.observer.told() == [(Kind.CREATED, b"x.pt"), (Kind.CLOSED, b"x.pt")]
    os.close(writer)


async def test_without_leases_a_file_is_closed_with_its_handles_and_that_is_said_once(
    kernel, monkeypatch, declared_warnings
):
    declared_warnings("maps cannot be seen here")
    monkeypatch.setattr("cachefs.mount.mapped.is_written", lambda fd: None)
    writers = [await closed_under_a_map(kernel, name) for name in (b"x.pt", b"y.pt")]
    assert [path for kind, path in kernel.observer.told() if kind is Kind.CLOSED] == [b"x.pt", b"y.pt"]
    for writer in writers:
        os.close(writer)
