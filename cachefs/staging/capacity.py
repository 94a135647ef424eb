"""Room in staging: a new file waits below the reserve, then gets ENOSPC. Files already open may use the reserve.

A waiting create holds one of the requests that the mount serves at a time, so only some may wait: the next one gets
ENOSPC at once, and reads, writes and removals go on.
"""

from __future__ import annotations

import errno

import trio

from cachefs import clock
from cachefs.staging.layout import Staging

WAITERS = 32
"""Creates that wait at once; pyfuse3 serves 99 requests at a time."""
_FRESH = 0.25
"""Seconds for which one look at the free space is good enough."""
_SHARE = 20
"""The reserve is never more than the disk's size divided by this, so that a small disk stays usable."""


class Room:
    """The room that new files find."""

    def __init__(self, staging: Staging, *, reserve: int, timeout: float) -> None:
        """`reserve` in bytes; `timeout` in seconds is the longest wait."""
        self._staging = staging
        self._timeout = timeout
        self.reserve = min(reserve, staging.total_bytes() // _SHARE)
        self._looked = -_FRESH
        self._enough = False
        self._waiting = 0

    def has_room(self) -> bool:
        """Return whether a new file may be created; at most `_FRESH` seconds old."""
        now = clock.monotonic()
        if now - self._looked >= _FRESH:
            self._looked = now
            self._enough = self._staging.free_bytes() >= self.reserve
        return self._enough

    async def wait(self) -> None:
        """Return when there is room. Raises OSError(ENOSPC) when none comes in time, or at once when `WAITERS` wait.

        Free space is looked at again and again: other users of the disk tell nobody when they free some.
        """
        if self.has_room():
            return
        if self._waiting < WAITERS:
            self._waiting += 1
            try:
                with trio.move_on_after(self._timeout):
                    while not self.has_room():  # noqa: ASYNC110 - nobody sends an event
                        await trio.sleep(_FRESH)
                    return
            finally:
                self._waiting -= 1
        raise OSError(errno.ENOSPC, "staging is below its reserve")
