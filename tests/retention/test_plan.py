"""The pure plan: what stays, for any run and any policy."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CorruptError
from cachefs.formats.manifest import Manifest, Order, Pin, Shard
from cachefs.formats.pointer import OpenAttempt, Pointer, Published
from cachefs.restore.reader import Entry, Seen
from cachefs.retention.plan import DAY, HOUR, Plan, Policy, Stored, View, decide, sealed_at
from tests.retention.world import START, Time

PIN = Pin("k", "v", 1, "d")


def entry(attempt: str, step: int, *, retired: bool = False) -> Entry:
    published = Published(f"step-{step}", attempt, Order(step, 1, 1), PIN)
    return Entry(published, "promote", step, 1, "o", "", retired)


def manifest(attempt: str, seconds: float, shards: tuple[tuple[str, str], ...] = ()) -> Manifest:
    return Manifest(
        run="r", generation="g", attempt=attempt, kind="directory", order=Order(1, 1, 1), epoch=1, owner="o",
        preset="", members=(), symlinks=(), directories=(), trackers=(),
        shards=tuple(Shard(("p",), "m", Pin(key, version, 1, ""), 1, (), 0, 0) for key, version in shards),
        sealed_at=datetime.fromtimestamp(START + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )  # fmt: skip


def view(times: dict[str, float], **changes: Any) -> View:
    """Return a view of a run whose generations, newest first, were sealed at `times`, and that lies still for long."""
    entries = tuple(entry(attempt, len(times) - number) for number, attempt in enumerate(times))
    pointer = Pointer(
        run="r", kind="promote", seq=9, epoch=1, owner="o", nonce="", at="", published=entries[0].published
    )
    made = View(
        seen=Seen(changes.pop("pointer", pointer), "e", "v"),
        history=entries,
        complete=True,
        listed=frozenset(times),
        manifests={attempt: manifest(attempt, seconds) for attempt, seconds in times.items()},
        reused=frozenset(),
        stored={attempt: Stored(3, 10, START, True) for attempt in times},
        leased=frozenset(),
        now=START + 1000 * DAY,
    )
    return msgspec.structs.replace(made, **changes)


def kept(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {one.attempt: one.reasons for one in plan.kept}


def retired(plan: Plan) -> list[str]:
    return [one.attempt for one in plan.retire]


NOTHING = Policy(keep_last=0, keep_hourly=0, keep_daily=0)


def test_the_published_one_and_the_one_before_stay_whatever_the_policy() -> None:
    plan = decide(view({"c": 2, "b": 1, "a": 0}), NOTHING)
    assert kept(plan) == {"c": ("published",), "b": ("published before",)}
    assert retired(plan) == ["a"]


def test_the_last_ones_stay() -> None:
    plan = decide(view({"d": 3, "c": 2, "b": 1, "a": 0}), msgspec.structs.replace(NOTHING, keep_last=3))
    assert sorted(kept(plan)) == ["b", "c", "d"]


def test_the_newest_of_each_hour_stays() -> None:
    times = {f"{number}": 60.0 * (200 - 20 * number) for number in range(11)}  # every 20 minutes, 200 to 0
    plan = decide(view(times), msgspec.structs.replace(NOTHING, keep_hourly=3))
    hourly = {attempt for attempt, reasons in kept(plan).items() if "newest of its hour" in reasons}
    # The slots of the clock: 180 to 200 min, 120 to 160, 60 to 100, and of 0 to 40 what is less than 3 hours old.
    assert {60.0 * (200 - 20 * int(attempt)) for attempt in hourly} == {60.0 * at for at in (200, 160, 100, 40)}


def test_the_newest_of_each_day_stays() -> None:
    times = {f"{number}": 10 * DAY - number * 6 * HOUR for number in range(40)}
    plan = decide(view(times), msgspec.structs.replace(NOTHING, keep_daily=2))
    daily = {times[attempt] / DAY for attempt, reasons in kept(plan).items() if "newest of its day" in reasons}
    assert daily == {10, 9.75, 8.75}


def test_a_clock_that_is_ahead_does_not_make_the_others_old() -> None:
    """A manifest from the future counts as of now, by the store's clock."""
    times = {"c": 365 * DAY, "b": HOUR, "a": 0}
    old = {attempt: Stored(1, 1, START - 9 * DAY, True) for attempt in times}
    plan = decide(view(times, now=START + 2 * HOUR, stored=old), Policy(keep_last=0, keep_hourly=24, keep_daily=0))
    assert sorted(kept(plan)) == ["a", "b", "c"]


def test_readers_and_open_attempts_are_left_alone() -> None:
    times = {"d": 3, "c": 2, "b": 1, "a": 0}
    opened = msgspec.structs.replace(view(times).seen.pointer, open=(OpenAttempt("step-9", "x"),))
    stored = {attempt: Stored(1, 1, START, True) for attempt in [*times, "x", "y"]}
    plan = decide(view(times, pointer=opened, leased=frozenset("a"), stored=stored), NOTHING)
    assert kept(plan)["a"] == ("being read",)
    assert kept(plan)["x"] == ("open",)
    assert retired(plan) == ["b", "y"]


def test_what_was_written_lately_is_not_retired_yet() -> None:
    stored = {"c": Stored(1, 1, START, True), "b": Stored(1, 1, START, True), "a": Stored(1, 1, START + 50, True)}
    times = {"c": 2, "b": 1, "a": 0}
    policy = msgspec.structs.replace(NOTHING, grace=100.0)
    assert retired(decide(view(times, stored=stored, now=START + 149), policy)) == []
    assert [one.attempt for one in decide(view(times, stored=stored, now=START + 149), policy).young] == ["a"]
    assert retired(decide(view(times, stored=stored, now=START + 150), policy)) == ["a"]


