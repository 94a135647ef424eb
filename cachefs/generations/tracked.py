"""What the tracker keeps of each save, whom it wakes, and how it waits for several things at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio

from cachefs.generations.placement import Placement
from cachefs.staging.changes import Change, Kind


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
    over: Callable[[], None] = lambda: None
    """Pins of an attempt that has ended are still there."""


class Tracked:
    """A save being tracked: its attempt, and the two moments others wait for. `lost` when it could not be journaled.

    `finished` are the paths of files that were whole at some time, `rewritten` says that one of them was written again:
    from then on the save may be the next one of its name. `opened_as` is the path at which its directory had a
    temporary name, b"" for none.
    """

    __slots__ = ("attempt", "closing", "finished", "journaled", "lost", "opened_as", "placement", "rewritten")

    def __init__(self, attempt: str, placement: Placement, opened_as: bytes = b"") -> None:
        self.attempt = attempt
        self.placement = placement
        self.opened_as = opened_as
        self.journaled = trio.Event()
        self.closing: trio.Event | None = None
        self.lost = False
        self.finished: set[bytes] = set()
        self.rewritten = False

    def note(self, change: Change) -> None:
        """Take in a change of a file of the save."""
        match change.kind:
            case Kind.CREATED | Kind.OPENED | Kind.TRUNCATED:
                if change.path in self.finished:
                    self.rewritten = True
            case Kind.CLOSED if change.writers == 0:
                self.finished.add(change.path)
            case Kind.RENAMED | Kind.LINKED:
                if change.path in self.finished:
                    self.rewritten = True
                if change.kind is Kind.RENAMED:
                    self.finished.discard(change.old)  # a temporary name is used again for the next file
                self.finished.add(change.path)


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
