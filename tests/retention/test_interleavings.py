"""Garbage collection beside readers, promotions, rollbacks and itself: every order of their requests (I14).

interleavings.py says who is in the cast, and which orders are equal; of those one is run:

    cast                                             orders    races
    a reader with a lease                                15    31
    ... that may die at any moment                       30    31
    a rollback                                           51    31
    a promotion of an attempt that its owner ends       506    30
    an owner that opens an orphaned attempt              97    30, 32
    a second collector                                  500    34
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cachefs.formats.pointer import Pointer
from cachefs.publish.rules import Cas
from cachefs.publish.writes import Swap, Writes
from cachefs.restore import leases
from cachefs.restore.reader import locate
from cachefs.retention.executor import Collector
from tests.publish.schedules import Choose, explore
from tests.retention.interleavings import Scene, scene


def shown(value: object) -> str:
    """Return a name for a parameter that is the same in every process."""
    return "+".join(sorted(value)) if isinstance(value, set) else str(value)


CASTS: list[tuple[int, tuple[str, ...], dict[str, Any], set[str]]] = [
    (15, ("reader", "collector"), {}, {"Held", "NotFoundError"}),
    (30, ("reader", "collector"), {"dies": True}, {"Held", "NotFoundError", "dead"}),
    (51, ("rollback", "collector"), {}, {"RolledBack", "NotFoundError"}),
    (506, ("promoter", "ender", "collector"), {}, {"NotOpen", "Published", "Refused"}),
    (97, ("opener", "collector"), {}, {"Published", "Refused"}),
    (1080, ("collector", "other collector"), {}, {"Collected"}),
]


@pytest.mark.parametrize(("orders", "cast", "given", "outcomes"), CASTS, ids=shown)
def test_every_order(orders: int, cast: tuple[str, ...], given: dict[str, Any], outcomes: set[str]) -> None:
    """Nothing is lost in any order, and in some orders the first of the cast is early enough, in others too late."""
    seen: set[str] = set()

    def scenario(choose: Choose) -> bool:
        one = Scene(choose, cast, **given)
        if not one.run():
            return False
        first = one.processes[0]
        seen.add("dead" if first.killed else type(first.error or first.result).__name__)
        return True

    assert explore(scenario) == orders
    assert seen == outcomes


# The checks would find these mistakes, so that they pass above means something.

Patch = pytest.MonkeyPatch
_standing, _swap = Collector._standing, Writes.swap


def _leases_listed_before_the_swap(patch: Patch) -> None:
    async def once(self: Collector, run: str) -> Any:
        if not hasattr(self, "listed"):
            self.listed = await _standing(self, run)  # type: ignore[attr-defined]
        return self.listed  # type: ignore[attr-defined]

    patch.setattr(Collector, "_standing", once)


def _no_swap(patch: Patch) -> None:
    """Delete what the plan says, and never tell anybody."""

    async def retire(self: Collector, run: str, told: Any) -> Any:
        _, plan = await self._plan(run, told)
        new = tuple(one.attempt for one in plan.retire)
        return plan, new, new

    async def sweep(self: Collector, run: str, attempt: str, named: Any) -> bool:
        versions, _ = await self._rest(run, attempt)
        await self._delete([entry for entry in versions if (entry.key, entry.version_id) not in named])
        return True

    patch.setattr(Collector, "_retire", retire)
    patch.setattr(Collector, "_sweep", sweep)


def _lost_is_landed(patch: Patch) -> None:
    """Go on with the old plan when the pointer has moved."""

    async def swap(self: Writes, run: str, ours: Pointer) -> Swap:
        done = await _swap(self, run, ours)
        return Swap(Cas.LANDED, done.current) if ours.kind == "retire" else done

    async def sweep(self: Collector, run: str, attempt: str, named: Any) -> bool:
        versions, _ = await self._rest(run, attempt)
        await self._delete([entry for entry in versions if (entry.key, entry.version_id) not in named])
        return not (await self._rest(run, attempt))[0]

    patch.setattr(Writes, "swap", swap)
    patch.setattr(Collector, "_sweep", sweep)


def _lease_after_the_look(patch: Patch) -> None:
    """Look at the pointer only before the lease is created."""
    looks: dict[int, Any] = {}

    def once(store: Any, *args: Any) -> Any:
        if args[-1] is None:
            looks[id(store)] = locate(store, *args)
        return looks[id(store)]

    once.__name__ = "locate"
    patch.setattr(leases, "locate", once)


def _no_leases(patch: Patch) -> None:
    async def nobody(self: Collector, *given: Any) -> frozenset[str]:
        return frozenset()

    patch.setattr(Collector, "_leased", nobody)


@pytest.mark.parametrize(
    ("found", "mistake", "cast"),
    [
        ("lost what it reads", _leases_listed_before_the_swap, ("reader", "collector")),
        ("step-1 was lost", _no_swap, ("reader", "collector")),
        ("lost what it reads", _lease_after_the_look, ("reader", "collector")),
        ("lost what it reads", _no_leases, ("reader", "collector")),
        ("was lost", _no_swap, ("promoter", "ender", "collector")),
        ("was lost", _lost_is_landed, ("opener", "collector")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_checks_find_mistakes(
    monkeypatch: Patch, found: str, mistake: Callable[[Patch], None], cast: tuple[str, ...]
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        explore(scene(*cast))
