"""In which turn the runs with nothing open are looked at. Pure.

A member that writes no file of a save learns of it from the run's pointer alone, so whatever may go on soon has to be
looked at often; what ended long ago must cost nothing, however many such runs a bucket holds. So a run whose pointer
has moved lately is looked at in every round, and the others one by one in turn.
"""

from __future__ import annotations

from collections import deque

RECENT = 6 * 3600.0
"""Seconds since the last move of its pointer for which a run is looked at in every round."""
MOST = 16
"""Runs that are looked at in every round, at most: those that moved last."""


class Lanes:
    """The runs that are known. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._turn: deque[str] = deque()
        self._moved: dict[str, float] = {}
        self._seqs: dict[str, int] = {}

    def known(self) -> set[str]:
        """Return all runs."""
        return set(self._turn)

    def add(self, run: str) -> bool:
        """Take up a run; return whether it is new."""
        if run in self._moved:
            return False
        self._turn.append(run)
        self._moved[run] = -float("inf")
        return True

    def looked(self, run: str, seq: int, *, now: float, age: float) -> None:
        """Note a look at a run: the `seq` of its pointer, and how old that claims to be, in seconds. The age counts at
        the first look alone, and decides about nothing but turns.
        """
        self.add(run)
        if run not in self._seqs:
            self._moved[run] = now - max(0.0, age)
        elif seq != self._seqs[run]:
            self._moved[run] = now
        self._seqs[run] = seq

    def due(self, now: float) -> set[str]:
        """Return the runs to look at in this round: the recent ones, and the next of the others."""
        recent = [run for run, moved in self._moved.items() if now - moved < RECENT]
        due = set(sorted(recent, key=lambda run: -self._moved[run])[:MOST])
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            if self._turn[-1] not in due:
                return due | {self._turn[-1]}
        return due
