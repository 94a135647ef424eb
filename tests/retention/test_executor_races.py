"""Passes over a run that others change, or that are cut short. RACES.md numbers the races; test_interleavings.py tries
every order of the requests of several processes.
"""

from __future__ import annotations

import pytest

from cachefs.errors import DeniedError
from cachefs.formats.pointer import OpenAttempt
from cachefs.publish import rules
from cachefs.publish.rules import Refused
from cachefs.publish.writes import Writes
from cachefs.restore.leases import LEASE_LIFE
from cachefs.restore.reader import versions
from cachefs.retention import executor
from cachefs.retention.executor import Collector
from tests.publish.schedules import ParkingHop, Process
from tests.retention.world import DAY, HOUR, LEAST, World, memory
from tests.store.faults import Crash, Rule, denied, ends, lost_answer, lost_request, throttled
from tests.store.faults import rules as faults

# Race 30: promotion and garbage collection.


async def test_a_promotion_before_the_swap_is_seen(world: World) -> None:
    """It looked orphaned and is promoted after the plan was made: the swap is lost, the new plan keeps it."""
    world.saves(1, 2)
    attempt = world.open(3)
    published = world.seal(3, attempt)
    world.swap(rules.end(world.seen, [attempt], **world.who()))
    world.wait(DAY)
    at_swap: list[str] = []

    def announce_and_promote(request):
        at_swap.append(world.pointer.kind)
        world.swap(rules.announce(world.seen, OpenAttempt("step-3", attempt), ended=(), **world.who()))
        world.promote(published)
        return request()

    done = await world.collect(plan=faults(Rule("put", announce_and_promote, key=ends("pointer.json"))))
    assert at_swap == ["end"]
    assert attempt not in done.retired
    assert world.pointer.published == published
    world.check()


async def test_a_promotion_after_the_swap_is_refused(world: World) -> None:
    world.saves(1, 2)
    attempt = world.open(3)
    published = world.seal(3, attempt)
    world.swap(rules.end(world.seen, [attempt], **world.who()))
    world.wait(DAY)
    world.store.crash_after = world.store.effects + 3  # the clock, the question whether it may delete, the swap
    with pytest.raises(Crash):
        await world.collect()
    assert world.pointer.retired == (attempt,)
    refused = rules.promote(world.seen, published, sealed_epoch=world.owner[1], **world.who())
    assert isinstance(refused, Refused)
    assert "retired" in refused.reason


# Race 31: restore and garbage collection.


async def test_a_lease_of_the_reader_keeps_what_it_reads(world: World) -> None:
    first, second, *_ = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    lease = world.lease(first)
    done = await world.collect()
    assert (done.retired, done.waiting) == ((second,), ())
    assert any(one.attempt == first and one.reasons == ("being read",) for one in done.plan.kept)
    [(key, version)] = [entry for entry in world.objects("leases/") if entry[0] == lease]
    world.inner.delete_version(key, version)
    assert (await world.collect()).retired == (first,)


async def test_a_reader_that_died_is_waited_for_as_long_as_a_lease_lives(world: World) -> None:
    first, *_ = world.saves(1, 2, 3)
    world.wait(DAY)
    world.lease(first)
    world.wait(LEASE_LIFE - 1)
    assert (await world.collect()).retired == ()
    world.wait(1)
    assert (await world.collect()).retired == (first,)
    assert first not in world.attempts()
    assert world.objects("leases/") == set()


async def test_a_lease_that_comes_after_the_plan_stops_the_sweep(world: World) -> None:
    first, *_ = world.saves(1, 2, 3)
    world.wait(DAY)

    def leased(request):
        world.lease(first)
        return request()

    done = await world.collect(plan=faults(Rule("put", leased, key=ends("pointer.json"))))
    assert (done.retired, done.waiting, done.deleted) == ((first,), (first,), 0)
    assert world.pointer.retired == (first,)
    world.wait(LEASE_LIFE)
    assert (await world.collect()).deleted == 4
    assert world.pointer.retired == ()


# Race 32: late creates.


async def test_a_late_object_of_a_retired_attempt_is_swept_by_a_later_pass(world: World) -> None:
    first, *_ = world.saves(1, 2, 3)
    world.wait(DAY)
    await world.collect()
    world.shard(first, "late", b"late")
    assert world.attempts() >= {first}
    assert (await world.collect()).retired == ()
    world.wait(DAY)
    done = await world.collect()
    assert (done.retired, done.deleted) == ((first,), 1)
    world.check()


async def test_an_object_that_lands_during_the_sweep_leaves_the_attempt_retired(world: World) -> None:
    first, *_ = world.saves(1, 2, 3)
    world.wait(DAY)

    def late(request):
        world.shard(first, "late", b"late")
        return request()

    await world.collect(plan=faults(Rule("delete_version", late, nth=2)))
    assert world.pointer.retired == (first,)
    await world.collect()
    assert first not in world.attempts()
    assert world.pointer.retired == ()


# Race 34: lost answers, and two passes at once.


