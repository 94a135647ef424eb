"""What the mount sees of the daemon: the tracker's hooks, the journal's durability, room in staging, and answers."""

from __future__ import annotations

import errno
from collections.abc import Awaitable

from cachefs.errors import CachefsError
from cachefs.generations.tracker import Tracker
from cachefs.journal import Journal
from cachefs.metrics import Metrics
from cachefs.reporter import Reporter
from cachefs.staging.capacity import Room
from cachefs.staging.changes import Change


class DaemonObserver:
    """Implements mount.observer.Observer."""

    def __init__(self, tracker: Tracker, reporter: Reporter, journal: Journal, room: Room, metrics: Metrics) -> None:
        self._tracker = tracker
        self._reporter = reporter
        self._journal = journal
        self._room = room
        self._metrics = metrics

    def before(self, change: Change) -> Awaitable[None] | None:
        """See Tracker.before."""
        return self._tracker.before(change)

    def after(self, change: Change) -> Awaitable[None] | None:
        """See Tracker.after."""
        return self._tracker.after(change)

    async def durable(self) -> None:
        """Return when everything observed so far is durable in the journal."""
        await self._journal.barrier()
        self._metrics.fsyncs.inc()

    async def wait_for_room(self) -> None:
        """See Room.wait."""
        if not self._room.has_room():
            await self._room.wait()

    def answer(self, path: bytes, name: str) -> bytes | None:
        """See Reporter.answer."""
        return self._reporter.answer(path, name)

    async def request(self, path: bytes, name: str) -> None:
        """Begin to close a generation by hand; who still has a file of it open is not waited for.

        Raises OSError: EINVAL for a path that is none, ENOTSUP for other names.
        """
        if name != "close":
            raise OSError(errno.EOPNOTSUPP, "user.cachefs.* is read-only, except user.cachefs.close")
        try:
            await self._tracker.close_now(path, wait=False)
        except CachefsError as error:
            raise OSError(error.errno, str(error)) from error
