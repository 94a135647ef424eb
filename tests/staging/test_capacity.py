"""How many new files may wait for room."""

from __future__ import annotations

import errno

import pytest
import trio

from cachefs import clock
from cachefs.staging.capacity import WAITERS, Room


class Disk:
    """A staging without room."""

    free = 0

    def free_bytes(self):
        return self.free

    def total_bytes(self):
        return 1000


async def test_only_some_wait_for_room_and_the_next_is_told_at_once(autojump_clock, monkeypatch):
    """Those that wait hold requests of the mount, which must go on reading, writing and removing."""
    monkeypatch.setattr(clock, "monotonic", trio.current_time)
    disk = Disk()
    room = Room(disk, reserve=10, timeout=60)
    async with trio.open_nursery() as nursery:
        for _ in range(WAITERS):
            nursery.start_soon(room.wait)
        await trio.sleep(1)
        before = trio.current_time()
        with pytest.raises(OSError, match="below its reserve") as caught:
            await room.wait()
        assert caught.value.errno == errno.ENOSPC
        assert trio.current_time() == before
        assert len(nursery.child_tasks) == WAITERS
        disk.free = 10
    disk.free = 0
    await trio.sleep(1)
    with pytest.raises(OSError, match="below its reserve"):
        await room.wait()
    assert trio.current_time() - before > 60  # places are given back
