"""The simulation notices mistakes: each test breaks one rule, and some of a few worlds must show it.

Not all: a body that comes back, or an unclear answer taken for success, needs an order of requests that worlds drawn at
random do not hit. test_mutations.py shows with every schedule of two owners that these are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cachefs.publish import joining, reports, rules, sealing, sharing, steps
from cachefs.publish.joining import Join
from cachefs.store import createonly
from tests.publish.judge import Violation
from tests.publish.simulation import Event, Scenario, simulate
from tests.publish.test_simulation import both
from tests.publish.training import Save

Mistake = Callable[[pytest.MonkeyPatch], None]
STEPS = tuple(Save(f"step-{number}", number, (0, 1, 2), number % 3, 1.0) for number in range(1, 5))
PLAIN = Scenario(STEPS)
AGAIN = Scenario((*both("last", gap=1.0), *both("last", gap=0.0)), members=2)
OWNERS = Scenario(STEPS, (Event(9.5, "cut", 0, 6.0), Event(10.5, "owner", 1)))


def seals_without_all_members(patch: pytest.MonkeyPatch) -> None:
    """I16: whoever has reported is the set."""
    real = sealing.manifest

    def manifest(opened: Any, closed: Any, answers: Any, **given: Any) -> Any:
        return real(msgspec.structs.replace(opened, members=(), count=len(answers)), closed, answers, **given)

    patch.setattr(reports, "verdict", lambda attempt, _: reports.Verdict(waits="" if attempt.closed_at else "waits"))
    patch.setattr(steps.sealing, "manifest", manifest)


def joins_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """Guesses instead of refusing."""

    def decide(offers: Sequence[Any], saves: Sequence[Any], *, us: Any, started: int) -> list[Any]:
        free = [save for save in saves if save.opened_epoch is None and not save.state.final]
        joined = [Join(offer.attempt, save.attempt) for offer, save in zip(offers, free, strict=False)]
        left = offers[len(joined) :]
        return joined + [joining.Absent(offer.attempt) for offer in left if offer.close is not None]

    patch.setattr(joining, "decide", decide)


def trusts_doubtful_saves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(joining, "doubtful", lambda saves, started: None)


def closes_what_was_written_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.publish.training.Mount.asked", lambda mount, close: mount.close(close.save.generation, "x"))
    patch.setattr(sealing, "closed_together", lambda attempt, standing, member: "")


def promotes_without_reading(patch: pytest.MonkeyPatch) -> None:
    """I5: nobody reads anything."""

    async def nothing(*args: Any) -> None:
        pass

    patch.setattr(sharing, "_read", nothing)


def counts_silent_members_as_testers(patch: pytest.MonkeyPatch) -> None:
    """I5: the share of a member that did not answer is not read by anyone."""

    async def answers(writes: Any, manifest: Any, pin: Any, others: set[str], **waits: float) -> set[str]:
        return others

    patch.setattr(sharing, "_answers", answers)


def writes_without_condition(patch: pytest.MonkeyPatch) -> None:
    """I2."""
    patch.setattr(createonly, "CREATE_ONLY", None)


def promotes_what_it_lost(patch: pytest.MonkeyPatch) -> None:
    """I7."""
    patch.setattr(rules, "_check_holds", lambda pointer, owner, epoch: None)


MISTAKES: list[tuple[Mistake, Scenario, str]] = [
    (seals_without_all_members, replace(PLAIN, named=False), "I16|was published with"),
    (joins_the_oldest, AGAIN, "mixture|was published with"),
    (trusts_doubtful_saves, AGAIN, "mixture|was published with"),
    (closes_what_was_written_again, AGAIN, "mixture|was published with"),
    (counts_silent_members_as_testers, PLAIN, "I5"),
    (promotes_without_reading, PLAIN, "I5"),
    (writes_without_condition, PLAIN, "I2"),
    (promotes_what_it_lost, OWNERS, "I7|no pointer named it"),
]


@pytest.mark.parametrize(("mistake", "scenario", "finds"), MISTAKES, ids=lambda one: getattr(one, "__name__", ""))
def test_the_simulation_notices(
    monkeypatch: pytest.MonkeyPatch, mistake: Mistake, scenario: Scenario, finds: str
) -> None:
    simulate(scenario)
    mistake(monkeypatch)
    with pytest.raises(Violation, match=finds):
        _search(scenario)


def _search(scenario: Scenario) -> None:
    for seed in range(40):
        simulate(replace(scenario, seed=seed))
