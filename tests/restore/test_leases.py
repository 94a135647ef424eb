"""Leases: created before the second look, renewed in time, ended by their holder, judged by the store's clock."""

from __future__ import annotations

import threading

import pytest
import trio

from cachefs.errors import DeniedError, NotFoundError, ProbeError, UnavailableError, Unsupported
from cachefs.formats.codec import decode
from cachefs.formats.lease import Lease
from cachefs.restore import leases
from cachefs.restore.leases import LEASE_LIFE, Held, Standing, leased, standing
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Inline
from tests.restore.make import KEYS, RUN, memory, move, publish
from tests.store.faults import FaultyStore, Rule, denied, lost_answer, lost_request, refused, rules


def in_leases(key: str) -> bool:
    return "/leases/" in key


def held(store: ObjectStore) -> list[Lease]:
    return [decode(store.get(one.key)[1], Lease, one.key) for one in standing(store, KEYS, RUN)]


def no_warning(text: str) -> None:
    raise AssertionError(text)


def test_a_lease_stands_while_the_block_runs() -> None:
    store = FaultyStore(memory())
    first = publish(store.inner, 1)
    publish(store.inner, 2)
    with leased(store, KEYS, RUN, "step-1", holder="me", warn=no_warning) as found:
        assert found.published == first
        [lease] = held(store.inner)
        assert (lease.run, lease.generation, lease.attempt, lease.holder) == (RUN, "step-1", first.attempt, "me")
        created = [call.operation for call in store.calls].index("put")
        looks = [n for n, call in enumerate(store.calls) if call.operation == "get" and call.key == KEYS.pointer(RUN)]
        assert looks[0] < created < looks[-1], "the pointer is looked at again after the lease was created"
    assert held(store.inner) == []
    assert all(call.version_id for call in store.calls if call.operation == "delete_version")


def test_the_lease_ends_with_an_error_too() -> None:
    store = memory()
    publish(store, 1)
    with pytest.raises(KeyError), leased(store, KEYS, RUN, holder="me", warn=no_warning):
        raise KeyError
    assert held(store) == []


def test_without_a_lease_nothing_is_written() -> None:
    store = FaultyStore(memory())
    publish(store.inner, 1)
    with leased(store, KEYS, RUN, holder="me", warn=no_warning, lease=False) as found:
        assert found.lease is None
    assert set(store.operations()) == {"get"}


@pytest.mark.parametrize("error", [DeniedError("403"), Unsupported("501"), ProbeError("no version ids")])
def test_where_nothing_can_be_created_it_goes_on_with_a_warning(error) -> None:
    store = FaultyStore(memory(), rules(Rule("put", refused(error), nth=0)))
    published = publish(store.inner, 1)
    said: list[str] = []
    with leased(store, KEYS, RUN, holder="me", warn=said.append) as found:
        assert (found.published, found.lease) == (published, None)
    assert len(said) == 1
    assert "garbage collection may remove what is read here" in said[0]


def test_without_the_right_to_delete_the_lease_is_left_with_a_warning() -> None:
    store = FaultyStore(memory(), rules(Rule("delete_version", denied, nth=0)))
    publish(store.inner, 1)
    said: list[str] = []
    with leased(store, KEYS, RUN, holder="me", warn=said.append):
        pass
    assert "stays until it expires" in said[0]
    assert len(held(store.inner)) == 1


@pytest.mark.parametrize("fault", [lost_answer, lost_request])
async def test_an_unclear_create_is_read_back_and_makes_one_lease(fault, autojump_clock) -> None:
    store = FaultyStore(memory(), rules(Rule("put", fault, key=in_leases)))
    publish(store.inner, 1)
    found = await leases.take(store, KEYS, Inline(), RUN)
    assert found.lease is not None
    assert [one.version_id for one in standing(store.inner, KEYS, RUN)] == [found.lease.version_id]


async def test_a_store_that_does_not_answer_is_not_waited_for_for_ever(autojump_clock) -> None:
    store = FaultyStore(memory(), rules(Rule("put", lost_request, key=in_leases, nth=0)))
    publish(store.inner, 1)
    with pytest.raises(UnavailableError):
        await leases.take(store, KEYS, Inline(), RUN)


# Between the two looks the generation may be retired.


def retiring(store: FaultyStore, *attempts: str, then_sweep: bool = False):
    """Return a fault that retires attempts right before the lease is created."""

    def fault(request):
        move(store.inner, kind="retire", retired=attempts)
        if then_sweep:
            move(store.inner, kind="retire", retired=())
        return request()

    return fault


@pytest.mark.parametrize("then_sweep", [False, True])
def test_a_generation_that_is_retired_meanwhile_is_not_read(then_sweep: bool) -> None:
    """Also when the collector has finished with it by then and the pointer lists it no more."""
    store = FaultyStore(memory())
    first = publish(store.inner, 1)
    publish(store.inner, 2)
    store.plan = rules(Rule("put", retiring(store, first.attempt, then_sweep=then_sweep), key=in_leases))
    with (
        pytest.raises(NotFoundError, match=r"'step-1' .*any more: garbage collection has removed it"),
        leased(store, KEYS, RUN, "step-1", holder="me", warn=no_warning),
    ):
        raise AssertionError("it must not be read")
    assert held(store.inner) == []


def test_what_is_published_by_then_is_read_if_what_was_published_is_retired() -> None:
    store = FaultyStore(memory())
    first = publish(store.inner, 1)

    def overtaken(request):
        publish(store.inner, 2)
        move(store.inner, kind="retire", retired=(first.attempt,))
        return request()

    store.plan = rules(Rule("put", overtaken, key=in_leases))
    with leased(store, KEYS, RUN, holder="me", warn=no_warning) as found:
        assert found.published.generation == "step-2"
        assert [one.attempt for one in held(store.inner)] == [found.published.attempt]


# Renewal.


def test_a_lease_is_renewed_before_half_its_life_is_over() -> None:
    """The next one is created before the last one is deleted: at no moment is there none."""
    store = FaultyStore(memory())
    publish(store.inner, 1)
    renewed = threading.Event()

    def plan(call):
        if call.operation == "delete_version" and sum(one.operation == "put" for one in store.calls) >= 3:
            renewed.set()

    store.plan = plan
    with leased(store, KEYS, RUN, holder="me", warn=no_warning, life=0.02):
        assert renewed.wait(30)
    changes = [call.operation for call in store.calls if call.operation in ("put", "delete_version")]
    assert changes[:4] == ["put", "put", "delete_version", "put"]
    assert held(store.inner) == []


def test_a_lease_that_cannot_be_renewed_is_said_so() -> None:
    store = FaultyStore(memory(), rules(Rule("put", denied, nth=2)))
    publish(store.inner, 1)
    warned = threading.Event()
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        warned.set()

    with leased(store, KEYS, RUN, holder="me", warn=warn, life=0.02):
        assert warned.wait(30)
    assert "the lease was not renewed" in said[0]
    assert held(store.inner) == []


def test_a_lease_lives_by_the_clock_of_the_store() -> None:
    one = Standing("k", "v", modified=1000.0, size=1)
    assert one.live(1000.0 - 5)
    assert one.live(1000.0 + LEASE_LIFE - 1)
    assert not one.live(1000.0 + LEASE_LIFE)


def test_held_is_what_the_second_look_has_seen() -> None:
    store = memory()
    first = publish(store, 1)

    async def take() -> Held:
        return await leases.take(store, KEYS, Inline(), RUN, "step-1", first.attempt, holder="me")

    found = trio.run(take)
    assert (found.published, found.seen.pointer.seq) == (first, 1)