async def test_a_pass_that_slept_deletes_nothing_that_lives_again(world: World) -> None:
    """It has seen an orphan retired and sleeps. Another pass finishes it; its owner opens it again under the same id,
    as a restarted daemon does, and publishes it. The sleeper lists the new objects, and must look before it deletes.
    """
    world.saves(1, 2)
    world.open(3, "orphan", announced=False)
    world.wait(DAY)
    published = []

    def meanwhile(request):
        world.store.plan = faults()
        other = Collector(Writes(world.inner, world.keys, ParkingHop()), LEAST, workers=1)
        Process("other", other.collect(world.run)).finish()
        assert "orphan" not in world.attempts()
        published.append(world.save(3, "orphan"))
        return request()

    done = await world.collect(plan=faults(Rule("list_versions", meanwhile, key=ends("orphan/"))))
    assert (done.retired, done.deleted) == (("orphan",), 0)
    assert world.pointer.published == published[0]
    world.check()


@pytest.mark.parametrize("fault", [lost_answer, lost_request, throttled])
@pytest.mark.parametrize(
    "operation", [("put", "pointer.json"), ("put", ".json"), ("delete_version", ""), ("list_versions", ""), ("get", "")]
)
async def test_an_unclear_answer_changes_nothing(world: World, fault, operation) -> None:
    old = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    name, key = operation
    done = await world.collect(plan=faults(*(Rule(name, fault, key=ends(key), nth=n) for n in (1, 2, 4))))
    assert done.deleted == 8
    assert world.attempts() == set(old[2:])
    assert world.pointer.retired == ()
    world.check()


async def test_a_delete_that_is_refused_ends_the_pass_and_the_next_one_goes_on(world: World) -> None:
    """An object lock, say: nothing is forgotten."""
    old = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    with pytest.raises(DeniedError):
        await world.collect(plan=faults(Rule("delete_version", denied, nth=4)))
    assert set(world.pointer.retired) == set(old[:2])
    assert (await world.collect()).deleted == 6
    assert world.attempts() == set(old[2:])
    assert world.pointer.retired == ()


async def test_who_may_not_delete_retires_nothing(world: World) -> None:
    """A daemon with the role of an owner, say: what it retires could be used by nobody, and would stay for ever."""
    old = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    with pytest.raises(DeniedError, match="so nothing was retired"):
        await world.collect(plan=faults(Rule("delete_version", denied, key=lambda key: "/attempts/" in key, nth=0)))
    assert (world.pointer.retired, world.attempts()) == ((), set(old))
    assert (await world.collect()).retired == tuple(old[:2])


async def test_retired_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer stays small however much there is to retire."""
    monkeypatch.setattr(executor, "RETIRED", 2)
    old = world.saves(*range(1, 8))
    world.wait(DAY)
    done = await world.collect()
    assert set(done.retired) == set(old[:5])
    assert world.attempts() == set(old[5:])
    pointers = list(versions(world.inner, world.keys, world.run))
    assert max(len(one.pointer.retired) for one in pointers) == 2
    assert pointers[0].pointer.retired == ()
    world.check()


async def test_what_never_changes_is_read_once(world: World) -> None:
    """A pointer that moves under the plan costs the reading of what is new; a second pass too."""
    world.saves(*range(1, 10))
    world.wait(DAY)
    length = world.pointer.seq
    collector = world.collector()
    reads: list[int] = []

    def moves(request):
        reads.append(len(world.store.calls))
        world.swap(rules.grant(world.run, world.seen, owner=f"o{len(reads)}", nonce=f"o{len(reads)}", at=world.at()))
        return request()

    world.store.calls.clear()
    world.store.plan = faults(Rule("put", moves, key=ends("pointer.json"), nth=1))
    await collector.collect(world.run)
    again = [call for call in world.store.calls[reads[0] :] if call.operation == "get"]
    assert len([call for call in world.store.calls if call.operation == "get"]) > length
    assert len([call for call in again if call.key.endswith("manifest.json")]) == 0
    assert len(again) < length
    world.store.calls.clear()
    await collector.collect(world.run)
    assert len([call for call in world.store.calls if call.operation == "get"]) < length / 2


# Race 37: a crash after every effect.


@pytest.mark.parametrize(("shared", "effects"), [(False, 16), (True, 15)])
async def test_a_crash_after_every_effect(shared: bool, effects: int) -> None:
    """The next pass finishes; nothing that is kept is ever lost, and nothing is left of the rest."""
    crashed = 0
    while True:
        world = World(memory())
        first = world.open(1)
        base = world.shard(first, "base", b"x")
        world.promote(world.seal(1, first, reuse=[base]))
        world.wait(HOUR)
        world.saves(2, 3)
        last = world.save(4, reuse=[base] if shared else [])
        world.inner.create_multipart(world.keys.shard(world.run, first, "n1", "up", "up"))
        world.lease("t9")
        world.wait(DAY)
        world.store.crash_after = crashed + 1
        try:
            await world.collect()
            break
        except Crash:
            crashed += 1
        world.check()
        world.store.crash_after, world.store.dead = None, False
        world.wait(DAY)
        await world.collect()
        world.check()
        assert world.pointer.published == last
        assert len(world.attempts()) == 2 + shared
        assert world.pointer.retired == ((first,) if shared else ())
        assert world.inner.list_multiparts("") == []
        assert world.objects("leases/") == set()
    assert crashed == effects
