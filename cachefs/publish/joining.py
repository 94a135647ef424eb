"""Which local save belongs to which attempt that another daemon opened. Pure; PROTOCOL.md, "Members", argues it.

Saves and attempts meet by the generation's name alone, and a name can be written twice: by a training that resumed, or
into one directory over and over. No clock tells the first time from the second, and an attempt may be opened long after
its save began. So a save and an attempt belong together only if there is one of each, and if every earlier save of the
name is known to be the part of another attempt. Everything else is refused, with the reason; a refusal costs the save,
and the name until the daemon starts again; a wrong guess would publish a mixture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from cachefs.formats.manifest import Manifest, Shard
from cachefs.formats.records import AttemptRecord, SharedRecord, State


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
    offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord], *, member: str, started: int
) -> list[Decision]:
    """Decide about one generation's attempts that have no part of this member yet (`offers`), in the order they were
    opened.

    `saves` are this member's saves of the generation, `started` is the serial of its newest save when the daemon
    started: training starts again with the daemon, so no save from before goes on. Nothing is decided about an offer
    that is open and for which there is no save.
    """
    offers = [offer for offer in offers if not offer.members or member in offer.members]
    if offers and (doubt := doubtful(saves, started)) is not None:
        waiting = tuple(save.attempt for save in saves if save.opened_epoch is None and not save.state.final)
        return [Refuse(offer.attempt, doubts(doubt), waiting) for offer in offers]
    asked = {save.attempt: save for save in saves}
    # Popped: an attempt for the same save a second time finds it taken.
    decided: list[Decision] = [_granted(offer, asked.pop(offer.wish)) for offer in offers if offer.wish in asked]
    answered = {one.shared for one in decided}
    decided = [_in_order(one, offers, saves) for one in decided]
    offers = [offer for offer in offers if offer.attempt not in answered]
    granted = {one.local for one in decided if isinstance(one, Join)}
    free = [
        save for save in saves if save.opened_epoch is None and save.attempt not in granted and not save.state.final
    ]
    late = [offer for offer in offers if offer.late and not any(save.serial <= started for save in free)]
    decided += [
        Refuse(offer.attempt, "it was opened before this daemon was there: what an earlier one wrote is not known here")
        for offer in late
    ]
    offers = [offer for offer in offers if offer not in late]
    if not offers:
        return decided
    gone = {save.attempt for save in saves if save.opened_epoch is None and save.state.final}
    if not free:
        lost = [offer for offer in offers if gone & set(offer.waiting)]
        decided += [Refuse(offer.attempt, "the save that may have belonged to it was abandoned") for offer in lost]
        offers = [offer for offer in offers if offer not in lost]
        if (doubt := doubtful(saves, 0)) is not None:  # however old: this member had a part in some save of the name
            return decided + [Refuse(offer.attempt, doubts(doubt)) for offer in offers if offer.close is not None]
        return decided + _without(offers, saves)
    if len(offers) == 1 and len(free) == 1 and not gone & set(offers[0].waiting):
        return [*decided, _in_order(Join(offers[0].attempt, free[0].attempt), offers, saves)]
    reason = (
        f"{len(free)} saves and {len(offers)} attempts of this name are waiting: which belong together cannot be told"
    )
    waiting = tuple(save.attempt for save in free)
    return decided + [Refuse(offer.attempt, reason, waiting) for offer in offers]


def doubtful(saves: Sequence[AttemptRecord], started: int) -> AttemptRecord | None:
    """Return a save of which it is not known to which attempt its bytes belong; None if all are known.

    A save that was abandoned without having been joined may be any attempt's part, also of one that is opened late. One
    whose files were written again holds two saves. (One that was abandoned while it was open and goes on in the next
    one is no doubt: a close takes all that is in the directory.)
    """
    for save in saves:
        known = save.opened_epoch is not None and not save.rewritten
        if save.state is State.ABANDONED and save.serial > started and not known:
            return save
    return None


def doubts(save: AttemptRecord) -> str:
    """Return why no save of a name can be published while one is doubtful."""
    return (
        f"an earlier save of this name was abandoned ({save.error}), and what belongs to it cannot be told; use "
        "another name, or start the daemon again"
    )


def _in_order(join: Decision, offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord]) -> Decision:
    """Refuse a join that turns the order of the saves around: an attempt that was opened late, for an earlier save."""
    if not isinstance(join, Join):
        return join
    offer = next(offer for offer in offers if offer.attempt == join.shared)
    save = next(save for save in saves if save.attempt == join.local)
    order = (offer.epoch, offer.ordinal)
    for other in saves:
        if other.opened_epoch is None or other.attempt == save.attempt:
            continue
        before = (other.opened_epoch, other.ordinal or 0) < order
        if before != (other.serial < save.serial):
            reason = "saves of this name and attempts were opened in different orders"
            return Refuse(offer.attempt, reason, () if save.state.final else (save.attempt,))
    return join


def _granted(offer: SharedRecord, save: AttemptRecord) -> Decision:
    """Decide about the attempt that was opened for a save of this member."""
    if save.opened_epoch is None and not save.state.final:
        return Join(offer.attempt, save.attempt)
    return Refuse(offer.attempt, "the save that it was opened for is over, or belongs to another attempt")


def _without(offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord]) -> list[Decision]:
    """Decide about closed attempts of a name under which no save of this member waits."""
    newest = max(saves, key=lambda save: save.serial, default=None)
    reason = ""
    if any(not save.state.final for save in saves):  # it may be this one's part, and was given to another
        reason = "the save of this member belongs to another attempt"
    elif newest is not None and newest.state is State.ABANDONED:
        # A member that was away for long asks for the same save once more, after the others have given theirs up.
        reason = f"the last save of this name was abandoned on this member, and may be the same: {newest.error}"
    closed = [offer for offer in offers if offer.close is not None]
    return [Refuse(offer.attempt, reason) if reason else Absent(offer.attempt) for offer in closed]


def overtaken(saves: Sequence[AttemptRecord], ended: Collection[str]) -> list[AttemptRecord]:
    """Return the saves that wait while an attempt of their name has ended without a part of this member (`ended`: the
    generations of such attempts). Each may have been that part, although no attempt knows it; in a later attempt of the
    name it could meet the next save of other members.
    """
    return [one for one in saves if one.generation in ended and one.opened_epoch is None and not one.state.final]


def unwanted(offers: Sequence[SharedRecord], save: AttemptRecord, member: str) -> str:
    """Return why a save can belong to no attempt, "" if it may: a generation that is one file is one member's."""
    for offer in offers:
        if save.kind == "file" and offer.kind == "file" and offer.members and member not in offer.members:
            return f"the generation {save.generation} is the file of member {', '.join(offer.members)}"
    return ""


OVERTAKEN: Final = (
    "an attempt of this name ended before this save was joined to one: it may have been a part of that one"
)
"""Why a save that was overtaken is abandoned."""


def attempt_for(save: str) -> str:
    """Return the id of the attempt that is opened for a save that a member wishes for: the same whoever asks, and never
    that of a save.
    """
    return hashlib.sha256(f"wanted/{save}".encode()).hexdigest()[:32]


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
