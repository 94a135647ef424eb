"""What waits for the disk holds up nothing else."""

from __future__ import annotations

import errno
import os
import threading
from functools import partial

import pyfuse3
import pytest
import trio
import trio.testing

from cachefs.journal import Journal
from cachefs.mount import threads
from cachefs.mount.attributes import Update
from cachefs.mount.operations import Operations
from cachefs.staging.changes import Kind

CALLERS = 200
"""More than there are threads of any kind."""


@pytest.fixture
def slow(monkeypatch):
    """A disk whose fsync takes until the event is set."""
    done = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: done.wait())
    yield done
    done.set()


@pytest.mark.parametrize("how", ["of files", "of directories"])
async def test_many_slow_fsyncs_hold_up_no_create_no_journal_and_no_pin(world, tmp_path, slow, how):
    handle = await world.create(b"slow")
    journal = Journal(tmp_path / "journal")
    syncs = world.tree.threads.syncs
    async with trio.open_nursery() as nursery:
        for _ in range(CALLERS):
            if how == "of files":
                nursery.start_soon(partial(world.content.fsync, handle, data_only=False))
            else:
                nursery.start_soon(world.content.fsync_directory, world.table.root)
        try:
            with trio.fail_after(20):
                await trio.testing.wait_all_tasks_blocked()
                assert (syncs.available_tokens, syncs.statistics().tasks_waiting) == (0, CALLERS - syncs.total_tokens)
                other = await world.create(b"x.pt")
                assert world.content.write_now(other, 0, b"bytes") == 5
                await world.content.release(other)
                await journal.barrier()
                await trio.to_thread.run_sync(world.pin, b"x.pt")
        finally:
            slow.set()
    journal.close()
    assert world.observer.durable_calls == CALLERS


class Gate:
    """Calls in other threads than the loop's are counted and wait until the gate is opened."""

    def __init__(self, monkeypatch) -> None:
        self.opened = threading.Event()
        self.calls: list[str] = []
        self._loop = threading.current_thread()
        for name in ("close", "ftruncate"):
            monkeypatch.setattr(os, name, partial(self._call, name, getattr(os, name)))

    def _call(self, name, real, *arguments):
        if threading.current_thread() is not self._loop:
            self.calls.append(name)
            self.opened.wait()
        return real(*arguments)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


async def removed(world):
    await world.unlink(b"x.pt")


async def replaced(world):
    await world.rename(b"y.pt", b"x.pt")


async def removed_and_closed(world):
    handle = await world.open(b"x.pt")
    await world.unlink(b"x.pt")
    await world.content.release(handle)


async def emptied(world):
    await world.content.release(await world.open(b"x.pt", os.O_WRONLY | os.O_TRUNC))


async def cut(world):
    await world.attributes.update(world.node(b"x.pt"), Update(size=10))


