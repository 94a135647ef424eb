"""The process dies after every single effect of a publication, through each of the three doors, and starts again.

After any death the bucket shows each generation at most once and never half of it (I4, I5), and the next process
finishes the save (race 37): under a new epoch (I9), without writing any key twice (I1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cachefs.formats.records import State
from cachefs.journal import Journal
from cachefs.restore.reader import history, load_manifest, versions
from cachefs.restore.verify import verify
from cachefs.staging.pins import Pins
from tests.publish.owners import check_successor
from tests.publish.stage import RUN, TREE, Member, memory
from tests.store.faults import Crash, FaultyStore, Rule, crash_before, rules

Members = Callable[..., Member]

STORE_EFFECTS = 8
"""grant, open, close, report, manifest, test, promotion"""
JOURNAL_EFFECTS = 7
"""grant, open, report, sealed, tested, published, shard records dropped"""


class Door:
    """Dies at the nth effect, before or after it, and stays dead."""

    def __init__(self, nth: int, *, before: bool) -> None:
        self.left = nth
        self.before = before
        self.count = 0

    def enter(self) -> bool:
        """Count an effect; return whether to die after it."""
        if self.left <= 0:
            raise Crash
        self.left -= 1
        self.count += 1
        if self.left == 0 and self.before:
            raise Crash
        return self.left == 0


class DyingJournal:
    def __init__(self, inner: Journal, door: Door) -> None:
        self._inner = inner
        self._door = door
        self.read = inner.read

    async def write(self, fn: Callable[[Any], Any]) -> Any:
        last = self._door.enter()
        result = await self._inner.write(fn)
        if last:
            raise Crash
        return result


class DyingPins:
    def __init__(self, inner: Pins, door: Door) -> None:
        self._door = door
        self._inner = inner
        self.open = inner.open

    def drop_attempt(self, attempt: str) -> None:
        last = self._door.enter()
        self._inner.drop_attempt(attempt)
        if last:
            raise Crash


def check(member: Member) -> None:
    """Check what a restore job would find now."""
    chain = list(versions(member.inner, member.keys, RUN))[::-1]
    before = None
    for seen in chain:
        check_successor(before, seen.pointer)
        before = (seen.pointer, seen.etag, seen.version_id)
    owners = [seen.pointer.owner for seen in chain if seen.pointer.kind == "grant"]
    assert len(set(owners)) == len(owners), "a process took two epochs"
    entries = list(history(member.inner, member.keys, RUN))
    assert len({entry.published.generation for entry in entries}) == len(entries)
    for entry in entries:
        verify(member.inner, load_manifest(member.inner, RUN, entry.published), "bytes", workers=1)
    created = [entry.key for entry in member.inner.list_versions(member.keys.attempts(RUN))]
    assert len(created) == len(set(created)), "a create-only key has two versions"


async def finish(member: Member, attempt: str) -> None:
    """Run a new process to the end, and check what is left."""
    check(member)
    assert not await member.publish()
    check(member)
    assert member.attempt(attempt).state is State.PUBLISHED
    assert member.generations() == ["step-1"]
    assert member.shards(attempt) == []
    assert member.pins.shards(attempt) == set()


@pytest.mark.parametrize("nth", range(1, STORE_EFFECTS + 1))
@pytest.mark.parametrize("before", [True, False])
async def test_death_at_a_store_effect(members: Members, nth: int, before: bool) -> None:
    if before:
        store = FaultyStore(memory(), rules(Rule("put", crash_before, nth=nth)))
    else:
        store = FaultyStore(memory(), crash_after=nth)
    member = members(store)
    attempt = member.save("step-1", 1, **TREE)
    assert await member.publish()
    await finish(member.restart(), attempt)


@pytest.mark.parametrize("nth", range(1, JOURNAL_EFFECTS + 1))
@pytest.mark.parametrize("before", [True, False])
async def test_death_at_a_journal_write(members: Members, nth: int, before: bool) -> None:
    member = members()
    attempt = member.save("step-1", 1)
    assert await member.publish(journal=DyingJournal(member.journal, Door(nth, before=before)))
    await finish(member.restart(), attempt)


@pytest.mark.parametrize("before", [True, False])
async def test_death_while_pins_are_dropped(members: Members, before: bool) -> None:
    member = members()
    attempt = member.save("step-1", 1)
    assert await member.publish(pins=DyingPins(member.pins, Door(1, before=before)))
    await finish(member.restart(), attempt)


async def test_these_are_all_effects(members: Members) -> None:
    store = FaultyStore(memory())
    member = members(store)
    attempt = member.save("step-1", 1)
    door = Door(1000, before=False)
    assert not await member.publish(journal=DyingJournal(member.journal, door))
    assert store.effects == STORE_EFFECTS
    assert door.count == JOURNAL_EFFECTS
    await finish(member.restart(), attempt)


@pytest.mark.parametrize("first", range(1, STORE_EFFECTS + 1))
async def test_two_deaths(members: Members, first: int) -> None:
    """The second process dies as well, after each of its own effects."""
    for second in range(1, STORE_EFFECTS):
        store = FaultyStore(memory(), crash_after=first)
        member = members(store, name=f"n{first}-{second}")
        attempt = member.save("step-1", 1)
        assert await member.publish()
        member = member.restart(FaultyStore(store.inner, crash_after=second))
        await member.publish()
        await finish(member.restart(), attempt)


@pytest.mark.parametrize("nth", range(1, 2 * STORE_EFFECTS))
async def test_death_between_two_saves(members: Members, nth: int) -> None:
    """Two saves in a row: the first is never lost to the second, and neither is seen twice."""
    store = FaultyStore(memory(), crash_after=nth)
    member = members(store)
    both = [member.save("step-1", 1), member.save("step-2", 2)]
    assert await member.publish()
    member = member.restart()
    check(member)
    await member.publish()
    check(member)
    assert member.generations() == ["step-1", "step-2"]
    assert [member.attempt(attempt).state for attempt in both] == [State.PUBLISHED] * 2


async def test_published_and_overtaken_before_the_journal_knew(members: Members) -> None:
    """Race 5 over a restart: the promotion landed, the process died, another node published a later step. The save was
    published, and is recorded as that: not as superseded.
    """
    store = FaultyStore(memory(), crash_after=STORE_EFFECTS)
    member = members(store)
    attempt = member.save("step-1", 1)
    assert await member.publish()
    other = members(store.inner, name="n2")
    other.save("step-2", 2)
    await other.publish()
    member = member.restart()
    await member.publish()
    assert member.attempt(attempt).state is State.PUBLISHED
    assert member.generations() == ["step-1", "step-2"]
