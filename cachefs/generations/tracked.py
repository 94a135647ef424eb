"""What the tracker keeps of each save, and whom it wakes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from cachefs.formats.records import AttemptRecord
from cachefs.generations.placement import Placement
from cachefs.generations.saves import moved
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
    """A save being tracked: its attempt, and the two moments others wait for. `lost` when it could not be journaled;
    `unwritten` is the record that the journal refused although the save is closing.

    `finished` are the paths of files that were whole at some time, `rewritten` says that one of them was written again:
    from then on the save may be the next one of its name. `opened_as` is the path at which its directory had a
    temporary name, b"" for none.
    """

    __slots__ = (
        "attempt", "closing", "finished", "journaled", "lost", "opened_as", "placement", "rewritten", "unwritten",
    )  # fmt: skip

    def __init__(self, attempt: str, placement: Placement, opened_as: bytes = b"") -> None:
        self.attempt = attempt
        self.placement = placement
        self.opened_as = opened_as
        self.journaled = trio.Event()
        self.closing: trio.Event | None = None
        self.lost = False
        self.unwritten: AttemptRecord | None = None
        self.finished: set[bytes] = set()
        self.rewritten = False

    def move(self, placement: Placement) -> None:
        """Take the name that the save has now.

        A directory is renamed into place once, by who has written all of it: how often its files were written under the
        temporary name (Orbax writes `_CHECKPOINT_METADATA` three times) makes no second save of it. What is written
        again under the new name does.
        """
        old, self.placement = self.placement, placement
        self.finished = {moved(path, old.path, placement.path) for path in self.finished}
        if old.temporary and not placement.temporary:
            self.rewritten = False

    def renamed(self, attempt: str, placement: Placement, opened_as: bytes) -> Tracked:
        """Return what the save is under another name, as another attempt."""
        other = Tracked(attempt, self.placement, opened_as)
        other.finished, other.rewritten = self.finished, self.rewritten
        other.move(placement)
        return other

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
