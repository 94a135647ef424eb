"""Drops the pins of attempts that are over. This process alone makes and drops pins: it counts a file's names by
them.
"""

from __future__ import annotations

import math

import trio

from cachefs.formats.records import State
from cachefs.generations import attempts
from cachefs.generations.retrying import persist
from cachefs.journal import Journal
from cachefs.staging.pins import Pins
from cachefs.threads import in_thread

LOOK = 5.0
"""Seconds between two looks for files that training has removed, where nothing is published."""


class Releaser:
    """Drops the pins of attempts that are over and have no shard records any more, and forgets old attempts.

    Where nothing is published, a `staged` save is over when training has removed or replaced all of its files.
    """

    def __init__(self, journal: Journal, pins: Pins, *, publish: bool = True) -> None:
        self._journal = journal
        self._pins = pins
        self._publish = publish
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
            with trio.move_on_after(math.inf if self._publish else LOOK):
                await self._hint.wait()

    async def _release(self) -> None:
        if not self._publish:
            await self._end_unsent()
        with self._journal.read() as txn:
            over = [attempt for attempt in self._pins.attempts() if attempts.is_over(txn, attempt)]
            forgettable = txn.attempts.count() > 2 * attempts.HISTORY
        failed: OSError | None = None
        for attempt in over:
            try:
                await in_thread(self._pins.drop_attempt, attempt)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        if forgettable:
            await self._journal.write(lambda txn: attempts.forget(txn, self._pins))

    async def _end_unsent(self) -> None:
        """End what nobody will publish and nobody sees any more; the publisher would have deleted its records."""
        with self._journal.read() as txn:
            found = attempts.unsent(txn)

        def look() -> list[str]:
            return [
                one.attempt for one in found if one.state is State.ABANDONED or not self._pins.has_names(one.attempt)
            ]

        over = await in_thread(look)
        if over:
            await self._journal.write(lambda txn: attempts.end_unsent(txn, over))
