"""Back to an older generation, with other writers of the pointer in between, and what the owner makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError, NotFoundError
from cachefs.formats.codec import encode
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.formats.records import State
from cachefs.publish import promotion, rules
from cachefs.publish.promotion import Identity
from cachefs.publish.rollback import RolledBack, rollback
from cachefs.publish.rules import Already, Refused
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen, history, locate, read_pointer
from cachefs.store.base import Condition
from cachefs.store.hop import Inline
from tests.conftest import DeclaredWarnings
from tests.publish.stage import RUN, Member, memory
from tests.publish.test_rules import candidates, moves, play
from tests.store.faults import FaultyStore, Held, Rule, conflict, lost_answer, lost_request, precondition_failed
from tests.store.faults import rules as faults

Members = Callable[..., Member]
WHO = Identity("operator")


# The rule.


@given(moves, candidates, st.sets(st.sampled_from(["x", "y", "z"])))
def test_a_rollback_changes_what_is_published_and_ends_what_is_open(
    script: list[str | Published], target: Published, retired: set[str]
) -> None:
    current = play(script)[-1]
    old = current.pointer
    new = rules.rollback(current, target, retired=retired, nonce="new", at="")
    if old.published is None:
        assert isinstance(new, Refused)
    elif old.published.attempt == target.attempt:
        assert new == Already(old.published)
    elif target.attempt in retired:
        assert isinstance(new, Refused)
        assert "retired" in new.reason
    else:
        assert isinstance(new, Pointer)
        assert (new.kind, new.published, new.rollback_of) == ("rollback", target, old.published.attempt)
        assert (new.epoch, new.owner, new.retired) == (old.epoch, old.owner, old.retired)
        assert (new.seq, new.prev, new.open) == (old.seq + 1, current.prev, ())


@given(moves, candidates)
def test_newer_steps_can_be_promoted_again(script: list[str | Published], target: Published) -> None:
    """The order of promotion looks at what is published now (I13: but for an explicit rollback)."""
    current = play(script)[-1]
    old = current.pointer
    new = rules.rollback(current, target, nonce="new", at="")
    if not isinstance(new, Pointer) or old.published is None:
        return
    back = Seen(new, "etag", "version")
    again = Published("g", "again", old.published.order, old.published.manifest)
    who = {"owner": new.owner, "epoch": new.epoch, "at": ""}
    opened = rules.announce(back, OpenAttempt("g", "again"), ended=(), nonce="n1", **who)
    assert isinstance(opened, Pointer)
    decided = rules.promote(Seen(opened, "e2", "v2"), again, sealed_epoch=new.epoch, nonce="n2", **who)
    assert isinstance(decided, Pointer) == (old.published.order > target.order)


# The effect.


async def published(member: Member, *steps: int) -> list[Published]:
    for step in steps:
        member.save(f"step-{step}", step)
    await member.publish()
    return [entry.published for entry in history(member.inner, member.keys, RUN)][::-1]


def writes(member: Member) -> Writes:
    return Writes(member.store, member.keys, Inline())


def pointer(member: Member) -> Pointer:
    seen = read_pointer(member.inner, member.keys, RUN)
    assert seen is not None
    return seen.pointer


def swap(member: Member, new: object) -> None:
    assert isinstance(new, Pointer)
    assert new.prev is not None
    member.inner.put(member.keys.pointer(RUN), encode(new), condition=Condition(if_match=new.prev.etag))


async def test_a_rollback_is_one_write_and_repeating_it_none(members: Members) -> None:
    member = members(FaultyStore(memory()))
    first, second = await published(member, 1, 2)
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    done = await rollback(writes(member), RUN, seen, target, WHO)
    assert isinstance(done, RolledBack)
    assert (done.left, done.now, done.ended) == (second, first, ())
    assert pointer(member) == done.pointer
    count = len(member.store.calls)
    seen, _ = locate(member.inner, member.keys, RUN, "step-1")
    assert await rollback(writes(member), RUN, seen, target, WHO) == Already(first)
    assert "put" not in [call.operation for call in member.store.calls[count:]]


@pytest.mark.parametrize(
    "fault",
    [lost_answer, lost_request, conflict, precondition_failed, Held(duplicate=True)],
    ids=["lost answer", "lost request", "409", "412", "copied"],
)
async def test_an_unclear_rollback_is_resolved(members: Members, fault) -> None:
    member = members(FaultyStore(memory()))
    first, _ = await published(member, 1, 2)
    seq = pointer(member).seq
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    member.store.plan = faults(Rule("put", fault))
    done = await rollback(writes(member), RUN, seen, target, WHO)
    assert isinstance(done, RolledBack)
    assert (pointer(member).published, pointer(member).seq) == (first, seq + 1)


async def test_a_rollback_that_is_overtaken_decides_again(members: Members) -> None:
    """The owner announces a save between the look and the write: the rollback ends that one, too."""
    member = members(FaultyStore(memory()))
    first, _ = await published(member, 1, 2)
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    who = {"owner": seen.pointer.owner, "epoch": seen.pointer.epoch, "nonce": "n", "at": ""}
    swap(member, rules.announce(seen, OpenAttempt("step-3", "t3"), ended=(), **who))
    done = await rollback(writes(member), RUN, seen, target, WHO)
    assert isinstance(done, RolledBack)
    assert done.ended == (OpenAttempt("step-3", "t3"),)
    assert (pointer(member).published, pointer(member).open) == (first, ())


@pytest.mark.parametrize("swept", [False, True])
async def test_a_target_that_was_retired_meanwhile_is_refused(members: Members, swept: bool) -> None:
    """Also when the collector was so quick that the pointer lists it no more."""
    member = members(FaultyStore(memory()))
    first, second, _ = await published(member, 1, 2, 3)
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    swap(member, rules.retire(seen, [first.attempt], nonce="n1", at=""))
    if swept:
        now, _ = locate(member.inner, member.keys, RUN)
        swap(member, rules.retire(now, [], swept=[first.attempt], nonce="n2", at=""))
    before = pointer(member)
    with pytest.raises(NotFoundError, match="retired by garbage collection"):
        await rollback(writes(member), RUN, seen, target, WHO)
    assert pointer(member) == before
    with pytest.raises(NotFoundError, match="any more"):
        locate(member.inner, member.keys, RUN, "step-1")
    assert locate(member.inner, member.keys, RUN, "step-2")[1] == second


async def test_a_history_with_a_hole_stops_a_rollback_that_was_overtaken(members: Members) -> None:
    member = members(FaultyStore(memory()))
    await published(member, 1, 2)
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    for number in (1, 2):
        now, _ = locate(member.inner, member.keys, RUN)
        swap(member, rules.grant(RUN, now, owner=f"n{number}", nonce=f"g{number}", at=""))
    now, _ = locate(member.inner, member.keys, RUN)
    assert now.pointer.prev is not None
    member.inner.delete_version(member.keys.pointer(RUN), now.pointer.prev.version_id)
    with pytest.raises(CorruptError, match="does not reach back"):
        await rollback(writes(member), RUN, seen, target, WHO)


# The owner.


async def test_the_owner_abandons_what_the_rollback_has_ended_and_goes_on(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    member = members()
    first, _ = await published(member, 1, 2)
    waiting = member.save("step-3", 3)
    member.flushes = False
    await member.publish(until=lambda: member.attempt(waiting).opened_epoch is not None)
    assert [entry.attempt for entry in pointer(member).open] == [waiting]
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    await rollback(writes(member), RUN, seen, target, WHO)
    member.flushes = True
    declared_warnings("generation abandoned .*ended by a rollback")
    await member.publish()
    record = member.attempt(waiting)
    assert record.state is State.ABANDONED
    assert "ended by a rollback" in record.error
    assert pointer(member).published == first
    again = member.save("step-2", 2)
    await member.publish()
    assert member.attempt(again).state is State.PUBLISHED
    assert member.generations() == ["step-1", "step-2", "step-1", "step-2"]
    assert member.shards(waiting) == []


async def test_a_promotion_that_comes_first_is_rolled_back_and_stays_published_for_its_owner(members: Members) -> None:
    """Race 5: its answer was lost, and the pointer names something older when the owner looks."""
    member = members(FaultyStore(memory()))
    first, second = await published(member, 1, 2)
    seen, target = locate(member.inner, member.keys, RUN, "step-1")
    await rollback(writes(member), RUN, seen, target, WHO)
    now = pointer(member)
    outcome = await promotion.promote(
        writes(member), RUN, second, Identity(now.owner), epoch=now.epoch, sealed_epoch=now.epoch
    )
    assert outcome == second
    assert pointer(member).published == first
