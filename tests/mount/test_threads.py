"""What waits for the disk holds up nothing else."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
import trio
import trio.testing

from cachefs.journal import Journal

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
