"""Which local save belongs to which attempt that another daemon opened. Pure; PROTOCOL.md, "Members", argues it.

Saves and attempts meet by the generation's name alone, and a name can be written twice: by a training that resumed, or
into one directory over and over. No clock tells the first time from the second. What does is the order of this member's
own looks at the list of open attempts: between two looks at most one save of a name may have begun, and at most one
attempt of that name may be unanswered. Everything else is refused, with the reason; a refusal costs one save, a wrong
guess would publish a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cachefs.formats.manifest import Manifest, Shard
from cachefs.formats.records import AttemptRecord, SharedRecord


class Join(msgspec.Struct, frozen=True):
    """The save `local` is this member's part of the attempt `shared`."""

    shared: str
    local: str


class Refuse(msgspec.Struct, frozen=True):
    """This member cannot take part in the attempt `shared`; the saves `locals` can belong to none."""

    shared: str
    reason: str
    locals: tuple[str, ...] = ()


class Absent(msgspec.Struct, frozen=True):
    """No save of this member belongs to the closed attempt `shared`, as far as can be seen now."""

    shared: str


Decision = Join | Refuse | Absent


def decide(
    offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord], *, member: str, looked: int, started: int
) -> list[Decision]:
    """Decide about one generation's attempts that have no part of this member yet (`offers`), in the order they were
    opened.

    `saves` are this member's saves of the generation, `looked` the serial of its newest save at the look before this
    one, `started` at the start of the daemon. Nothing is decided about an offer that is open and for which there is no
    save.
    """
    offers = [offer for offer in offers if not offer.members or member in offer.members]
    asked = {save.attempt: save for save in saves}
    # Popped: an attempt for the same save a second time finds it taken.
    decided: list[Decision] = [_granted(offer, asked.pop(offer.wish)) for offer in offers if offer.wish in asked]
    answered = {one.shared for one in decided}
    offers = [offer for offer in offers if offer.attempt not in answered]
    granted = {one.local for one in decided if isinstance(one, Join)}
    free = [
        save
        for save in saves
        if save.opened_epoch is None and save.attempt not in granted and (not save.state.final or save.serial > looked)
    ]
    late = [offer for offer in offers if offer.late and not any(save.serial <= started for save in free)]
    decided += [
        Refuse(offer.attempt, "it was closed before this daemon was there: what an earlier one wrote is not known here")
        for offer in late
    ]
    offers = [offer for offer in offers if offer not in late]
    if not offers:
        return decided
    if not free:
        return decided + _without(offers, saves)
    if len(offers) == 1 and len(free) == 1:
        save = free[0]
        if save.state.final:
            return [*decided, Refuse(offers[0].attempt, f"its save was abandoned: {save.error}")]
        return [*decided, Join(offers[0].attempt, save.attempt)]
    reason = (
        f"{len(free)} saves and {len(offers)} attempts of this name began between two looks: which belong together "
        "cannot be told"
    )
    waiting = tuple(save.attempt for save in free if not save.state.final)
    return decided + [Refuse(offer.attempt, reason, waiting) for offer in offers]


def _granted(offer: SharedRecord, save: AttemptRecord) -> Decision:
    """Decide about the attempt that was opened for a save of this member."""
    if save.opened_epoch is None and not save.state.final:
        return Join(offer.attempt, save.attempt)
    return Refuse(offer.attempt, "the save that it was opened for is over, or belongs to another attempt")


def _without(offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord]) -> list[Decision]:
    busy = [save for save in saves if not save.state.final]
    if busy:  # it may be this one's part, and was given to another
        reason = "the save of this member belongs to another attempt"
        return [Refuse(offer.attempt, reason) for offer in offers if offer.close is not None]
    return [Absent(offer.attempt) for offer in offers if offer.close is not None]


def unwanted(offers: Sequence[SharedRecord], save: AttemptRecord, member: str) -> str:
    """Return why a save can belong to no attempt, "" if it may: a generation that is one file is one member's."""
    for offer in offers:
        if save.kind == "file" and offer.kind == "file" and offer.members and member not in offer.members:
            return f"the generation {save.generation} is the file of member {', '.join(offer.members)}"
    return ""


def shares(manifest: Manifest) -> dict[str, tuple[Shard, ...]]:
    """Return which member reads which shards in the restore test: never its own if there is another member, and about
    as many bytes each. The same on every member.
    """
    testers = sorted(entry.member for entry in manifest.members)
    given: dict[str, list[Shard]] = {tester: [] for tester in testers}
    load = dict.fromkeys(testers, 0)
    for shard in sorted(manifest.shards, key=lambda shard: (-shard.pin.size, shard.paths)):
        others = [tester for tester in testers if tester != shard.member] or testers
        tester = min(others, key=lambda tester: (load[tester], tester))
        given[tester].append(shard)
        load[tester] += max(shard.pin.size, 1)
    return {tester: tuple(shards) for tester, shards in given.items()}
