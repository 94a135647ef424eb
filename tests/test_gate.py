"""gate.py: it opens when the probe has passed, and closes when the store is not itself any more."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import MockClock

from cachefs.errors import (
    CachefsError,
    ConditionFailed,
    CorruptError,
    DeniedError,
    NoStoreError,
    NotFoundError,
    ProbeError,
    UnavailableError,
    Unsupported,
)
from cachefs.gate import FIRST_WATCH, RETRY_MOST, SUSPICION_REST, Gate, check
from cachefs.store.base import Condition
from cachefs.store.hop import Inline, Threads
from cachefs.store.memory import MemoryStore

INTERVAL = 900.0
CLOSES = r"publication stops: the store's probe failed"


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


class Store(MemoryStore):
    """Honours everything until told otherwise, and counts how often it was probed."""

    def __init__(self) -> None:
        super().__init__("p", now=lambda: 0.0)
        self.probes = 0
        self.ignores_conditions = False
        self.has_ranges = True
        self.fault: CachefsError | None = None

    def versioning(self) -> bool:
        self.probes += 1
        if self.fault:
            raise self.fault
        return super().versioning()

    def put(self, key, body, *, condition, **rest):
        if self.ignores_conditions and condition is not None:
            current = self.head(key)
            condition = Condition(if_match=current.etag) if current else None
        return super().put(key, body, condition=condition, **rest)

    def get_range(self, key, version_id, offset, length):
        if not self.has_ranges:
            raise CorruptError("200 without a range")
        return super().get_range(key, version_id, offset, length)


def opened(store: Store, **given) -> Gate:
    return Gate(store, **{"ranges": True, "blocked": "", "interval": INTERVAL, **given})


async def watching(gate: Gate, nursery: trio.Nursery) -> trio.Event:
    """Start the watch; return the event of its end."""
    closed = trio.Event()

    async def watch() -> None:
        await gate.watch(Inline())
        closed.set()

    nursery.start_soon(watch)
    await trio.testing.wait_all_tasks_blocked()
    return closed


@pytest.mark.parametrize("kind", [NoStoreError, NotFoundError, DeniedError])
def test_a_store_that_cannot_be_used_is_named_with_a_hint(kind, monkeypatch):
    store = Store()

    def refused():
        raise kind("HeadBucket: 404 404")

    monkeypatch.setattr(store, "check", refused)
    with pytest.raises(kind, match=r"^memory://memory/p: HeadBucket: 404") as caught:
        check(store)
    assert "in this region" in caught.value.hint


async def test_the_probe_is_repeated_at_intervals(autojump_clock):
    store = Store()
    with trio.move_on_after(FIRST_WATCH + 10 * INTERVAL):
        await opened(store).watch(Inline())
    assert 10 <= store.probes <= 22  # an interval is between a half and a whole one
    assert not list(store.list_versions(""))


async def test_a_store_that_ignores_conditions_closes_the_gate(autojump_clock, declared_warnings):
    declared_warnings(CLOSES)
    store = Store()
    gate = opened(store)
    store.ignores_conditions = True
    began = trio.current_time()
    await gate.watch(Inline())
    assert trio.current_time() - began <= FIRST_WATCH
    assert "does not honour any more what publication relies on: P2: create-only writes overwrite" in gate.blocked
    with trio.move_on_after(5 * RETRY_MOST):
        declared_warnings("publication is blocked")
        await gate.wait_open(Inline())
        raise AssertionError("it opened")
    assert "does not honour what publication relies on" in gate.blocked
    store.ignores_conditions = False
    assert await gate.wait_open(Inline())
    assert gate.blocked == ""


@pytest.mark.parametrize("fault", [DeniedError("AccessDenied"), UnavailableError("SlowDown", reason="throttled")])
async def test_only_an_answer_closes_the_gate(fault, autojump_clock):
    """P0 need not be allowed, and a store that does not answer says nothing."""
    store = Store()
    store.fault = fault
    gate = opened(store)
    with trio.move_on_after(10 * INTERVAL):
        await gate.watch(Inline())
    assert gate.blocked == ""
    often = isinstance(fault, UnavailableError)
    assert (store.probes > 5 * INTERVAL / RETRY_MOST) == often  # without an answer it asks more often


@pytest.mark.parametrize("error", [CorruptError("x"), ProbeError("x"), Unsupported("x")])
async def test_suspicious_errors_make_it_look_soon_but_not_all_the_time(error, autojump_clock):
    store = Store()
    gate = opened(store)
    async with trio.open_nursery() as nursery:
        await watching(gate, nursery)
        began = trio.current_time()
        for _ in range(100):
            gate.suspect(error)
            await trio.sleep(0.01)
        assert store.probes == 1
        await trio.sleep(SUSPICION_REST)
        assert store.probes == 2
        assert trio.current_time() - began < FIRST_WATCH / 2
        nursery.cancel_scope.cancel()


async def test_other_errors_are_no_sign(autojump_clock):
    store = Store()
    gate = opened(store)
    async with trio.open_nursery() as nursery:
        await watching(gate, nursery)
        for error in (UnavailableError("x"), ConditionFailed("x"), DeniedError("x")):
            gate.suspect(error)
            await gate.confirm(error)
        await trio.sleep(1)
        assert store.probes == 0
        nursery.cancel_scope.cancel()


async def test_other_ranges_than_before_close_the_gate_until_the_whole_probe_has_passed(
    autojump_clock, declared_warnings
):
    declared_warnings(CLOSES)
    store = Store()
    gate = opened(store)
    store.has_ranges = False
    await gate.watch(Inline())
    assert "ranges of a version are read differently" in gate.blocked
    assert await gate.wait_open(Inline()) is False
    with trio.move_on_after(3 * INTERVAL):
        await gate.watch(Inline())
    assert gate.blocked == ""


async def test_confirm_waits_for_an_answer_that_was_asked_for_after_it(autojump_clock):
    store = Store()
    gate = opened(store)
    store.fault = UnavailableError("x")
    async with trio.open_nursery() as nursery:
        await watching(gate, nursery)
        done = trio.Event()

        async def confirm() -> None:
            await gate.confirm(CorruptError("x"))
            done.set()

        nursery.start_soon(confirm)
        await trio.sleep(2 * RETRY_MOST)
        assert store.probes > 1
        assert not done.is_set()
        store.fault = None
        await done.wait()
        nursery.cancel_scope.cancel()


async def test_confirm_does_not_return_from_a_store_that_fails(autojump_clock, declared_warnings):
    declared_warnings(CLOSES)
    store = Store()
    gate = opened(store)
    async with trio.open_nursery() as nursery:
        closed = await watching(gate, nursery)
        store.ignores_conditions = True
        returned = []
        nursery.start_soon(partial(_note, gate, returned))
        await closed.wait()
        await trio.sleep(INTERVAL)
        assert returned == []
        nursery.cancel_scope.cancel()


async def _note(gate: Gate, returned: list[bool]) -> None:
    await gate.confirm(CorruptError("x"))
    returned.append(True)


async def test_a_refused_thread_is_no_answer(autojump_clock, no_threads, declared_warnings):
    """It looks again later, and who waits for its answer waits on."""
    declared_warnings("the store is probed again later.*no more threads")
    store = Store()
    gate = opened(store)
    refused, looks = True, 0

    async def hop(fn, *arguments):
        nonlocal looks
        looks += 1
        return await (Threads(1) if refused else Inline())(fn, *arguments)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(gate.watch, hop)
        with no_threads():
            with trio.move_on_after(5 * RETRY_MOST):
                await gate.confirm(CorruptError("x"))
                raise AssertionError("nothing was asked")
            assert store.probes == 0
            assert looks >= 5
        refused = False
        await gate.confirm(CorruptError("x"))
        assert store.probes == 1
        assert gate.blocked == ""
        nursery.cancel_scope.cancel()


async def test_without_an_interval_nothing_is_repeated(autojump_clock):
    store = Store()
    gate = opened(store, interval=0.0)
    gate.suspect(ProbeError("x"))
    await gate.confirm(CorruptError("x"))
    with trio.move_on_after(100 * INTERVAL):
        await gate.watch(Inline())
    assert store.probes == 0
