"""The bandwidth limit of the flush."""

from __future__ import annotations

import trio


class Throttle:
    """Spaces what is sent so that its average stays below a rate. For one event loop."""

    def __init__(self, rate: int) -> None:
        """`rate` in bytes per second; 0 is no limit."""
        self._rate = rate
        self._free = 0.0

    async def take(self, size: int) -> None:
        """Return when `size` bytes may be sent: when those before them have had their time."""
        if self._rate:
            start = max(self._free, trio.current_time())
            self._free = start + size / self._rate
            await trio.sleep_until(start)
