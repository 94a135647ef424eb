"""Epochs: taken once per process, lost to others, never bootstrapped again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from cachefs.errors import CorruptError, FencedError, UnavailableError
from cachefs.flush.plan import uploads
from cachefs.formats.codec import encode
from cachefs.formats.keys import Keys
from cachefs.formats.records import RunRecord, State
from cachefs.publish import rules as pointer_rules
from cachefs.publish.ownership import Ownership, lift_fences
from cachefs.publish.problems import Problems
from cachefs.publish.rules import effective_state
from cachefs.restore.reader import read_pointer
from cachefs.store.base import CREATE_ONLY, Condition
from cachefs.store.memory import MemoryStore, _Version
from tests.conftest import DeclaredWarnings
from tests.publish.stage import RUN, Member, memory
from tests.store.faults import FaultyStore, Rule, denied, ends, lost_answer, rules, throttled

Members = Callable[..., Member]


def run_record(member: Member) -> RunRecord:
    with member.journal.read() as txn:
        record = txn.runs.get(RUN)
    assert record is not None
    return record


def pointer(member: Member) -> Any:
    seen = read_pointer(member.inner, member.keys, RUN)
    assert seen is not None
    return seen.pointer


async def run_for(seconds: float, member: Member, ownership: Ownership) -> None:
    """Run a publisher for some time."""
    async with trio.open_nursery() as nursery:
        await nursery.start(member.publisher(ownership=ownership).run)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()


def hide_pointer(member: Member) -> None:
    """Put a delete marker on the pointer, past the store's door that lets nobody do that."""
    store = member.inner
    assert isinstance(store, MemoryStore)
    order = store._next()
    store._insert(member.keys.pointer(RUN), _Version(order, f"v{order:06d}", 0.0))


async def test_each_process_takes_one_epoch(members: Members) -> None:
    """I9."""
    member = members()
    first = member.ownership()
    assert [await first.acquire(RUN), await first.acquire(RUN)] == [1, 1]
    second = member.ownership()
    assert await second.acquire(RUN) == 2
    assert run_record(member).owner == second.owner != first.owner
    assert pointer(member).seq == 2


async def test_callers_at_the_same_time_share_one_grant(members: Members) -> None:
    member = members()
    ownership = member.ownership()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ownership.acquire, RUN)
    assert pointer(member).epoch == 1


async def test_an_open_grant_is_found_again(members: Members, declared_warnings: DeclaredWarnings) -> None:
    """The answer to the grant is lost, and then the credentials are refused: the next try finds the grant."""
    store = FaultyStore(memory(), rules(Rule("put", lost_answer), Rule("get", denied, nth=2)))
    member = members(store)
    ownership = member.ownership()
    with pytest.raises(Exception, match="AccessDenied"):
        await ownership.acquire(RUN)
    assert await ownership.acquire(RUN) == 1
    assert pointer(member).seq == 1


@pytest.mark.parametrize("later", [0, 1], ids=["by the newest owner", "by one before it"])
async def test_an_open_grant_that_was_followed_is_a_lost_run(
    members: Members, declared_warnings: DeclaredWarnings, later: int
) -> None:
    """The answer to the grant is lost, and the run as well before this process looks again: it takes no second one."""
    declared_warnings("run fenced")
    store = FaultyStore(memory(), rules(Rule("put", lost_answer), Rule("get", denied, nth=2)))
    member = members(store)
    ownership = member.ownership()
    with pytest.raises(Exception, match="AccessDenied"):
        await ownership.acquire(RUN)
    for number in range(later + 1):
        _grant_to(store, f"n2/other-{number}")
    with pytest.raises(FencedError, match=f"n2/other-{later}"):
        await ownership.acquire(RUN)
    assert ownership.epoch(RUN) is None
    assert pointer(member).owner == f"n2/other-{later}"
    assert await member.ownership().acquire(RUN) == later + 3, "a restart of the daemon takes it back"


async def test_a_grant_that_never_landed_loses_nothing(members: Members) -> None:
    """The next try takes the run, whoever has been granted it meanwhile."""
    store = FaultyStore(memory(), rules(Rule("put", denied)))
    member = members(store)
    ownership = member.ownership()
    with pytest.raises(Exception, match="AccessDenied"):
        await ownership.acquire(RUN)
    for number in range(2):
        _grant_to(store, f"n2/other-{number}")
    assert await ownership.acquire(RUN) == 3


def _grant_to(store: FaultyStore, owner: str) -> None:
    seen = read_pointer(store.inner, Keys(), RUN)
    grant = pointer_rules.grant(RUN, seen, owner=owner, nonce=owner, at="")
    condition = CREATE_ONLY if seen is None else Condition(if_match=seen.etag)
    store.inner.put(Keys().pointer(RUN), encode(grant), condition=condition)


