"""Two owners of one run, every schedule (races 1 to 12 of the pointer; invariants I5 to I9, I13 after every event).

29,124 schedules, none sampled; owners.py says what an event is and which schedules are equal:

    scenario                                                             schedules    races
    a run without a pointer, two owners                                      1,368    1, 8, 10
    an existing pointer, two owners                                             76    1, 2, 10
    ... and one fault at any write (5 kinds), held requests land anywhere    4,564    4, 5, 6, 7, 9
    no pointer, two owners announce, one fault at any write                 12,116    4 to 9
    an existing pointer, one owner dies anywhere and starts again            4,655    2, 5, 11, 12
    one owner, two faults                                                      144    4, 6, 7, 9
    one owner, two faults, and a death                                       4,797    4, 6, 7, 11, 12
    two owners announce, an operator hides the pointer at any moment         1,404    8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cachefs.errors import ConditionFailed
from cachefs.formats.codec import encode
from cachefs.formats.pointer import Pointer
from cachefs.publish import promotion, rules, writes
from cachefs.publish.rules import Cas
from cachefs.store.base import CREATE_ONLY, Condition
from cachefs.store.memory import MemoryStore
from tests.publish import owners
from tests.publish.owners import KEY, RUN, world
from tests.publish.schedules import Choose, ParkingHop, Process, explore

SCENARIOS: list[tuple[int, dict[str, Any]]] = [
    (1368, {"existing": False}),
    (76, {"existing": True}),
    (4564, {"existing": True, "faults": 1}),
    (12116, {"existing": False, "promotes": False, "faults": 1}),
    (4655, {"existing": True, "kills": 1}),
    (144, {"existing": True, "members": "a", "faults": 2}),
    (4797, {"existing": True, "members": "a", "faults": 2, "kills": 1}),
    (1404, {"existing": False, "promotes": False, "hide": True}),
]


@pytest.mark.parametrize(("schedules", "given"), SCENARIOS, ids=lambda value: str(value))
def test_every_schedule(schedules: int, given: dict[str, Any]) -> None:
    assert explore(world(**given)) == schedules


# The checks would find these mistakes, so that they pass above means something.

Patch = pytest.MonkeyPatch
_promote = rules.promote
_classify = rules.classify_cas


def _no_fence(current: Any, candidate: Any, *, sealed_epoch: int, owner: str, epoch: int, **rest: str) -> Any:
    """The two-object trap: ownership was checked somewhere else, earlier."""
    pointer = current.pointer
    return _promote(current, candidate, sealed_epoch=pointer.epoch, owner=pointer.owner, epoch=pointer.epoch, **rest)


def _no_order(current: Any, candidate: Any, **rest: Any) -> Any:
    decided = _promote(current, candidate, **rest)
    if not isinstance(decided, rules.Refused):
        return decided
    empty = msgspec.structs.replace(current.pointer, published=None)
    return _promote(msgspec.structs.replace(current, pointer=empty), candidate, **rest)


def _instead(wrong: Cas, of: Cas) -> Callable[..., Cas]:
    def classify(ours: Any, chain: Any) -> Cas:
        right = _classify(ours, chain)
        return wrong if right is of else right

    return classify


async def _nothing(*_given: Any) -> None:
    return None


def _bootstrap_again(patch: Patch) -> None:
    patch.setattr(writes.Writes, "check_never_existed", _nothing)
    patch.setattr(rules, "check_known", lambda *given: None)


def _no_look_back(patch: Patch) -> None:
    patch.setattr(owners, "published_since", _nothing)
    patch.setattr(promotion, "published_since", _nothing)


@pytest.mark.parametrize(
    ("found", "mistake", "given"),
    [
        ("I7", lambda patch: patch.setattr(rules, "promote", _no_fence), {}),
        ("I13", lambda patch: patch.setattr(rules, "promote", _no_order), {}),
        (
            "told fenced",
            lambda patch: patch.setattr(rules, "classify_cas", _instead(Cas.LOST, Cas.UNDECIDED)),
            {"faults": 1},
        ),
        (
            "told fenced",
            lambda patch: patch.setattr(rules, "classify_cas", _instead(Cas.LOST, Cas.WALK)),
            {"faults": 1},
        ),
        ("told published", lambda patch: patch.setattr(rules, "classify_cas", _instead(Cas.SUPERSEDED, Cas.LOST)), {}),
        ("told", _no_look_back, {"kills": 1}),
        ("bootstrapped", _bootstrap_again, {"existing": False, "hide": True}),
    ],
    ids=["no fence", "no order", "undecided is lost", "no walk", "lost is landed", "no look back", "bootstrap again"],
)
def test_the_checks_find_mistakes(
    monkeypatch: Patch, found: str, mistake: Callable[[Patch], None], given: dict[str, Any]
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        explore(world(**{"existing": True, **given}))


# Race 3: why ownership and publication are one object.


def test_separate_lease_object_lets_a_stale_owner_publish() -> None:
    """With a lease beside the pointer, some schedule publishes under an epoch that was no longer the newest."""
    stale = 0

    def scenario(choose: Choose) -> bool:
        nonlocal stale
        store = MemoryStore(now=lambda: 0.0)
        store.put("lease", b"0", condition=CREATE_ONLY)
        store.put("pointer", b"", condition=CREATE_ONLY)
        hop = ParkingHop()
        landed: list[tuple[int, int]] = []

        async def owner(name: str) -> None:
            epoch = -1
            while epoch < 0:
                info, body = await hop(store.get, "lease")
                try:
                    await hop(store.put, "lease", b"%d" % (int(body) + 1), condition=Condition(if_match=info.etag))
                    epoch = int(body) + 1
                except ConditionFailed:
                    pass
            info, _ = await hop(store.get, "pointer")
            _, newest = await hop(store.get, "lease")
            if int(newest) != epoch:
                return  # fenced, as far as this check can see

            def put() -> None:
                store.put("pointer", name.encode(), condition=Condition(if_match=info.etag))
                found = store.get("lease")
                assert found is not None
                landed.append((epoch, int(found[1])))

            await _quietly(hop, put)

        processes = [Process(name, owner(name)) for name in "ab"]
        while ready := [process for process in processes if process.request]:
            ready[choose(len(ready))].deliver()
        stale += any(epoch < newest for epoch, newest in landed)
        return True

    assert explore(scenario) > 0
    assert stale > 0


async def _quietly(hop: ParkingHop, put: Callable[[], None]) -> None:
    try:
        await hop(put)
    except ConditionFailed:
        pass


# Race 6: why no two bodies are equal.


def _delayed_duplicate(bodies: list[bytes]) -> bool:
    """A's write E0 -> E1 is sent twice and its second copy is late; others write E2 and then the last body. Return
    whether the late copy lands.
    """
    store = MemoryStore(now=lambda: 0.0)
    first = store.put(KEY, bodies[0], condition=CREATE_ONLY)
    second = store.put(KEY, bodies[1], condition=Condition(if_match=first.etag))
    third = store.put(KEY, bodies[2], condition=Condition(if_match=second.etag))
    store.put(KEY, bodies[3], condition=Condition(if_match=third.etag))
    try:
        store.put(KEY, bodies[1], condition=Condition(if_match=first.etag))
    except ConditionFailed:
        return False
    return True


def test_equal_bodies_would_let_a_delayed_duplicate_land() -> None:
    assert _delayed_duplicate([b"step 0", b"step 1", b"step 2", b"step 0"])


def test_pointer_bodies_never_let_a_delayed_duplicate_land() -> None:
    def body(seq: int, owner: str) -> bytes:
        return encode(Pointer(run=RUN, kind="grant", seq=seq, epoch=1, owner=owner, nonce=f"n{seq}", at=""))

    assert not _delayed_duplicate([body(1, "a"), body(2, "b"), body(3, "c"), body(4, "a")])


# Race 1, without end: two processes that start at the same time do not take the run from each other for ever.


def test_one_of_two_owners_is_left() -> None:
    def scenario(choose: Choose) -> bool:
        run = owners.World(choose, existing=True)
        followed = run.run()
        if followed:
            owner = run.versions[-1][0].owner.split("/")[0]
            assert [type(process.error) for process in run.processes if process.name == owner] == [type(None)]
        return followed

    assert explore(scenario) == 76
