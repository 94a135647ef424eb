"""The pure rules, for any pointer, any history, any set of attempts."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError, FencedError
from cachefs.formats.codec import encode
from cachefs.formats.manifest import Order, Pin
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.formats.records import AttemptRecord, RunRecord, State
from cachefs.publish import rules
from cachefs.publish.rules import Already, Cas, Refused, Step
from cachefs.restore.reader import Seen

orders = st.builds(Order, step=st.integers(0, 3), epoch=st.integers(1, 3), ordinal=st.integers(1, 3))
attempts = st.sampled_from(["x", "y", "z"])
candidates = st.builds(
    Published, generation=st.just("g"), attempt=attempts, order=orders, manifest=st.just(Pin("k", "v", 1, "d"))
)
moves = st.lists(st.one_of(st.sampled_from(["a", "b"]), candidates), max_size=12)


def seen(pointer: Pointer) -> Seen:
    return Seen(pointer, f'"{hash(encode(pointer))}"', f"v{pointer.seq}")


def play(script: list[str | Published]) -> list[Seen]:
    """Play grants (an owner's name) and promotions by whoever owns the run, each announced before it; return the chain,
    oldest first.
    """
    chain = [seen(rules.grant("r", None, owner="a", nonce="0", at=""))]
    for number, move in enumerate(script, 1):
        last = chain[-1]
        if isinstance(move, str):
            chain.append(seen(rules.grant("r", last, owner=move, nonce=str(number), at="")))
            continue
        pointer = last.pointer
        who = {"owner": pointer.owner, "epoch": pointer.epoch, "at": ""}
        listed = OpenAttempt(move.generation, move.attempt)
        announced = rules.announce(last, listed, ended=(), nonce=f"{number} open", **who)
        if isinstance(announced, Pointer):
            chain.append(last := seen(announced))
        new = rules.promote(last, move, sealed_epoch=pointer.epoch, nonce=str(number), **who)
        if isinstance(new, Pointer):
            chain.append(seen(new))
    return chain


@given(moves)
def test_a_chain_only_moves_forward(script: list[str | Published]) -> None:
    """I6, I8, I13."""
    chain = play(script)
    bodies = [encode(entry.pointer) for entry in chain]
    assert len(set(bodies)) == len(bodies)
    for old, new in pairwise(chain):
        before, after = old.pointer, new.pointer
        assert after.seq == before.seq + 1
        assert after.epoch == before.epoch + (after.kind == "grant")
        assert after.prev == old.prev
        if after.kind in ("grant", "open"):
            assert after.published == before.published
            assert after.open[: len(before.open)] == before.open
        else:
            assert [entry for entry in before.open if entry not in after.open] == [
                OpenAttempt("g", after.published.attempt if after.published else "")
            ]
            assert after.published is not None
            assert before.published is None or after.published.order > before.published.order


@given(moves, candidates, st.sampled_from(["a", "b"]), st.integers(1, 4), st.integers(1, 4))
def test_promotion_is_decided_in_one_way(
    script: list[str | Published], candidate: Published, owner: str, epoch: int, sealed_epoch: int
) -> None:
    current = play(script)[-1]
    old = current.pointer
    try:
        new = rules.promote(current, candidate, sealed_epoch=sealed_epoch, owner=owner, epoch=epoch, nonce="new", at="")
    except FencedError:
        assert (old.owner, old.epoch) != (owner, epoch) or sealed_epoch != epoch
        return
    if isinstance(new, Already):
        assert new.published == old.published
        assert new.published.attempt == candidate.attempt
        return
    assert (old.owner, old.epoch) == (owner, epoch)
    assert sealed_epoch == epoch
    newer = old.published is None or candidate.order > old.published.order
    listed = OpenAttempt(candidate.generation, candidate.attempt) in old.open
    assert (newer and listed) == isinstance(new, Pointer)


@given(moves, attempts, st.sets(attempts), st.sampled_from(["a", "b"]), st.integers(1, 4))
def test_the_list_of_open_attempts(
    script: list[str | Published], attempt: str, ended: set[str], owner: str, epoch: int
) -> None:
    current = play(script)[-1]
    old, who = current.pointer, {"owner": owner, "epoch": epoch, "nonce": "new", "at": ""}
    if (old.owner, old.epoch) != (owner, epoch):
        with pytest.raises(FencedError):
            rules.announce(current, OpenAttempt("g", attempt), ended=ended, **who)
        with pytest.raises(FencedError):
            rules.end(current, ended, **who)
        return
    listed = [entry.attempt for entry in old.open]
    new = rules.announce(current, OpenAttempt("g", attempt), ended=ended, **who)
    if attempt in listed:
        assert new is None
    else:
        assert isinstance(new, Pointer)
        assert [entry.attempt for entry in new.open] == [name for name in listed if name not in ended] + [attempt]
        assert new.published == old.published
    shorter = rules.end(current, ended, **who)
    if shorter is None:
        assert not ended & set(listed)
    else:
        assert [entry.attempt for entry in shorter.open] == [name for name in listed if name not in ended]


def test_a_retired_attempt_is_refused() -> None:
    current = play([])[-1]
    retired = Seen(msgspec.structs.replace(current.pointer, retired=("x",)), current.etag, current.version_id)
    candidate = Published("g", "x", Order(1, 1, 1), Pin("k", "v", 1, "d"))
    decided = rules.promote(retired, candidate, sealed_epoch=1, owner="a", epoch=1, nonce="n", at="")
    assert isinstance(decided, Refused)
    assert "retired" in decided.reason


@given(moves, st.integers(0, 12), st.booleans())
def test_a_swap_is_classified_by_its_history(script: list[str | Published], at: int, foreign: bool) -> None:
    """Whatever was written afterwards, a write is found if it is in the chain, and lost if another took its place."""
    chain = play(script)
    ours = chain[min(at, len(chain) - 1)].pointer
    if foreign:
        ours = msgspec.structs.replace(ours, nonce="never written")
    newest_first = chain[::-1]
    for length in range(1, len(chain) + 1):
        outcome = rules.classify_cas(ours, newest_first[:length])
        if outcome is not Cas.WALK:
            break
    if foreign:
        assert outcome is Cas.LOST
    else:
        assert outcome is (Cas.LANDED if ours == chain[-1].pointer else Cas.SUPERSEDED)


@given(moves, st.integers(0, 12))
def test_a_swap_is_undecided_until_its_place_is_taken(script: list[str | Published], back: int) -> None:
    """Also when a lagging replica shows a version older than the one that is to be replaced (race 14)."""
    chain = play(script)
    ours = rules.grant("r", chain[-1], owner="c", nonce="c", at="")
    shown = chain[max(0, len(chain) - 1 - back)]
    assert rules.classify_cas(ours, [shown]) is Cas.UNDECIDED


def test_nothing_under_the_pointer_key() -> None:
    first = rules.grant("r", None, owner="a", nonce="0", at="")
    assert rules.classify_cas(first, [None]) is Cas.UNDECIDED
    assert rules.classify_cas(rules.grant("r", seen(first), owner="b", nonce="1", at=""), [None]) is Cas.HIDDEN


def test_a_pruned_history_proves_nothing() -> None:
    chain = play(["a", "b", "a"])
    ours = msgspec.structs.replace(chain[1].pointer, nonce="never written")
    with pytest.raises(CorruptError, match="does not reach back to seq 2"):
        rules.classify_cas(ours, [chain[-1], None])


def test_known_epochs_never_fall() -> None:
    current = play(["a"])[-1]
    rules.check_known("r", None, None)
    rules.check_known("r", None, RunRecord("r"))
    rules.check_known("r", current, RunRecord("r", epoch=2))
    with pytest.raises(CorruptError, match="has held epoch 3"):
        rules.check_known("r", current, RunRecord("r", epoch=3))
    with pytest.raises(CorruptError, match="is gone"):
        rules.check_known("r", None, RunRecord("r", epoch=1))


# attempts


def record(serial: int, state: State, **fields: object) -> AttemptRecord:
    base = AttemptRecord(
        attempt=f"t{serial}",
        path="r/g",
        run="r",
        generation="g",
        kind="file",
        preset="auto",
        step=serial,
        opened_at=0.0,
        serial=serial,
        state=state,
        closed_at=None if state is State.OPEN else 1.0,
    )
    return msgspec.structs.replace(base, **fields)


PIN = Pin("k", "v", 1, "d")


@pytest.mark.parametrize(
    ("given_record", "step"),
    [
        (record(1, State.OPEN), Step.OPEN),
        (record(1, State.STAGED), Step.OPEN),
        (record(1, State.OPEN, opened_epoch=1), Step.WAIT),
        (record(1, State.STAGED, opened_epoch=1), Step.WAIT),
        (record(1, State.FLUSHED, opened_epoch=1), Step.REPORT),
        (record(1, State.FLUSHED, opened_epoch=1, report=PIN), Step.WAIT),
        (record(1, State.FLUSHED, opened_epoch=1, report=PIN, complete=True), Step.SEAL),
        (record(1, State.FLUSHED, opened_epoch=1, foreign=True, complete=True), Step.SEAL),
        (record(1, State.FLUSHED, opened_epoch=1, foreign=True), Step.WAIT),
        (record(1, State.FLUSHED, opened_epoch=1, shared="x"), Step.WAIT),
        (record(1, State.OPEN, opened_epoch=1, foreign=True), Step.WAIT),
        (record(1, State.SEALED, opened_epoch=1, report=PIN, complete=True, sealed_epoch=2), Step.TEST),
        (record(1, State.SEALED, opened_epoch=1, report=PIN, complete=True, sealed_epoch=1), Step.SEAL),
        (record(1, State.TESTED, opened_epoch=1, report=PIN, complete=True, sealed_epoch=1), Step.SEAL),
        (record(1, State.TESTED, opened_epoch=1, report=PIN, complete=True, sealed_epoch=2), Step.PROMOTE),
        (record(1, State.PUBLISHED, opened_epoch=1), Step.DONE),
        (record(1, State.ABANDONED), Step.DONE),
    ],
)
def test_next_step_in_epoch_two(given_record: AttemptRecord, step: Step) -> None:
    assert rules.next_step(given_record, 2) is step
    stops = step if step in (Step.OPEN, Step.DONE) else Step.WAIT
    assert rules.next_step(given_record, 2, publish=False) is stops


states = st.sampled_from(list(State)[:-1])
records = st.lists(st.tuples(states, st.booleans()), max_size=6).map(
    lambda given: [
        record(serial, state, opened_epoch=1 if opened else None, report=PIN, complete=True, sealed_epoch=1)
        for serial, (state, opened) in enumerate(given)
    ]
)


@given(records, st.randoms())
def test_one_attempt_at_a_time_in_the_order_of_the_saves(found: list[AttemptRecord], random: object) -> None:
    random.shuffle(shuffled := list(found))  # type: ignore[attr-defined]
    work = rules.next_attempt(shuffled, 1)
    if work is None:
        return
    attempt, step = work
    earlier = [other for other in found if other.serial < attempt.serial and not other.state.final]
    if step is Step.OPEN:
        assert all(other.opened_epoch is not None for other in earlier), "ordinals follow serials"
    else:
        assert all(other.state is State.OPEN and other.closed_at is None for other in earlier)


@given(records)
def test_local_bytes_go_only_with_a_reason(found: list[AttemptRecord]) -> None:
    """I19."""
    ids = rules.releasable(found)
    published = [attempt for attempt in found if attempt.state is State.PUBLISHED]
    for attempt in found:
        if attempt.attempt in ids:
            assert attempt.state.final
            assert attempt.state is State.PUBLISHED or any(p.serial > attempt.serial for p in published)
        else:
            assert attempt.state is not State.PUBLISHED
