"""What the tracker keeps of each save, whom it wakes, and how it waits for several things at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio

from cachefs.generations.placement import Placement


class Hints(msgspec.Struct, frozen=True):
    """Whom to wake. Hints only: each re-reads the journal."""

    opened: Callable[[], None]
    """An attempt was opened or ended."""
    closed: Callable[[], None]
    """A save was closed."""
    pinned: Callable[[], None]
    """There is something to send."""
    loose: Callable[[bytes], None]
    """A loose file changed."""


class Tracked:
    """A save being tracked: its attempt, and the two moments others wait for. `lost` when it could not be journaled."""

    __slots__ = ("attempt", "closing", "journaled", "lost", "placement")

    def __init__(self, attempt: str, placement: Placement) -> None:
        self.attempt = attempt
        self.placement = placement
        self.journaled = trio.Event()
        self.closing: trio.Event | None = None
        self.lost = False


async def each(waiting: list[Awaitable[None]]) -> None:
    """Await every one, also when one fails: each may hold a gate. Raises the first error afterwards."""
    failed: BaseException | None = None
    for one in waiting:
        try:
            await one
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