@pytest.mark.parametrize("size", [2 * threads.LARGE, threads.LARGE // 2])
@pytest.mark.parametrize("free", [removed, replaced, removed_and_closed, emptied, cut])
async def test_the_blocks_of_large_files_only_are_freed_in_a_thread(world, gate, free, size):
    """Everything else goes on meanwhile; a file that is being cut counts as open for writing, so no save is closed."""
    for name, length in ((b"x.pt", size), (b"y.pt", 1)):
        handle = await world.create(name)
        os.posix_fallocate(handle, 0, length)
        await world.content.release(handle)
    world.observer.told()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(free, world)
        try:
            with trio.fail_after(20):
                await trio.testing.wait_all_tasks_blocked()
                if size < threads.LARGE:
                    assert gate.calls == []
                    return
                while not gate.calls:  # the thread was asked for, and begins
                    await trio.lowlevel.checkpoint()
            assert gate.calls[:1] == (["ftruncate"] if free in (emptied, cut) else ["close"])
            if free in (emptied, cut):
                assert world.observer.told() == [(Kind.TRUNCATED, b"x.pt")]
                assert world.node(b"x.pt").writers == 1
            await world.content.release(await world.create(b"other"))
        finally:
            gate.opened.set()
    assert len(gate.calls) == (2 if free is removed_and_closed else 1)
    if free in (emptied, cut):
        assert world.observer.told()[-1] == (Kind.CLOSED, b"x.pt")
        assert os.stat(world.staging.tree / "x.pt").st_size == (0 if free is emptied else 10)


async def test_no_fsync_returns_before_the_names_above_are_durable_whoever_syncs_them(world, monkeypatch):
    """Two processes fsync one file, a third another one in the same new directory."""
    await world.mkdir(b"d")
    handles = [await world.create(b"d/x.pt"), await world.create(b"d/y.pt")]
    gate, entered = threading.Event(), threading.Event()

    def fsync_of_the_root(fd):
        if os.path.samestat(os.fstat(fd), os.fstat(world.staging.tree_fd)):
            entered.set()
            gate.wait()

    monkeypatch.setattr(os, "fsync", fsync_of_the_root)
    async with trio.open_nursery() as nursery:
        for handle in (handles[0], handles[0], handles[1]):
            nursery.start_soon(partial(world.content.fsync, handle, data_only=True))
        try:
            with trio.fail_after(20):
                while not entered.is_set():
                    await trio.lowlevel.checkpoint()
                while world.tree.threads.syncs.borrowed_tokens > 1:
                    await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
            assert world.observer.durable_calls == 0
        finally:
            gate.set()
    assert world.observer.durable_calls == 3


async def test_names_are_synced_again_after_an_error_and_once_when_an_earlier_daemon_made_them(world, monkeypatch):
    (world.staging.tree / "d").mkdir()
    (world.staging.tree / "d/x.pt").write_bytes(b"bytes")
    synced = []
    failing = [errno.EIO]

    def fsync(fd):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name == "tree" and failing:
            raise OSError(failing.pop(), "the disk failed")
        synced.append(name)

    monkeypatch.setattr(os, "fsync", fsync)
    handle = await world.open(b"d/x.pt", os.O_RDWR)
    with pytest.raises(OSError, match="the disk failed"):
        await world.content.fsync(handle, data_only=False)
    await world.content.fsync(handle, data_only=False)
    await world.content.fsync(handle, data_only=False)
    assert synced == ["x.pt", "d", "x.pt", "tree", "x.pt"]


async def test_a_thread_that_is_refused_fails_its_call_and_nothing_else(world, no_threads):
    """And keeps no descriptor: what would be freed in a thread is freed without."""
    handle = await world.create(b"x.pt")
    os.posix_fallocate(handle, 0, 2 * threads.LARGE)
    before = len(os.listdir("/proc/self/fd"))
    with no_threads():
        for call in (
            world.content.fsync(handle, data_only=False),
            world.content.fsync_directory(world.table.root),
            world.attributes.update(world.node(b"x.pt"), Update(size=10)),
        ):
            with pytest.raises(OSError, match="no more threads") as failed:
                await call
            assert failed.value.errno == errno.EAGAIN
        assert len(os.listdir("/proc/self/fd")) == before
        await world.unlink(b"x.pt")
        await world.content.release(handle)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    await world.content.fsync_directory(world.table.root)


async def test_an_error_that_nobody_foresaw_fails_its_request_and_not_the_mount(world, monkeypatch, declared_warnings):
    declared_warnings("a request failed")

    def broken(change):
        raise ZeroDivisionError

    monkeypatch.setattr(world.observer, "after", broken)
    handles = len(world.tree.handles)
    with pytest.raises(pyfuse3.FUSEError) as failed:
        await Operations(world.tree).create(1, b"x.pt", 0o644, os.O_WRONLY, pyfuse3.RequestContext())
    assert failed.value.errno == errno.EIO
    assert len(world.tree.handles) == handles
