"""What the composition root decides by itself."""

from __future__ import annotations

import pytest

from cachefs.daemon import _claim
from cachefs.errors import StagingError
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "journal")
    yield made
    made.close()


def put(journal: Journal, state: State) -> None:
    record = AttemptRecord(
        attempt="a", path="run/g", run="run", generation="g", kind="file", preset="", step=0, opened_at=0.0, serial=1,
        state=state, closed_at=1.0,
    )  # fmt: skip
    journal.write_now(lambda txn: txn.attempts.put("a", record))


@pytest.mark.parametrize(("store", "member"), [("s3://other", "node"), ("s3://bucket", "other")])
def test_staging_with_pending_saves_stays_with_its_store_and_member(journal, store, member):
    _claim(journal, "s3://bucket", "node")
    put(journal, State.STAGED)
    _claim(journal, "s3://bucket", "node")
    with pytest.raises(StagingError, match="s3://bucket") as raised:
        _claim(journal, store, member)
    assert "--store s3://bucket --member node" in raised.value.hint


@pytest.mark.parametrize("state", [State.PUBLISHED, State.ABANDONED])
def test_staging_without_pending_saves_may_serve_another_store(journal, state):
    _claim(journal, "s3://bucket", "node")
    put(journal, state)
    _claim(journal, "s3://other", "node")
    put(journal, State.STAGED)
    with pytest.raises(StagingError):
        _claim(journal, "s3://bucket", "node")