def test_what_is_not_an_attempt_is_not_touched() -> None:
    stored = {"b": Stored(1, 1, 0, True), "a": Stored(1, 1, 0, True), "foreign": Stored(1, 1, 0, False)}
    plan = decide(view({"b": 1, "a": 0}, stored=stored), NOTHING)
    assert (plan.retire, plan.young, plan.unknown) == ((), (), ())


def test_a_history_that_is_cut_off_leaves_what_it_does_not_know() -> None:
    """A lifecycle rule may have removed old versions of the pointer: an attempt it named then looks like an orphan."""
    times = {"c": 2, "b": 1, "a": 0}
    stored = {attempt: Stored(1, 1, 0, True) for attempt in [*times, "x"]}
    plan = decide(view(times, stored=stored, complete=False), NOTHING)
    assert (retired(plan), [one.attempt for one in plan.unknown]) == (["a"], ["x"])


def test_shards_named_by_what_stays_are_named() -> None:
    """Race 36: a newer generation reuses a shard of an older one."""
    times = {"c": 2, "b": 1, "a": 0}
    manifests = {
        "c": manifest("c", 2, (("c/1", "v"), ("a/1", "v"))),
        "b": manifest("b", 1, (("b/1", "v"),)),
        "a": manifest("a", 0, (("a/1", "v"), ("a/2", "v"))),
    }
    plan = decide(view(times, manifests=manifests, reused=frozenset({("a/3", "v")})), NOTHING)
    assert retired(plan) == ["a"]
    assert plan.named == {("c/1", "v"), ("a/1", "v"), ("b/1", "v"), ("a/3", "v")}


def test_a_manifest_without_a_time_is_not_guessed_about() -> None:
    broken = msgspec.structs.replace(manifest("a", 0), sealed_at="yesterday")
    with pytest.raises(CorruptError, match="no time: 'yesterday'"):
        decide(view({"a": 0}, manifests={"a": broken}), NOTHING)
    assert sealed_at(manifest("a", 5)) == Time().now + 5


# for any run

ids = st.integers(0, 7).map(lambda number: f"t{number}")


@st.composite
def views(draw: st.DrawFn) -> View:
    order = draw(st.lists(ids, min_size=1, max_size=10))
    gone = draw(st.sets(ids)) - {order[0]}
    opened = draw(st.sets(ids)) - {order[0]} - gone
    history = tuple(entry(attempt, int(attempt[1]), retired=attempt in gone) for attempt in order)
    pointer = Pointer(
        run="r", kind="promote", seq=9, epoch=1, owner="o", nonce="", at="", published=history[0].published,
        open=tuple(OpenAttempt("g", attempt) for attempt in sorted(opened)),
        retired=tuple(sorted(gone & draw(st.sets(ids)))),
    )  # fmt: skip
    hours = st.integers(0, 400).map(lambda hour: hour * HOUR / 2)
    shards = st.lists(st.tuples(ids.map(lambda ident: f"{ident}/s"), st.just("v")), max_size=3).map(tuple)
    stored = draw(
        st.dictionaries(ids, st.builds(Stored, st.just(1), st.just(1), hours.map(START.__add__), st.booleans()))
    )
    return View(
        seen=Seen(pointer, "e", "v"),
        history=history,
        complete=draw(st.booleans()),
        listed=frozenset(set(order) | opened | gone),
        manifests={attempt: manifest(attempt, draw(hours), draw(shards)) for attempt in set(order) - gone},
        reused=frozenset(),
        stored=stored,
        leased=frozenset(draw(st.sets(ids))),
        now=START + draw(hours),
    )


policies = st.builds(Policy, st.integers(0, 4), st.integers(0, 48), st.integers(0, 8), st.sampled_from([0.0, DAY]))


@given(views(), policies)
def test_nothing_is_retired_that_anybody_needs(found: View, policy: Policy) -> None:
    plan = decide(found, policy)
    pointer, gone = found.seen.pointer, set(retired(plan))
    assert pointer.published is not None
    assert not gone & {pointer.published.attempt, *(one.attempt for one in pointer.open), *found.leased}
    assert not gone & set(kept(plan))
    assert gone <= set(found.stored)
    assert all(found.now - found.stored[attempt].newest >= policy.grace for attempt in gone)
    alive = [one.published.attempt for one in found.history if not one.retired]
    distinct = list(dict.fromkeys(alive))
    assert not gone & set(distinct[:2])
    assert not gone & set(distinct[: policy.keep_last])
    if not found.complete:
        assert gone <= found.listed
    for attempt in set(distinct) - gone:
        for shard in found.manifests[attempt].shards:
            assert (shard.pin.key, shard.pin.version_id) in plan.named


@given(views(), policies)
def test_every_attempt_is_accounted_for_once(found: View, policy: Policy) -> None:
    plan = decide(found, policy)
    groups = [kept(plan), retired(plan), [one.attempt for one in plan.young], [one.attempt for one in plan.unknown]]
    named = [attempt for group in groups for attempt in group]
    assert len(named) == len(set(named))
    ours = {attempt for attempt, stored in found.stored.items() if stored.opened or attempt in found.listed}
    assert ours - set(named) <= set(found.seen.pointer.retired)


@given(views(), policies, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_policy_that_keeps_more_retires_no_more(found: View, policy: Policy, a: int, b: int, c: int) -> None:
    more = Policy(policy.keep_last + a, policy.keep_hourly + b, policy.keep_daily + c, policy.grace)
    assert set(retired(decide(found, more))) <= set(retired(decide(found, policy)))
