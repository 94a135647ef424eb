"""What is not published, and whether it gets there by itself. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from cachefs.formats.records import AttemptRecord, RunRecord, State


class Pending(msgspec.Struct, frozen=True):
    """Saves that are not published, by path, the oldest first. What is `closed` or `closing` goes on by itself:
    `closing` are complete but for a quiet time, files that are still open, or their pins. `fenced` are closed saves of
    runs that another daemon has taken over; they wait for a restart. `open` are all others: they wait for the training.
    """

    closed: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    fenced: tuple[str, ...] = ()
    open: tuple[str, ...] = ()

    @property
    def moving(self) -> bool:
        """Return whether there is something to wait for."""
        return bool(self.closed or self.closing)


def pending(attempts: Iterable[AttemptRecord], runs: Iterable[RunRecord], closing: Collection[str] = ()) -> Pending:
    """Sort the attempts that are not at their end. `closing` are the paths of open saves whose close signal came."""
    taken = {run.run for run in runs if run.fenced_by}
    closed, fenced, still_open = [], [], []
    for attempt in sorted(attempts, key=lambda one: one.serial):
        if attempt.state.final:
            continue
        if attempt.closed_at is None:
            if attempt.state is State.OPEN and not attempt.foreign and attempt.path not in closing:
                still_open.append(attempt.path)
        elif attempt.run not in taken:
            closed.append(attempt.path)
        elif not attempt.foreign:  # of a foreign one nothing is on this disk
            fenced.append(attempt.path)
    return Pending(tuple(closed), tuple(sorted(closing)), tuple(fenced), tuple(still_open))
