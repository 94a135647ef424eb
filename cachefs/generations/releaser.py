"""Drops the pins of attempts that are over. This process alone makes and drops pins: it counts a file's names by
them.
"""

from __future__ import annotations

import trio

from cachefs.generations import attempts
from cachefs.generations.retrying import persist
from cachefs.journal import Journal
from cachefs.staging.pins import Pins


class Releaser:
    """Drops the pins of attempts that are over and have no shard records any more, and forgets old attempts."""

    def __init__(self, journal: Journal, pins: Pins) -> None:
        self._journal = journal
        self._pins = pins
        self._hint = trio.Event()

    def wake(self) -> None:
        """Hint that an attempt may be over."""
        self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Release, for ever."""
        task_status.started()
        while True:
            self._hint = trio.Event()
            await persist(self._release, "forgetting old saves")
            await self._hint.wait()

    async def _release(self) -> None:
        with self._journal.read() as txn:
            over = [attempt for attempt in self._pins.attempts() if attempts.is_over(txn, attempt)]
            forgettable = txn.attempts.count() > 2 * attempts.HISTORY
        failed: OSError | None = None
        for attempt in over:
            try:
                await trio.to_thread.run_sync(self._pins.drop_attempt, attempt)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        if forgettable:
            await self._journal.write(lambda txn: attempts.forget(txn, self._pins))
