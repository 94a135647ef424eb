from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.flush.plan import (
    MAX_PARTS,
    MIB,
    Backoff,
    Range,
    fit_part_size,
    flushed,
    held_parts,
    order,
    parts,
    same_upload,
    uploads,
    waits,
)
from cachefs.formats.manifest import Pin
from cachefs.formats.records import Identity, PartRecord, State
from cachefs.store.base import PartInfo
from tests.flush.records import attempt, run, shard

PIN = Pin("k", "v", 1, "00")


@given(size=st.integers(0, 200), part_size=st.integers(1, 64))
def test_parts_cover_the_file_once(size: int, part_size: int):
    ranges = parts(size, part_size)
    assert [r.number for r in ranges] == list(range(1, len(ranges) + 1))
    assert [r.offset for r in ranges] == [sum(r.length for r in ranges[:i]) for i in range(len(ranges))]
    assert sum(r.length for r in ranges) == size
    assert all(r.length == part_size for r in ranges[:-1])
    assert size == 0 or 0 < ranges[-1].length <= part_size


def test_an_empty_file_has_one_empty_part():
    assert parts(0, 8) == [Range(1, 0, 0)]


@given(size=st.integers(0, 5 << 40))
def test_no_file_needs_more_parts_than_there_may_be(size: int):
    fitted = fit_part_size(size, 5 * MIB)
    assert -(-size // fitted) <= MAX_PARTS
    assert fitted == 5 * MIB or (fitted % MIB == 0 and size > 5 * MIB * MAX_PARTS)


def test_parts_are_held_only_where_journal_and_store_agree():
    ranges = parts(25, 10)
    journal = [PartRecord(n, "u", f"e{n}", bytes([n])) for n in (1, 2, 3, 4)]
    assert sorted(held_parts(ranges, journal, None)) == [1, 2, 3]
    listed = [
        PartInfo(1, "e1", 10, None),
        PartInfo(2, "e2", 10, b"\x09"),  # other digest
        PartInfo(3, "e3", 4, bytes([3])),  # other size
    ]
    assert held_parts(ranges, journal, listed) == {1: PartInfo(1, "e1", 10, b"\x01")}
    assert held_parts(ranges, journal[:1], [PartInfo(1, "other", 10, None)]) == {}
    assert held_parts(ranges, [], listed) == {}
    assert held_parts(ranges, journal[2:3], [PartInfo(3, "e3", 5, bytes([3]))])[3].size == 5


@pytest.mark.parametrize(
    ("record", "of_run", "sends", "drains"),
    [
        (attempt(), run(), True, True),
        (attempt(), None, True, True),
        (attempt(state=State.OPEN), run(), True, True),
        (attempt(state=State.OPEN, closed_at=None), run(), True, False),
        (attempt(opened_epoch=None), run(), False, True),
        (attempt(), run(fenced_by="other"), False, False),
        (attempt(state=State.FLUSHED), run(), False, False),
        (attempt(state=State.ABANDONED), run(), False, False),
        (attempt(state=State.FENCED), run(), False, False),
    ],
)
def test_which_attempts_are_sent_and_waited_for(record, of_run, sends, drains):
    assert uploads(record, of_run) is sends
    assert waits(record, of_run) is drains


def test_the_order_is_closed_then_oldest_then_path_and_runs_are_apart():
    queues = order(
        [
            (attempt("open", serial=1, closed_at=None), [shard("e", of="open", early=True)]),
            (attempt("new", serial=3), [shard("n", of="new")]),
            (attempt("old", serial=2), [shard("z", of="old"), shard("a", of="old"), shard("p", of="old", pin=PIN)]),
            (attempt("else", run="b", serial=9), [shard("x", of="else")]),
            (attempt("done", run="c", serial=4), [shard("x", of="done", pin=PIN)]),
        ]
    )
    assert {name: [s.shard for s in queue] for name, queue in queues.items()} == {
        "run": ["a", "z", "n", "e"],
        "b": ["x"],
    }


def test_flushed_needs_every_pin_of_a_staged_attempt():
    assert flushed(attempt(), [])
    assert flushed(attempt(), [shard(pin=PIN)])
    assert not flushed(attempt(), [shard(pin=PIN), shard("s2")])
    assert not flushed(attempt(), [shard(pin=PIN, early=True)])
    assert not flushed(attempt(state=State.OPEN), [shard(pin=PIN)])
    assert not flushed(attempt(opened_epoch=None), [])


def test_an_upload_is_dropped_with_its_record_but_survives_the_close():
    sent = shard(early=True)
    assert same_upload(sent, sent)
    assert same_upload(msgspec.structs.replace(sent, early=False, identity=Identity(1, 1, 1, "aa")), sent)
    assert not same_upload(None, sent)
    assert not same_upload(msgspec.structs.replace(sent, pin=PIN), sent)
    assert not same_upload(msgspec.structs.replace(sent, identity=Identity(1, 1, 2)), sent)
    assert not same_upload(msgspec.structs.replace(sent, key="other"), sent)


def test_back_off_doubles_to_its_cap_and_counts_a_burst_once():
    state, now, waited = Backoff(), 100.0, []
    for _ in range(6):
        state = state.failed(now, base=1, cap=10, jitter=lambda s: s)
        assert state.failed(now, base=1, cap=10, jitter=lambda s: s) == state
        waited.append(state.until - now)
        now = state.until
    assert waited == [1, 2, 4, 8, 10, 10]
    assert Backoff().failed(0.0, base=1, cap=10, jitter=lambda s: s / 2).until == 0.5
