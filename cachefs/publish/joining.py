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

import msgspec

from cachefs.formats.manifest import Manifest, Shard
from cachefs.formats.records import AttemptRecord, SharedRecord, State
from cachefs.members import Members

WRITTEN_AGAIN = "superseded: the name was written again before an owner had opened this save"
MISSED = "an attempt of this name ended before this save was joined to one: it may have been a part of that one"
CUT_SHORT = (
    "the save of this name before it was given up while it was written, and the member that this attempt was opened "
    "for may be at that one: which of the two it is for cannot be told"
)
ONE_OF_TWO = (
    "this name was written twice before an owner had opened it, on this member or on the one that asked for the "
    "attempt: which time it is for cannot be told"
)


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
    offers: Sequence[SharedRecord], saves: Sequence[AttemptRecord], *, us: Members, started: int
) -> list[Decision]:
    """Decide about one generation's attempts that have no part of this member yet (`offers`), in the order they were
    opened.

    `saves` are this member's saves of the generation, `us` is how it is configured, `started` is the serial of its
    newest save when the daemon started: training starts again with the daemon, so no save from before goes on. Nothing
    is decided about an offer that is open and for which there is no save.
    """
    apart = [(offer, reason) for offer in offers if (reason := unlike(offer, saves, us))]
    if apart:
        return [Refuse(offer.attempt, reason, _concerned(offer, saves, us)) for offer, reason in apart]
    offers = [offer for offer in offers if us.declared(offer.members)]
    if offers and (doubt := doubtful(saves, started)) is not None:
        return [Refuse(offer.attempt, doubts(doubt), _free(saves)) for offer in offers]
    waiting = _free(saves)
    if len(waiting) > 1 and any(offer.wish in waiting for offer in offers):  # others may have the later part only
        return [Refuse(offer.attempt, _untold(len(waiting), len(offers)), waiting) for offer in offers]
    asked = {save.attempt: save for save in saves}
    # Popped: an attempt for the same save a second time finds it taken.
    decided: list[Decision] = [_granted(offer, asked.pop(offer.wish)) for offer in offers if offer.wish in asked]
    answered = {one.shared for one in decided}
    decided = [_in_order(one, offers, saves) for one in decided]
    offers = [offer for offer in offers if offer.attempt not in answered]
    granted = {one.local for one in decided if isinstance(one, Join)}
    free = [save for save in saves if save.waits and save.attempt not in granted]
    late = [offer for offer in offers if offer.late and not any(save.serial <= started for save in free)]
    decided += [
        Refuse(offer.attempt, "it was opened before this daemon was there: what an earlier one wrote is not known here")
        for offer in late
    ]
    offers = [offer for offer in offers if offer not in late]
    if not offers:
        return decided
    if not free:
        lost = [offer for offer in offers if _lost(offer, saves)]
        decided += [Refuse(offer.attempt, "the save that may have belonged to it was abandoned") for offer in lost]
        offers = [offer for offer in offers if offer not in lost]
        if (doubt := doubtful(saves, 0)) is not None:  # however old: this member had a part in some save of the name
            return decided + [Refuse(offer.attempt, doubts(doubt)) for offer in offers if offer.close is not None]
        return decided + _without(offers, saves)
    if len(offers) == 1 and len(free) == 1 and not _lost(offers[0], saves):
        if resumed(free[0], saves, started) and not offers[0].resumed:
            return [*decided, Refuse(offers[0].attempt, CUT_SHORT, (free[0].attempt,))]
        if offers[0].again != again(free[0], saves, granted):
            return [*decided, Refuse(offers[0].attempt, ONE_OF_TWO, (free[0].attempt,))]
        return [*decided, _in_order(Join(offers[0].attempt, free[0].attempt), offers, saves)]
    waiting = tuple(save.attempt for save in free)
    return decided + [Refuse(offer.attempt, _untold(len(free), len(offers)), waiting) for offer in offers]


def unlike(offer: SharedRecord, saves: Sequence[AttemptRecord], us: Members) -> str:
    """Return why this member, as it is configured, can have no part in an attempt, though the attempt waits for it or
    it has a save of that name; "" if it can.

    Who declares other members counts another set complete: this member's files would be missing from it, or be there
    in place of another's. A generation that is one file is one member's, and no other one's business.
    """
    if offer.kind == "file" or us.service:
        return ""
    asked = any(offer.wish == save.attempt for save in saves)
    if not us.declared(offer.members) and not asked and not _free(saves):
        return ""
    if offer.count == us.count and set(offer.members) == set(us.names):
        return ""
    theirs, ours = _declared(offer.members, offer.count), _declared(us.names, us.count)
    return f"{us.name} is configured for {ours}, and the owner of the attempt for {theirs}"


def _concerned(offer: SharedRecord, saves: Sequence[AttemptRecord], us: Members) -> tuple[str, ...]:
    """Return the saves that may be part of an attempt of members unlike ours: none where it does not declare us, as
    that of a job on other nodes whose run we go on with.
    """
    return _free(saves) if us.declared(offer.members) else tuple(one for one in _free(saves) if one == offer.wish)