async def test_a_hidden_pointer_halts_the_run(members: Members, declared_warnings: DeclaredWarnings) -> None:
    """Race 8: with and without a journal that knows the run, and healed by removing the marker."""
    declared_warnings("publication waits")
    member = members()
    member.save("step-1", 1)
    await member.publish()
    hide_pointer(member)
    stranger = members(member.inner, name="n2")
    for owner in (member.ownership(), stranger.ownership()):
        with pytest.raises(CorruptError, match=r"hidden by a delete marker"):
            await owner.acquire(RUN)
    waiting = member.save("step-2", 2)
    await member.publish(until=lambda: bool(member.attempt(waiting).error))
    assert "delete marker" in member.attempt(waiting).error
    entries = list(member.inner.list_versions(member.keys.pointer(RUN)))
    assert [entry.is_marker for entry in entries] == [True, False, False, False]
    member.inner.delete_version(entries[0].key, entries[0].version_id)
    await member.publish()
    assert member.generations() == ["step-1", "step-2"]


async def test_a_pointer_older_than_the_journal_halts_the_run(members: Members) -> None:
    member = members()
    await member.ownership().acquire(RUN)
    member.journal.write_now(lambda txn: txn.runs.put(RUN, RunRecord(RUN, epoch=7)))
    with pytest.raises(CorruptError, match="epoch 1, but this daemon has held epoch 7"):
        await member.ownership().acquire(RUN)


async def test_the_watch_fences_a_lost_run(members: Members, declared_warnings: DeclaredWarnings) -> None:
    declared_warnings("run fenced")
    member = members()
    ownership = member.ownership(poll=10)
    await ownership.acquire(RUN)
    other = members(member.inner, name="n2").ownership()
    await other.acquire(RUN)
    with trio.move_on_after(25):
        await ownership.watch()
    assert run_record(member).fenced_by == f"{other.owner} (epoch 2)"
    with pytest.raises(FencedError, match="n2/"):
        await ownership.acquire(RUN)
    assert pointer(member).owner == other.owner, "a fenced process does not take the run back"
    again = member.ownership()
    assert await again.acquire(RUN) == 3
    assert run_record(member).fenced_by == ""


async def test_every_process_of_a_daemon_takes_an_epoch(members: Members) -> None:
    """I9, when nobody else wants the run: also when the last grant did not get into the journal."""
    member = members()
    first, second, third = (member.ownership(incarnation="day") for _ in range(3))
    assert await first.acquire(RUN) == 1
    granted = run_record(member)
    assert (granted.incarnation, granted.owner) == ("day", first.owner)
    assert await second.acquire(RUN) == 2
    member.journal.write_now(lambda txn: txn.runs.put(RUN, granted))
    assert await third.acquire(RUN) == 3
    owners = {first.owner, second.owner, third.owner}
    assert len(owners) == 3
    assert all(owner.startswith("n1/day/") for owner in owners)


