"""What is not published, and whether it gets there by itself."""

from __future__ import annotations

import msgspec

from cachefs.formats.records import AttemptRecord, RunRecord, State
from cachefs.pending import Pending, pending

OPEN = AttemptRecord(
    attempt="a", path="", run="run", generation="g", kind="file", preset="", step=0, opened_at=0.0, serial=1
)


def attempt(path: str, **fields) -> AttemptRecord:
    return msgspec.structs.replace(OPEN, path=path, **fields)


def test_every_save_that_is_not_at_its_end_is_sorted():
    found = pending(
        [
            attempt("written"),
            attempt("quiet"),
            attempt("staged", state=State.STAGED, closed_at=1.0),
            attempt("not staged yet", closed_at=1.0),
            attempt("taken", run="other", state=State.FLUSHED, closed_at=1.0),
            attempt("published", state=State.PUBLISHED, closed_at=1.0),
            attempt("abandoned", state=State.ABANDONED),
        ],
        [RunRecord(run="run"), RunRecord(run="other", fenced_by="another")],
        ["quiet"],
    )
    assert found == Pending(
        closed=("staged", "not staged yet"), closing=("quiet",), fenced=("taken",), open=("written",)
    )
    assert found.moving


def test_the_oldest_comes_first():
    late, early = attempt("late", serial=2, closed_at=1.0), attempt("early", serial=1, closed_at=1.0)
    assert pending([late, early], []).closed == ("early", "late")


def test_what_other_members_write_is_pending_but_not_left_open_or_fenced_here():
    """Of a foreign attempt nothing is on this disk."""
    others = [attempt("open", foreign=True), attempt("closed", foreign=True, closed_at=1.0)]
    assert pending(others, []) == Pending(closed=("closed",))
    assert pending(others, [RunRecord(run="run", fenced_by="another")]) == Pending()
    assert not Pending(fenced=("x",), open=("y",)).moving
