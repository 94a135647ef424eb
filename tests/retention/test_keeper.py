"""The daemon's passes: over the runs it owns, again and again, whatever happens to one of them."""

from __future__ import annotations

import trio

from cachefs.errors import CachefsError
from cachefs.formats.records import State
from cachefs.publish.problems import Problems
from cachefs.publish.writes import Writes
from cachefs.retention.keeper import Counts, Keeper
from cachefs.store.hop import Inline
from tests.conftest import DeclaredWarnings
from tests.publish.stage import Member
from tests.publish.stage import memory as other_memory
from tests.retention.world import DAY, LEAST, World
from tests.store.faults import Rule, denied, ends, lost_request, rules


def keeper(world: World, *runs: str) -> Keeper:
    async def no_pause(error: CachefsError, retries: int) -> None:
        raise AssertionError("the keeper has its own patience")

    writes = Writes(world.store, world.keys, Inline(), no_pause)
    problems = Problems("garbage collection: ")
    return Keeper(writes, LEAST, lambda: runs or [world.run], Counts(), problems, interval=3600.0, holder="gc of n1")


async def test_passes_are_made_at_intervals(world: World) -> None:
    old = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    kept = keeper(world)
    with trio.move_on_after(10 * 3600):
        await kept.run()
    assert world.attempts() == set(old[2:])
    assert 10 <= kept.counts.passes <= 20
    assert (kept.counts.failures, kept.counts.deleted) == (0, 8)
    assert kept.counts.freed_bytes > 0


async def test_an_error_ends_one_pass_over_one_run(world: World, declared_warnings: DeclaredWarnings) -> None:
    other = World(world.inner, run="exp/b")
    for one in (world, other):
        one.saves(1, 2, 3)
    world.wait(DAY)
    world.store.plan = rules(Rule("get", denied, key=ends("exp/a/pointer.json"), nth=0))
    declared_warnings("a run does not move run=exp/a error=garbage collection: ")
    kept = keeper(world, world.run, other.run)
    for run in (world.run, other.run):
        await kept.one(run)
    assert (kept.counts.passes, kept.counts.failures) == (1, 1)
    assert (len(world.attempts()), len(other.attempts())) == (3, 2)


async def test_a_store_that_does_not_answer_is_given_up_until_the_next_pass(
    world: World, declared_warnings: DeclaredWarnings
) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    world.store.plan = rules(Rule("*", lost_request, nth=0))
    declared_warnings("a run does not move")
    kept = keeper(world)
    await kept.one(world.run)
    assert kept.counts == Counts(failures=1)
    world.store.plan = rules()
    await kept.one(world.run)
    assert kept.counts.deleted == 4


async def test_what_is_deleted_before_an_error_is_counted(world: World, declared_warnings: DeclaredWarnings) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    world.store.plan = rules(Rule("list_multiparts", denied, nth=3))
    declared_warnings("a run does not move")
    kept = keeper(world)
    await kept.one(world.run)
    assert (kept.counts.failures, kept.counts.deleted) == (1, 4)


async def test_an_attempt_whose_open_record_was_collected_is_abandoned(
    tmp_path, declared_warnings: DeclaredWarnings
) -> None:
    """Its owner slept for longer than the grace between the record and the announcement; then it finds out."""
    member = Member(tmp_path, other_memory())
    try:
        attempt = member.save("step-1", 1)
        member.flushes = False
        await member.publish(until=lambda: member.attempt(attempt).opened_epoch is not None)
        key = member.keys.open("exp/a", attempt)
        [version] = [entry.version_id for entry in member.inner.list_versions(key)]
        member.inner.delete_version(key, version)
        member.flushes = True
        declared_warnings("generation abandoned")
        await member.publish()
        assert member.attempt(attempt).state is State.ABANDONED
        assert "took the attempt for an orphan" in member.attempt(attempt).error
    finally:
        member.close()
