"""Wishes: with the object `wanted/<save>.json`, a member asks the owner of the run to open an attempt for a save that
has found none. They stay in the bucket: they outlive the owner, and what they wish for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import msgspec
import trio

from cachefs.errors import CorruptError
from cachefs.formats.manifest import MemberReport, Wanted
from cachefs.formats.records import AttemptRecord
from cachefs.journal import Journal
from cachefs.publish import joined
from cachefs.publish.joining import again, attempt_for, follows
from cachefs.publish.problems import Problems
from cachefs.publish.promotion import Listed
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen

WANTED = "waits for an owner of the run to open it"
"""What a save of this member waits for, as the status shows it."""


ASK = 2
"""Looks without an attempt before a member asks for one."""
OTHERS = 2.0
"""Polls that members wait beyond that, but for the first of them: mostly it has asked for them all."""
AGAIN = 20
"""Looks from one question after what became of a wish to the next."""


class _Lonely(msgspec.Struct):
    """A save that has found no attempt at so many looks in a row, and at which of them its member asks next."""

    since: float
    looks: int = 0
    ask: int = ASK


class OwnWishes:
    """What this member wishes for, on a daemon that is not the owner."""

    def __init__(self, journal: Journal, writes: Writes, settings: Settings) -> None:
        self._journal = journal
        self._writes = writes
        self._member = settings.member
        first = not settings.names or settings.member == settings.names[0]
        self._patience = 0.0 if first else OTHERS * settings.poll
        self._lonely: dict[str, dict[str, _Lonely]] = {}
        """By run and save."""

    def due(self, run: str, save: str) -> bool:
        """Return whether to ask at this look if an attempt was opened for a save, and has ended unseen."""
        lonely = self._lonely.get(run, {}).get(save)
        return lonely is not None and lonely.looks % AGAIN == ASK + 1

    async def ask(self, run: str, lonely: Sequence[AttemptRecord]) -> None:
        """Count a look at which these saves found no attempt; ask for one where there were some before, and again when
        the wish is gone: garbage collection takes old ones. Raises the store's errors.
        """
        now, before = trio.current_time(), self._lonely.get(run, {})
        self._lonely[run] = {save.attempt: before.get(save.attempt) or _Lonely(now) for save in lonely}
        for save in lonely:
            one = self._lonely[run][save.attempt]
            one.looks += 1
            if one.looks >= one.ask and now - one.since >= self._patience:
                await self._wish(run, save)
                one.ask = one.looks + AGAIN

    async def _wish(self, run: str, save: AttemptRecord) -> None:
        same = [one for one in joined.saves(self._journal, run) if one.generation == save.generation]
        with self._journal.read() as txn:
            ended, offers = txn.run(run).ended, [one for one in txn.shared.scan() if one.run == run]
        wanted = Wanted(
            run=run,
            generation=save.generation,
            attempt=save.attempt,
            member=self._member,
            kind=save.kind,
            step=save.step,
            serial=save.serial,
            again=again(save, same),
            resumed=follows(save, same, offers, ended),
        )
        await self._writes.create(self._writes.keys.wanted(run, save.attempt), wanted, _equal)
        await self._journal.write(partial(joined.show, save.attempt, WANTED))


class OthersWishes:
    """What other members wish for, on the daemon that is the owner."""

    def __init__(self, journal: Journal, writes: Writes, problems: Problems) -> None:
        self._journal = journal
        self._writes = writes
        self._problems = problems
        self._listed = Listed(writes)
        self._wishes: dict[str, dict[str, Wanted]] = {}
        """By run and key: the wishes that are there, read once."""
        self._served: dict[str, set[str]] = {}
        """By run: saves that are part of an attempt, or were: what they wished for is granted."""

    def granted(self, run: str, save: str) -> None:
        """Note that a save is part of an attempt: what it was wished for has come."""
        self._served.setdefault(run, set()).add(save)

    async def due(self, run: str, seen: Seen | None) -> dict[str, Wanted]:
        """Return one wish for each generation of which nothing is open, unless it was granted before; `seen` is the
        run's pointer. A wish that cannot be read is a problem of the run. Raises the store's errors.
        """
        keys = self._writes.keys
        listing = await self._writes.hop(self._writes.store.list, keys.wanted(run))
        found: dict[str, Wanted | None] = {}
        for key in listing.keys:
            found[key] = self._wishes.get(run, {}).get(key)
            with self._problems.passed(run):
                found[key] = found[key] or await self._read(run, key)
        self._wishes[run] = {key: wish for key, wish in found.items() if wish is not None}
        served = self._served[run] = self._served.get(run, set()) & {keys.name_of(key) for key in found}
        waiting = [wish for wish in first_due(self._wishes[run].values()) if wish.attempt not in served]
        if not waiting:
            return {}
        with self._journal.read() as txn:
            busy = {one.generation for one in txn.attempts.scan() if one.run == run and not one.state.final}
        due: dict[str, Wanted] = {}
        for wish in waiting:
            if wish.generation in busy or wish.generation in due:
                continue
            granted = attempt_for(wish.attempt)
            with self._journal.read() as txn:
                over = txn.attempts.get(granted) is not None
            if over or (seen is not None and await self._is_granted(wish, seen)):
                served.add(wish.attempt)  # by an earlier owner, or long ago
            else:
                due[wish.generation] = wish
        return due

    async def _is_granted(self, wish: Wanted, seen: Seen) -> bool:
        """Return whether an attempt was opened for a wish, or its save was reported as part of another one."""
        ever = await self._listed.ever(wish.run, seen)
        if attempt_for(wish.attempt) in ever:
            return True
        for attempt, generation in ever.items():
            if generation == wish.generation:
                with self._problems.passed(wish.run):
                    key = self._writes.keys.member(wish.run, attempt, wish.member)
                    report = await self._writes.small(key, MemberReport)
                    if report is not None and report.save == wish.attempt:
                        return True
        return False

    async def _read(self, run: str, key: str) -> Wanted | None:
        wish = await self._writes.small(key, Wanted)
        if wish is not None and (wish.run != run or key != self._writes.keys.wanted(run, wish.attempt)):
            raise CorruptError(f"{key} is a wish for another attempt", hint="remove that object's version")
        return wish


def _equal(theirs: Wanted, ours: Wanted) -> bool:
    # The save before may have found its attempt meanwhile, and lost it.
    return msgspec.structs.replace(theirs, again=ours.again, resumed=ours.resumed) == ours


def first_due(wishes: Collection[Wanted]) -> list[Wanted]:
    """Return the wishes that may be granted, in the order in which attempts for them are opened: by step, for one that
    is opened after a later step would be refused for its older one. Pure.

    A member that wishes for two saves of a name has written it again: the older one is over. So is, most likely, what
    others wish for that have not yet begun to write it again.
    """
    newest: dict[tuple[str, str], Wanted] = {}
    for wish in wishes:
        last = newest.setdefault((wish.member, wish.generation), wish)
        if last.serial < wish.serial:
            newest[wish.member, wish.generation] = wish
    return sorted(newest.values(), key=lambda wish: (wish.step, not wish.again, wish.attempt))
