"""How a member finds the attempts that others have opened: on the pointer's list, by what it wished for, and in what it
left itself when it was the owner.
"""

from __future__ import annotations

from functools import partial

import msgspec

from cachefs.errors import CorruptError
from cachefs.formats.manifest import Open
from cachefs.formats.pointer import OpenAttempt
from cachefs.formats.records import AttemptRecord, SharedRecord
from cachefs.journal import Journal
from cachefs.publish import joined, joining
from cachefs.publish.joining import Join
from cachefs.publish.problems import Problems
from cachefs.publish.promotion import Listed
from cachefs.publish.settings import Confirm, Settings
from cachefs.publish.wishes import OwnWishes
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen


class Finder:
    """Makes a SharedRecord of each attempt that may have a part of this member. Not for concurrent looks at one run."""

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        wishes: OwnWishes,
        problems: Problems,
        confirm: Confirm,
    ) -> None:
        """`confirm` is called before an attempt is refused for what the store has answered."""
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._wishes = wishes
        self._problems = problems
        self._confirm = confirm
        self._listed = Listed(writes)

    async def learn(self, run: str, seen: Seen, *, late: bool) -> bool:
        """Take up attempts that are new on the list; return whether all of them were found."""
        complete = True
        with self._journal.read() as txn:
            known = {record.attempt for record in txn.shared.scan()}
            ours = {save.attempt for save in txn.attempts.scan() if not save.foreign}
        for entry in seen.pointer.open:
            if entry.attempt in known or (entry.attempt in ours and self._settings.owner):
                continue
            try:
                there = await self._take_up(run, entry.attempt, seen, late=late)
            except CorruptError as error:  # it is create-only: it will never be another
                await self._take_no_part(run, entry, seen, error)
                continue
            if not there:  # deleted, or not yet where a lagging replica is read: it may come
                missing = f"attempt {entry.attempt} of run {run!r} is on the pointer's list without open.json"
                self._problems.note(run, CorruptError(missing))
                complete = False
                continue
            if entry.attempt in ours:  # opened by this member when it was the owner
                await self._journal.write(partial(joined.join, Join(entry.attempt, entry.attempt)))
        for save in joined.saves(self._journal, run):  # granted, and ended before this member looked again
            granted = joining.attempt_for(save.attempt)
            if granted in known or not self._wishes.due(run, save.attempt):
                continue
            with self._problems.passed(run):
                opened = await self._writes.small(self._writes.keys.open(run, granted), Open)
                if opened is not None and granted in await self._listed.ever(run, seen):
                    await self._take_up(run, granted, seen, late=False)
        await self._take_back(run, seen)
        return complete

    async def miss(self, run: str, seen: Seen, since: int) -> None:
        """End the saves that wait and may have been part of an attempt that came and went since the last look, which
        saw the pointer `since`. Reads the versions between, if any save waits.
        """
        waiting = {save.generation for save in joined.saves(self._journal, run) if save.waits}
        if not waiting:
            return
        passed: dict[str, str] = {}
        published: set[str] = set()
        at: Seen | None = seen
        while at is not None and at.pointer.seq > since:
            passed.update({one.attempt: one.generation for one in at.pointer.open if one.generation in waiting})
            if at.pointer.published is not None:
                published.add(at.pointer.published.attempt)
            prev = at.pointer.prev
            at = await self._writes.before(run, at) if prev is not None and prev.seq > since else None
        listed = {one.attempt for one in seen.pointer.open}
        with self._journal.read() as txn:
            known = {one.attempt for one in txn.shared.scan()} | {one.attempt for one in txn.attempts.scan()}
        ended: set[str] = set()
        for attempt in passed.keys() - listed - known - published:
            try:
                opened = await self._writes.small(self._writes.keys.open(run, attempt), Open)
            except CorruptError:
                opened = None
            # Of one that is deleted since, or cannot be read, nobody knows whose it was.
            if opened is None or self._settings.membership.declared(opened.members):
                ended.add(passed[attempt])
        if ended:
            await self._journal.write(partial(joined.miss, run, ended))

    async def _take_up(self, run: str, attempt: str, seen: Seen, *, late: bool) -> bool:
        """Make a record of an attempt; return whether there is one."""
        opened = await self._writes.small(self._writes.keys.open(run, attempt), Open)
        if opened is None:
            return False
        waiting = [
            save.attempt
            for save in joined.saves(self._journal, run)
            if save.generation == opened.generation and save.waits
        ]
        record = _shared(opened, seen, epoch=opened.epoch, ordinal=opened.ordinal)
        record = msgspec.structs.replace(record, late=late, waiting=tuple(waiting))
        await self._journal.write(partial(joined.found, record, self._settings.incarnation))
        return True

    async def _take_no_part(self, run: str, entry: OpenAttempt, seen: Seen, error: CorruptError) -> None:
        """Make a record of an attempt whose open record cannot be read: this member reports that, and no more."""
        await self._confirm(error)
        record = SharedRecord(
            attempt=entry.attempt,
            run=run,
            generation=entry.generation,
            kind="directory",
            step=0,
            epoch=seen.pointer.epoch,
            ordinal=0,
            members=self._settings.names,
            count=self._settings.count,
            seq=seen.pointer.seq,
            refused=str(error),
        )
        await self._journal.write(partial(joined.put, record))

    async def _take_back(self, run: str, seen: Seen) -> None:
        """Take up attempts that this member opened when it was the owner, and that another owner has ended since.

        Those in which it has no part are that owner's.
        """
        if self._settings.owner:
            return
        with self._journal.read() as txn:
            foreign = any(save.run == run and save.foreign and not save.state.final for save in txn.attempts.scan())
        if foreign:
            await self._journal.write(partial(joined.forget_foreign, run))
        listed = {entry.attempt for entry in seen.pointer.open}
        for save in joined.saves(self._journal, run):
            if save.opened_epoch is None or save.shared or save.state.final or save.attempt in listed:
                continue
            record = _shared(save, seen, epoch=save.opened_epoch, ordinal=save.ordinal or 0)
            await self._journal.write(partial(joined.put, record))
            await self._journal.write(partial(joined.join, Join(save.attempt, save.attempt)))


def _shared(opened: Open | AttemptRecord, seen: Seen, *, epoch: int, ordinal: int) -> SharedRecord:
    """Return the record of an attempt that another daemon drives, from its open record or from ours of the time when
    this member was the owner; `seen` is a pointer that lists it, or a later one.
    """
    return SharedRecord(
        attempt=opened.attempt,
        run=opened.run,
        generation=opened.generation,
        kind=opened.kind,
        step=opened.step,
        epoch=epoch,
        ordinal=ordinal,
        members=opened.members,
        count=opened.count,
        seq=seen.pointer.seq,
        wish=opened.wish,
        again=opened.again,
        resumed=bool(opened.resumed),
    )