async def test_a_fenced_daemon_stays_fenced_in_its_next_process(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """A save is waiting all the time: only a new daemon takes the run over and publishes it."""
    declared_warnings("run fenced")
    member = members()
    first = member.ownership(incarnation="day")
    await first.acquire(RUN)
    other = members(member.inner, name="n2").ownership()
    await other.acquire(RUN)
    await first.check(RUN)
    assert run_record(member).incarnation == "day"
    attempt = member.save("step-1", 1)
    for _ in range(2):
        member = member.restart()
        again = member.ownership(incarnation="day")
        assert again.fenced_by(RUN) == f"{other.owner} (epoch 2)"
        with pytest.raises(FencedError, match=r"taken over by n2/.*\(epoch 2\)"):
            await again.acquire(RUN)
        await run_for(100, member, again)
        assert pointer(member).owner == other.owner
        assert member.attempt(attempt).opened_epoch is None
        assert effective_state(member.attempt(attempt), run_record(member)) is State.FENCED
    member = member.restart()
    await member.publish(ownership=member.ownership(incarnation="night"))
    assert member.generations() == ["step-1"]
    assert (pointer(member).epoch, run_record(member).fenced_by) == (3, "")
    assert run_record(member).incarnation == "night"
    member.close()


async def test_a_run_lost_while_no_process_looked_is_not_taken_back(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """The process died, and another owner came before the next one: found at the first need, in the record then."""
    declared_warnings("run fenced")
    member = members()
    await member.ownership(incarnation="day").acquire(RUN)
    other = members(member.inner, name="n2").ownership()
    await other.acquire(RUN)
    attempt = member.save("step-1", 1)
    member = member.restart()
    again = member.ownership(incarnation="day")
    assert again.fenced_by(RUN) == "", "nobody has looked yet"
    await run_for(100, member, again)
    record = run_record(member)
    assert (record.fenced_by, record.incarnation, record.epoch) == (f"{other.owner} (epoch 2)", "day", 1)
    assert pointer(member).owner == other.owner
    assert (member.attempt(attempt).opened_epoch, member.attempt(attempt).error) == (None, "")
    with pytest.raises(FencedError, match="taken over by n2/"):
        await member.ownership(incarnation="day").acquire(RUN)
    assert await member.ownership(incarnation="night").acquire(RUN) == 3
    member.close()


@pytest.mark.parametrize("at", ["before the grant", "after the grant"])
async def test_a_run_lost_during_the_grant_is_not_taken_back(
    members: Members, declared_warnings: DeclaredWarnings, at: str
) -> None:
    """The second process sees its daemon own the run, and another owner comes just before or just after its grant."""
    declared_warnings("run fenced")
    store = FaultyStore(memory())
    member = members(store)
    await member.ownership(incarnation="day").acquire(RUN)

    def overtaken(request: Callable[[], Any]) -> Any:
        if at == "after the grant":
            request()
        _grant_to(store, "n2/other")
        if at == "before the grant":
            return request()
        raise UnavailableError("no answer")

    store.plan = rules(Rule("put", overtaken, key=ends("pointer.json")))
    again = member.ownership(incarnation="day")
    with pytest.raises(FencedError, match="n2/other"):
        await again.acquire(RUN)
    assert pointer(member).owner == "n2/other"
    assert run_record(member).fenced_by.startswith("n2/other (epoch ")
    assert again.epoch(RUN) is None
    await again.check(RUN)  # holds nothing: no reason to look


async def test_a_fence_of_another_daemon_is_lifted(members: Members) -> None:
    """Also one from a journal that does not say whose it is."""
    member = members()
    await member.ownership().acquire(RUN)
    fenced = RunRecord(RUN, epoch=1, owner="n1/old", fenced_by="n2/x (epoch 2)")
    member.journal.write_now(lambda txn: txn.runs.put(RUN, fenced))
    ownership = member.ownership()
    assert ownership.fenced_by(RUN) == ""
    assert await ownership.acquire(RUN) == 2
    assert run_record(member).fenced_by == ""


async def test_a_failing_look_is_shown_and_fences_nothing(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    declared_warnings("a run does not move")
    store = FaultyStore(memory())
    member = members(store)
    problems = Problems()
    ownership = member.ownership(poll=10, problems=problems)
    await ownership.acquire(RUN)
    store.plan = rules(Rule("get", throttled, key=ends("pointer.json"), nth=0))
    with trio.move_on_after(25):
        await ownership.watch()
    assert [(one.run, "SlowDown" in one.error) for one in problems.all()] == [(RUN, True)]
    assert run_record(member).fenced_by == ""
    store.plan = rules()
    with trio.move_on_after(25):
        await ownership.watch()
    assert problems.all() == ()


async def test_a_stale_owner_cannot_publish(members: Members, declared_warnings: DeclaredWarnings) -> None:
    """Race 2: another process is granted the run between this one's check and its write. It stops; its data stays."""
    declared_warnings("run fenced")

    def taken_over(request: Callable[[], Any]) -> Any:
        seen = read_pointer(store.inner, Keys(), RUN)
        assert seen is not None
        grant = pointer_rules.grant(RUN, seen, owner="n2/other", nonce="other", at="")
        key = Keys().pointer(RUN)
        store.inner.put(key, encode(grant), condition=Condition(if_match=seen.etag))
        return request()

    store = FaultyStore(memory(), rules(Rule("put", taken_over, key=ends("pointer.json"), nth=3)))
    member = members(store)
    attempt = member.save("step-1", 1)
    ownership = member.ownership(poll=1e9)
    async with trio.open_nursery() as nursery:
        await nursery.start(member.publisher(ownership=ownership).run)
        while not ownership.fenced_by(RUN):  # noqa: ASYNC110  (the record is what is waited for)
            await trio.sleep(1)
        later = member.save("step-2", 2)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert run_record(member).fenced_by == "n2/other (epoch 2)"
    assert member.generations() == []
    assert member.attempt(attempt).state is State.TESTED
    assert member.attempt(later).opened_epoch is None, "a fenced run sends nothing"
    assert len(member.pins.shards(attempt)) == 3
    member = member.restart()
    await member.publish()
    assert member.generations() == ["step-1", "step-2"]
    assert pointer(member).epoch == 3
    member.close()


async def test_a_fence_ends_with_the_ownership(members: Members, declared_warnings: DeclaredWarnings) -> None:
    """An owner that lost a run and was started again as a plain member has nothing to lose: its files are sent."""
    declared_warnings("run fenced")
    member = members()
    first = member.ownership()
    await first.acquire(RUN)
    await members(member.inner, name="n2").ownership().acquire(RUN)
    await first.check(RUN)
    attempt = member.save("step-1", 1, opened_epoch=2, shared="theirs")
    assert not uploads(member.attempt(attempt), run_record(member))
    member.journal.write_now(lift_fences)
    assert uploads(member.attempt(attempt), run_record(member))
    assert effective_state(member.attempt(attempt), run_record(member)) is State.STAGED
    assert run_record(member).epoch == 1  # it still must not fall
