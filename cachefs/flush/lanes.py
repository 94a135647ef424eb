"""Who may use the store now. Every read and request holds a slot; a slot brings a buffer of the size asked for.

Slots are few (`limit`) and shared by all runs; each run is a lane with its own back-off. A run in back-off asks for no
slot, so its waiting costs no memory and holds up nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import trio

from cachefs import clock
from cachefs.flush.plan import Backoff
from cachefs.flush.throttle import Throttle


class LaneStatistics(msgspec.Struct, frozen=True):
    """`bytes` of buffers in use now and at most ever, `slots` held, and the names in back-off."""

    bytes: int
    most_bytes: int
    slots: int
    resting: frozenset[str]


class Lanes:
    """The slots, the buffers and the back-off of every run. For one event loop; not thread-safe."""

    def __init__(self, limit: int, buffer_size: int, *, base: float, cap: float, bandwidth: int = 0) -> None:
        """`limit` slots; buffers of `buffer_size` bytes are used again. `base` and `cap` of back-off in seconds,
        `bandwidth` in bytes per second (0: no limit).
        """
        self.limit = limit
        self.throttle = Throttle(bandwidth)
        self._busy_runs = 1
        self._buffer_size = buffer_size
        self._spare: list[bytearray] = []
        self._base = base
        self._cap = cap
        self._held: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._backoffs: dict[str, Backoff] = {}
        self._changed = trio.Event()
        self._bytes = 0
        self._most_bytes = 0

    def statistics(self) -> LaneStatistics:
        """Return what is in use now."""
        resting = frozenset(name for name in self._backoffs if self.rests(name))
        return LaneStatistics(self._bytes, self._most_bytes, self._held.total(), resting)

    # back-off, of a run or of anything else that has a name

    def failed(self, name: str) -> None:
        """Leave `name` alone for a while: longer with every failure in a row."""
        before = self._backoffs.get(name, Backoff())
        self._backoffs[name] = before.failed(trio.current_time(), base=self._base, cap=self._cap, jitter=clock.jitter)

    def succeeded(self, name: str) -> None:
        """Forget the failures of `name`, unless they are so fresh that it is still to be left alone."""
        if self.rests(name) == 0.0:
            self._backoffs.pop(name, None)

    def rests(self, name: str) -> float:
        """Return how many seconds `name` is still to be left alone."""
        return max(0.0, self._backoffs.get(name, Backoff()).until - trio.current_time())

    # slots

    def busy(self, runs: int) -> None:
        """Say how many runs have work. With more than one, the last free slot is kept for a run that holds none.

        With none the spare buffers are given back to the system.
        """
        self._busy_runs = runs
        if not runs:
            self._spare.clear()
        self._wake()

    @asynccontextmanager
    async def slot(self, run: str, size: int = 0) -> AsyncIterator[memoryview]:
        """Hold a slot, and a buffer of `size` bytes; waits for the run's back-off and for a free slot.

        Among the runs that wait, the one that holds least goes first.
        """
        await self._take(run)
        try:
            with self._buffer(size) as buffer:
                yield buffer
        finally:
            self._held[run] -= 1
            self._wake()

    async def _take(self, run: str) -> None:
        while True:
            if self.rests(run):
                await trio.sleep_until(self._backoffs[run].until)
                continue
            self._waiting[run] += 1
            try:
                while not (self._may(run) or self.rests(run)):
                    await self._changed.wait()
                if not self.rests(run):
                    self._held[run] += 1
                    return
            finally:
                self._waiting[run] -= 1
                self._wake()

    def _may(self, run: str) -> bool:
        free = self.limit - self._held.total()
        mine = self._held[run]
        if free < 1 or (free == 1 and mine and self._busy_runs > 1):
            return False
        return all(mine <= self._held[other] for other, count in self._waiting.items() if count)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @contextmanager
    def _buffer(self, size: int) -> Iterator[memoryview]:
        # Only buffers for whole parts are worth keeping; small files get what they need and give it back.
        whole = self._buffer_size // 2 < size <= self._buffer_size
        raw = (self._spare.pop() if self._spare else bytearray(self._buffer_size)) if whole else bytearray(size)
        self._bytes += len(raw)
        self._most_bytes = max(self._most_bytes, self._bytes)
        try:
            with memoryview(raw) as view, view[:size] as buffer:
                yield buffer
        finally:
            self._bytes -= len(raw)
            if whole:
                self._spare.append(raw)
