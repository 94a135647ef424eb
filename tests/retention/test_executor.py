"""Whole passes over a run in a store: what they delete, what they leave, and what disturbs them."""

from __future__ import annotations

import msgspec
import pytest

from cachefs.errors import (
    CachefsError,
    CorruptError,
    DeniedError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from cachefs.formats.pointer import OpenAttempt
from cachefs.publish import rules
from cachefs.publish.rules import Refused
from cachefs.publish.writes import Writes
from cachefs.restore.leases import LEASE_LIFE
from cachefs.restore.reader import find, history
from cachefs.retention.executor import Collector
from cachefs.retention.plan import Policy
from tests.publish.schedules import ParkingHop, Process
from tests.retention.world import DAY, HOUR, LEAST, World, deletes, hide, memory
from tests.store.faults import Crash, Rule, denied, ends, lost_answer, lost_request, throttled
from tests.store.faults import rules as faults

AT_ONCE = Policy(keep_last=1, keep_hourly=0, keep_daily=0, grace=0.0)


async def test_what_the_policy_does_not_keep_is_deleted(anywhere: World) -> None:
    world = anywhere
    old = world.saves(1, 2, 3, 4, every=0)
    done = await world.collect(AT_ONCE)
    assert done.retired == tuple(sorted(old[:2]))
    assert world.attempts() == set(old[2:])
    assert (done.deleted, done.aborted, done.waiting) == (8, 0, ())
    assert world.pointer.retired == ()
    world.check()
    again = await world.collect(AT_ONCE)
    assert (again.retired, again.deleted) == ((), 0)


async def test_freed_bytes_are_counted(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    before = sum(entry.size for entry in world.inner.list_versions(world.keys.attempts(world.run)))
    told: list[tuple[int, int]] = []
    done = await world.collect(progress=lambda objects, size: told.append((objects, size)))
    left = sum(entry.size for entry in world.inner.list_versions(world.keys.attempts(world.run)))
    assert done.freed == before - left > 0
    assert told == [(done.deleted, done.freed)]


async def test_nothing_else_is_touched(world: World) -> None:
    """Pointer versions, loose files, other runs, and what lies under `attempts/` without being an attempt."""
    world.saves(1, 2, 3, 4)
    loose = world.keys.loose(world.run, "log")
    foreign = f"{world.keys.attempts(world.run)}notes/readme"
    for key in (loose, foreign):
        world.inner.put(key, b"x", condition=None)
    other = World(world.inner, run="exp/b")
    other.saves(1, 2, 3, 4)
    world.wait(9 * DAY)
    before = {entry for entry in world.objects() if "/attempts/" not in entry[0]}
    neighbour = other.objects()
    done = await world.collect()
    assert done.deleted == 8
    after = world.objects()
    assert before <= after
    assert any(key == foreign for key, _ in after)
    assert other.objects() == neighbour
    assert all(call.version_id for call in world.store.calls if call.operation == "delete_version")


async def test_a_preview_changes_nothing(world: World) -> None:
    world.saves(1, 2, 3, 4)
    before = world.objects()
    plan = await world.collector(msgspec.structs.replace(LEAST, grace=0.0)).preview(world.run)
    assert [one.generation for one in plan.retire] == ["step-1", "step-2"]
    assert world.objects() == before
    assert not {"put", "delete_version"} & set(world.store.operations())


async def test_young_attempts_wait_by_the_clock_of_the_store(world: World) -> None:
    world.saves(1, 2, 3, every=0)
    world.wait(DAY - 1)
    assert (await world.collect()).retired == ()
    world.wait(1)
    assert len((await world.collect()).retired) == 1
    world.check()


async def test_an_upload_in_progress_is_young_and_then_aborted(world: World) -> None:
    """Uploads keep an attempt from being retired; of a retired one they are aborted."""
    first, *_ = world.saves(1, 2, 3)
    world.wait(DAY)
    key = world.keys.shard(world.run, first, "n1", "late", "late")
    world.inner.create_multipart(key)
    assert (await world.collect()).retired == ()
    world.wait(DAY)
    done = await world.collect()
    assert (done.retired, done.aborted) == ((first,), 1)
    assert world.inner.list_multiparts(world.keys.attempts(world.run)) == []
    assert world.pointer.retired == ()


async def test_open_attempts_stay_and_orphans_go(world: World) -> None:
    opened = world.open(7)
    world.seal(7, opened)
    orphan = world.open(8, announced=False)
    ended = world.open(9)
    world.swap(rules.end(world.seen, [ended], **world.who()))
    world.saves(1)
    world.wait(DAY)
    done = await world.collect()
    assert set(done.retired) == {orphan, ended}
    assert opened in world.attempts()


async def test_delete_markers_are_deleted_too(world: World) -> None:
    first, *_ = world.saves(1, 2, 3)
    hide(world, world.keys.open(world.run, first))
    world.wait(DAY)
    await world.collect()
    assert first not in world.attempts()
    assert world.pointer.retired == ()


async def test_old_wishes_and_expired_leases_go(world: World) -> None:
    world.saves(1, 2)
    old_wish, old_lease = world.wish("w1"), world.lease("t1")
    world.wait(2 * DAY)
    new_wish, new_lease = world.wish("w2"), world.lease("t2")
    await world.collect()
    left = {key for key, _ in world.objects("wanted/") | world.objects("leases/")}
    assert left == {new_wish, new_lease}
    assert not {old_wish, old_lease} & left


async def test_runs_that_are_not_there(world: World) -> None:
    with pytest.raises(NotFoundError, match="no run 'other'"):
        await world.collector().preview("other")
    world.saves(1)
    world.inner._versions.pop(world.keys.pointer(world.run))
    with pytest.raises(NotFoundError):
        await world.collect()


async def test_a_hidden_pointer_halts(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    hide(world, world.keys.pointer(world.run))
    with pytest.raises(CorruptError, match="existed and is gone"):
        await world.collect()
    assert deletes(world.store) == 0


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
    world.store.crash_after = world.store.effects + 2  # the clock, then the swap
    with pytest.raises(Crash):
        await world.collect()
    assert world.pointer.retired == (attempt,)
    refused = rules.promote(world.seen, published, sealed_epoch=world.owner[1], **world.who())
    assert isinstance(refused, Refused)
    assert "retired" in refused.reason


# Race 31: restore and garbage collection. The interleavings are in test_interleavings.py.


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

    await world.collect(plan=faults(Rule("delete_version", late)))
    assert world.pointer.retired == (first,)
    await world.collect()
    assert first not in world.attempts()
    assert world.pointer.retired == ()


# Race 33: an incomplete view deletes nothing.


def _newer(world: World, attempt: str) -> None:
    """Give the manifest of a generation bytes of a later format."""
    key = world.keys.manifest(world.run, attempt, opened=1, sealed=1)
    version = world.inner._versions[key][0]
    body = version.body.replace(b'"format":1', b'"format":2')
    world.inner._versions[key][0] = msgspec.structs.replace(version, body=body)


@pytest.mark.parametrize(
    ("rule", "error", "names"),
    [
        (Rule("get", throttled, key=ends("pointer.json"), nth=0), UnavailableError, "the pointer of run"),
        (Rule("get", denied, key=ends("pointer.json"), nth=3), DeniedError, "the history of run"),
        (Rule("get", throttled, key=ends("manifest.json"), nth=0), UnavailableError, "the manifest of step-"),
        (Rule("get", denied, key=ends("manifest.json"), nth=2), DeniedError, "the manifest of step-"),
        (Rule("list_versions", throttled, key=ends("attempts/"), nth=0), UnavailableError, "the list of attempts"),
        (Rule("list_versions", denied, key=ends("leases/"), nth=2), DeniedError, "the list of leases"),
        (Rule("list_multiparts", denied), DeniedError, "the list of attempts"),
        (Rule("get", denied, key=lambda key: "/leases/" in key), DeniedError, "the lease "),
    ],
    ids=[
        "pointer", "history", "manifests", "one manifest", "attempts", "leases after the swap", "uploads", "one lease",
    ],
)  # fmt: skip
async def test_what_cannot_be_read_stops_the_pass(
    world: World, rule: Rule, error: type[CachefsError], names: str
) -> None:
    world.saves(1, 2, 3, 4)
    world.wait(DAY)
    world.lease("t9")
    before = world.objects("attempts/")
    with pytest.raises(error, match=names):
        await world.collect(plan=faults(rule))
    assert deletes(world.store) == 0
    assert world.objects("attempts/") == before
    world.store.plan = faults()
    assert (await world.collect()).deleted == 8


async def test_a_listing_that_ends_after_a_page_stops_the_pass(world: World) -> None:
    """A store that yields some entries and fails then, as S3 does with the second page."""
    world.saves(1, 2, 3, 4)
    world.wait(DAY)

    def second_page(request):
        def pages():
            yield from list(request())[:3]
            raise UnavailableError("503 on page 2")

        return pages()

    # The double of the store makes a listing whole before it hands it out; S3 does not.
    world.store.list_versions = lambda prefix: (
        second_page(lambda: world.inner.list_versions(prefix))
        if prefix.endswith("attempts/")
        else world.inner.list_versions(prefix)
    )
    with pytest.raises(UnavailableError, match="the list of attempts of run 'exp/a': 503 on page 2"):
        await world.collect()
    assert deletes(world.store) == 0


@pytest.mark.parametrize("which", [0, 1, 2, 3])
async def test_a_manifest_of_a_later_format_stops_the_pass(world: World, which: int) -> None:
    attempts = world.saves(1, 2, 3, 4)
    world.wait(DAY)
    _newer(world, attempts[which])
    with pytest.raises(CorruptError, match=f"the manifest of step-{which + 1}"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_manifest_of_an_open_attempt_that_cannot_be_read_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    attempt = world.open(9)
    world.seal(9, attempt)
    _newer(world, attempt)
    world.wait(DAY)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_history_that_is_damaged_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    key = world.keys.pointer(world.run)
    old = world.inner._versions[key][1]
    world.inner._versions[key][1] = msgspec.structs.replace(old, body=b"{}")
    with pytest.raises(CorruptError, match="the history of run"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_lease_of_a_later_format_stops_the_pass(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    world.inner.put(world.keys.lease(world.run, "x"), b'{"format":2}\n', condition=None)
    with pytest.raises(CorruptError, match="is not a valid Lease"):
        await world.collect()
    assert deletes(world.store) == 0


async def test_a_history_that_a_lifecycle_rule_has_cut_off_keeps_what_it_named(world: World) -> None:
    attempts = world.saves(1, 2, 3, 4)
    key = world.keys.pointer(world.run)
    for version in list(world.inner._versions[key])[:4]:
        world.inner.delete_version(key, version.version_id)
    world.wait(DAY)
    done = await world.collect()
    assert done.retired == (attempts[1],)
    assert [one.attempt for one in done.plan.unknown] == [attempts[0]]
    assert attempts[0] in world.attempts()


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
        await world.collect(plan=faults(Rule("delete_version", denied, nth=3)))
    assert set(world.pointer.retired) == set(old[:2])
    assert (await world.collect()).deleted == 6
    assert world.attempts() == set(old[2:])
    assert world.pointer.retired == ()


# Race 36: shared shards.


async def test_shards_that_a_later_generation_reuses_stay(world: World) -> None:
    """They go when nothing names them any more."""
    first = world.open(1)
    base = world.shard(first, "base", b"frozen weights")
    world.promote(world.seal(1, first, reuse=[base]))
    world.wait(HOUR)
    second, third = world.save(2), world.save(3, reuse=[base])
    world.wait(DAY)
    done = await world.collect()
    assert (done.retired, done.deleted) == ((first,), 4)
    assert world.pointer.retired == (first,)
    assert world.readable(third)
    assert (await world.collect()).deleted == 0
    world.saves(4, 5)
    world.wait(DAY)
    done = await world.collect()
    assert set(done.retired) == {second.attempt, third.attempt}
    assert world.pointer.retired == ()
    assert len(world.attempts()) == 2
    world.check()


async def test_shards_that_a_sealed_open_attempt_reuses_stay(world: World) -> None:
    first = world.open(1)
    base = world.shard(first, "base", b"frozen weights")
    world.promote(world.seal(1, first, reuse=[base]))
    world.saves(2, 3)
    published = world.seal(9, world.open(9), reuse=[base])
    world.wait(DAY)
    assert (await world.collect()).retired == (first,)
    world.promote(published)
    world.check()


# Race 37: a crash after every effect.


@pytest.mark.parametrize(("shared", "effects"), [(False, 15), (True, 14)])
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


# What the pointer says afterwards.


async def test_readers_are_told_what_became_of_a_generation(world: World) -> None:
    world.saves(1, 2, 3)
    world.wait(DAY)
    await world.collect()
    assert [(entry.published.generation, entry.retired) for entry in history(world.inner, world.keys, world.run)] == [
        ("step-3", False),
        ("step-2", False),
        ("step-1", True),
    ]
    with pytest.raises(NotFoundError, match="'step-1' any more: garbage collection has removed it") as caught:
        find(world.inner, world.keys, world.run, "step-1")
    assert caught.value.hint == "published: step-3, step-2"


def test_what_is_published_or_open_cannot_be_retired(world: World) -> None:
    attempt, published = world.open(1), world.save(2)
    for one in (attempt, published.attempt):
        with pytest.raises(InvalidError, match=one):
            rules.retire(world.seen, [one], nonce="n", at="")
    assert rules.retire(world.seen, [], nonce="n", at="") is None


def test_retiring_twice_is_once(world: World) -> None:
    world.saves(1)
    world.swap(rules.retire(world.seen, ["x", "y"], nonce="n1", at=""))
    assert world.pointer.retired == ("x", "y")
    assert rules.retire(world.seen, ["y"], nonce="n2", at="") is None
    world.swap(rules.retire(world.seen, ["z"], swept=["x"], nonce="n3", at=""))
    assert world.pointer.retired == ("y", "z")
    assert (world.pointer.kind, world.pointer.open) == ("retire", ())
