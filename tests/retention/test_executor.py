"""Whole passes over a run in a store: what they delete, what they leave, and what the pointer says afterwards."""

from __future__ import annotations

import msgspec
import pytest

from cachefs.errors import InvalidError, NotFoundError
from cachefs.publish import rules
from cachefs.restore.reader import find, history
from cachefs.retention.plan import Policy
from tests.retention.world import DAY, HOUR, LEAST, World, hide

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