def _declared(names: Sequence[str], count: int) -> str:
    shown = (
        f": {', '.join(sorted(names)[:8])}{', ...' if count > 8 else ''}" if names else ", whose names it was not told"
    )
    return f"{count} members{shown}"


def _free(saves: Sequence[AttemptRecord]) -> tuple[str, ...]:
    """Return the saves that are part of no attempt yet."""
    return tuple(save.attempt for save in saves if save.waits)


def again(save: AttemptRecord, saves: Sequence[AttemptRecord], granted: Collection[str] = ()) -> bool:
    """Return whether the save of this name that this member had just before found no attempt.

    Then an attempt may be opened for either. Members that agree in this have written the name equally often since they
    last agreed: both parts are of the first time, or both of the second. One that was refused counts as found, for the
    others have heard of it; so members that disagreed once agree again. `granted` are saves that find theirs now.
    """
    before = _before(save, saves)
    found = before is None or before.opened_epoch is not None or before.shared or before.attempt in granted
    return not found


def _before(save: AttemptRecord, saves: Sequence[AttemptRecord]) -> AttemptRecord | None:
    return max((one for one in saves if one.serial < save.serial), key=lambda one: one.serial, default=None)


def resumed(save: AttemptRecord, saves: Sequence[AttemptRecord], started: int) -> bool:
    """Return whether the save of this name that this member had just before was given up with its attempt while it was
    written, and this one may go on with it.

    A member that had no part of that one yet may be writing its part now: an attempt that is opened for it is not for
    this save. Not so when the training has dropped the save before, or has started again since, as it does with the
    daemon (`started`: the serial of the newest save then).
    """
    before = _before(save, saves)
    return (
        before is not None
        and before.serial > started
        and _ended(before)
        and before.closed_at is None
        and not before.cancelled
    )


def follows(
    save: AttemptRecord, saves: Sequence[AttemptRecord], offers: Sequence[SharedRecord], ended: Collection[str]
) -> bool:
    """Return whether this member has been at this name just before, in an attempt that ended: what it asks an attempt
    for now is not its first part of that one.

    A machine that was replaced has no save of an attempt that is older than anything written in this mount, and one
    that was away has none of that time. Their names are in `ended` (RunRecord) when this member has heard that they
    ended; one that is still among its `offers` has ended when the next of its name is opened.
    """
    older = any(one.before and not one.local and one.generation == save.generation for one in offers)
    before = _before(save, saves)
    return older or save.generation in ended or (before is not None and _ended(before))


def _ended(save: AttemptRecord) -> bool:
    return save.state is State.ABANDONED and save.opened_epoch is not None


def superseded(saves: Sequence[AttemptRecord], offers: Sequence[SharedRecord], started: int) -> set[str]:
    """Return the saves of a name that found no attempt, and never will.

    Either a later one has found its attempt. Or the save is from before the daemon started, and the training, which
    started again as well, has written the name again, on this member or, as an attempt says, on another: so each member
    offers only what was written last, and the two times are not mixed.
    """
    free = [save for save in saves if save.waits]
    opened = max((save.serial for save in saves if save.opened_epoch is not None), default=0)
    over = {save.attempt for save in free if save.serial < opened}
    old = [save for save in free if save.serial <= started and save.kind != "file"]
    if any(save.serial > started for save in saves):
        over |= {save.attempt for save in old}
    elif any(offer.again for offer in offers):
        over |= {save.attempt for save in old if not again(save, saves)}
    return over


def _lost(offer: SharedRecord, saves: Sequence[AttemptRecord]) -> bool:
    """Return whether a save is over that waited when the attempt was found, and may have been its part."""
    gone = [save for save in saves if save.opened_epoch is None and save.state.final]
    return any(save.attempt in offer.waiting and again(save, saves) == offer.again for save in gone)


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


def _untold(saves: int, attempts: int) -> str:
    return f"{saves} saves and {attempts} attempts of this name are waiting: which belong together cannot be told"


def _granted(offer: SharedRecord, save: AttemptRecord) -> Decision:
    """Decide about the attempt that was opened for a save of this member."""
    if save.waits:
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


def missed(saves: Sequence[AttemptRecord], ended: Collection[str], until: float = float("inf")) -> list[AttemptRecord]:
    """Return the saves that wait while an attempt of their name has ended without a part of this member (`ended`: the
    generations of such attempts). Each may have been that part, although no attempt knows it; in a later attempt of the
    name it could meet the next save of other members. Not so those with a serial above `until`.
    """
    return [one for one in saves if one.generation in ended and one.waits and one.serial <= until]


def unwanted(offers: Sequence[SharedRecord], save: AttemptRecord, member: str) -> str:
    """Return why a save can belong to no attempt, "" if it may: a generation that is one file is one member's."""
    for offer in offers:
        if save.kind == "file" and offer.kind == "file" and offer.members and member not in offer.members:
            return f"the generation {save.generation} is the file of member {', '.join(offer.members)}"
    return ""


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
