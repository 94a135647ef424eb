"""What the owner does for attempts of several members: takes over what an earlier owner left open, opens attempts that
other members ask for, counts the answers, and ends what will not be complete.

The owner's records of attempts in which this node has no part are `foreign`. Sealing, testing and promoting them are
the same steps as for its own (steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from cachefs import clock
from cachefs.errors import CorruptError, FencedError
from cachefs.formats.manifest import Open, Wanted
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import promotion, rules, sealing
from cachefs.publish.joining import attempt_for
from cachefs.publish.ownership import Ownership
from cachefs.publish.problems import Problems
from cachefs.publish.reports import Reports
from cachefs.publish.settings import Confirm, Settings, sure
from cachefs.publish.steps import update
from cachefs.publish.wishes import OthersWishes
from cachefs.publish.writes import Writes
from cachefs.restore.reader import Seen

_log = structlog.get_logger(__name__)


class Collector:
    """The owner's side of the attempts of its runs. Not for concurrent looks at one run."""

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        ownership: Ownership,
        settings: Settings,
        *,
        path: Callable[[str, str], str],
        changed: Callable[[], None],
        problems: Problems,
        confirm: Confirm = sure,
    ) -> None:
        """`path` is where a run's generation lies in the mount. `changed` is called when there is a step to take,
        `confirm` before an attempt is given up for what the store has answered.
        """
        self._journal = journal
        self._writes = writes
        self._ownership = ownership
        self._settings = settings
        self._path = path
        self._changed = changed
        self._problems = problems
        self._confirm = confirm
        self._off: dict[str, set[str]] = {}
        """By run: the opened attempts that the pointer did not list at the last look."""
        self._unopened: dict[str, set[str]] = {}
        """By run: the attempts on the pointer's list whose open records could not be read at the last look."""
        self._wishes = OthersWishes(journal, writes, problems)
        self._reports = Reports(journal, writes, settings, granted=self._wishes.granted, confirm=confirm)

    def fenced(self, run: str) -> bool:
        """Return whether this daemon has lost the run."""
        return bool(self._ownership.fenced_by(run))

    async def look(self, run: str, seen: Seen | None) -> None:
        """Look at a run once and do what follows; `seen` is its pointer. Raises FencedError, and the store's errors.

        What is damaged, or of another format, ends the attempt that it is about; the others go on.
        """
        wishes = await self._wishes.due(run, seen) if self._settings.count > 1 else {}
        if wishes or (seen is not None and (self._unknown(seen) or self._over(seen))):
            await self._ownership.acquire(run)
        if self._ownership.epoch(run) is None:
            return
        if seen is not None:
            await self._give_up(run, seen, await self._take_over(run, seen))
            await self._find_ended(run, seen)
        for wish in wishes.values():
            await self._open(wish)
        waiting = self._waiting(run)
        # Members report in order, so when the newest one is complete, what is read after it finds the older ones so.
        for attempt in reversed(waiting):
            await self._reports.read(attempt)
        for attempt in waiting:
            await self._judge(attempt, seen)
        if seen is not None:
            await self._end(run, seen)

    # what an earlier owner left

    def _unknown(self, seen: Seen) -> list[str]:
        with self._journal.read() as txn:
            return [entry.attempt for entry in seen.pointer.open if not self._owns(txn, entry.attempt)]

    @staticmethod
    def _owns(txn: Txn, attempt: str) -> bool:
        record = txn.attempts.get(attempt)
        return record is not None and not record.shared

    async def take_over(self, run: str) -> None:
        """Make records of the attempts on the pointer's list that this daemon does not know; it holds the run."""
        seen = await self._writes.pointer(run)
        if seen is not None:
            await self._take_over(run, seen)

    async def _take_over(self, run: str, seen: Seen) -> dict[str, CorruptError]:
        """Return the attempts whose open records cannot be read, and why."""
        unopened: dict[str, CorruptError] = {}
        for attempt in self._unknown(seen):
            if await self._journal.write(partial(_own_again, attempt)):
                continue
            try:
                opened = await self._opened(run, attempt)
            except CorruptError as error:
                self._problems.note(run, error)
                unopened[attempt] = error
                continue
            _log.info("attempt taken over", run=run, generation=opened.generation, attempt=attempt)
            await self._insert(
                AttemptRecord(
                    attempt=attempt,
                    path=self._path(run, opened.generation),
                    run=run,
                    generation=opened.generation,
                    kind=opened.kind,
                    preset="",
                    step=opened.step,
                    opened_at=clock.now(),
                    serial=0,
                    opened_epoch=opened.epoch,
                    ordinal=opened.ordinal,
                    members=opened.members,
                    count=opened.count,
                    foreign=True,
                )
            )
        return unopened

    async def _give_up(self, run: str, seen: Seen, unopened: dict[str, CorruptError]) -> None:
        """Abandon what nobody can complete, for its open record could not be read at the look before either.

        While it is on the list, a member that has never read the record keeps out of the run.
        """
        before, self._unopened[run] = self._unopened.get(run, set()), set(unopened)
        for entry in seen.pointer.open:
            if entry.attempt not in before & set(unopened):
                continue
            error = unopened[entry.attempt]
            await self._confirm(error)
            _log.error("generation abandoned", generation=entry.generation, attempt=entry.attempt, reason=str(error))
            await self._insert(
                AttemptRecord(
                    attempt=entry.attempt,
                    path=self._path(run, entry.generation),
                    run=run,
                    generation=entry.generation,
                    kind="directory",
                    preset="",
                    step=0,
                    opened_at=clock.now(),
                    serial=0,
                    opened_epoch=seen.pointer.epoch,
                    ordinal=0,
                    members=self._settings.names,
                    count=self._settings.count,
                    foreign=True,
                    state=State.ABANDONED,
                    error=str(error),
                )
            )

    async def _opened(self, run: str, attempt: str) -> Open:
        opened = await self._writes.small(self._writes.keys.open(run, attempt), Open)
        if opened is None:
            raise CorruptError(f"attempt {attempt} of run {run!r} is on the pointer's list without open.json")
        return opened

    async def _insert(self, record: AttemptRecord) -> None:
        await self._journal.write(lambda txn: _insert(txn, record))
        self._changed()

    # what other members ask for

    async def _open(self, wish: Wanted) -> None:
        settings = self._settings
        alone = wish.kind == "file"
        record = AttemptRecord(
            attempt=attempt_for(wish.attempt),
            path=self._path(wish.run, wish.generation),
            run=wish.run,
            generation=wish.generation,
            kind=wish.kind,
            preset="",
            step=wish.step,
            opened_at=clock.now(),
            serial=0,
            members=(wish.member,) if alone else settings.names,
            count=1 if alone else settings.count,
            foreign=True,
            wish=wish.attempt,
            again=wish.again,
            resumed=bool(wish.resumed),
        )
        # In one transaction: a save of our own may have begun since the wishes were read.
        await self._journal.write(lambda txn: _grant(txn, record))
        self._changed()

    # the answers

    def _waiting(self, run: str) -> list[AttemptRecord]:
        with self._journal.read() as txn:
            found = [one for one in txn.attempts.scan() if one.run == run and not one.shared]
        return [
            one
            for one in sorted(found, key=lambda one: one.serial)
            if one.opened_epoch is not None
            and not one.state.final
            and not one.complete
            and (one.foreign or one.closed_at is not None or one.count > 1)
        ]

    async def _judge(self, attempt: AttemptRecord, seen: Seen | None) -> None:
        found = self._reports.judge(attempt, seen)
        if found.complete:
            await self._complete(attempt)
        elif found.reason:
            await self._abandon(attempt, found.reason)
        elif attempt.error != found.waits and (attempt.report is not None or attempt.foreign):
            await self._journal.write(lambda txn: update(txn, attempt.attempt, error=found.waits))
            self._changed()

    async def _abandon(self, attempt: AttemptRecord, reason: str) -> None:
        _log.error("generation abandoned", path=attempt.path, attempt=attempt.attempt, reason=reason)
        await self._journal.write(lambda txn: update(txn, attempt.attempt, state=State.ABANDONED, error=reason))
        self._changed()

    async def _complete(self, attempt: AttemptRecord) -> None:
        if not attempt.foreign and attempt.report is None:
            return  # our own report comes first
        changes = {"complete": True, "error": "", "retries": 0}
        if attempt.foreign:
            reports = self._reports.of(attempt.attempt)
            changes |= {
                "state": State.FLUSHED,
                "closed_at": clock.now(),
                "files": sum(len(report.shards) for report in reports),
                "size": sum(shard.pin.size for report in reports for shard in report.shards),
            }
        await self._journal.write(lambda txn: update(txn, attempt.attempt, **changes))
        self._reports.forget(attempt.attempt)
        self._changed()

    # the end

    async def _find_ended(self, run: str, seen: Seen) -> None:
        """Abandon the attempts that somebody else has taken off the list, as a rollback does.

        Those that were off it at the look before as well: at one alone, the pointer may be older than their opening.
        """
        listed = {entry.attempt for entry in seen.pointer.open}
        with self._journal.read() as txn:
            found = [one for one in txn.attempts.scan() if one.run == run and not one.shared and not one.state.final]
        off = [one for one in found if one.opened_epoch is not None and one.attempt not in listed]
        before, self._off[run] = self._off.get(run, set()), {one.attempt for one in off}
        for attempt in off:
            if attempt.attempt not in before:
                continue
            last = await promotion.departure(self._writes, run, seen, attempt.attempt, attempt.opened_epoch or 0)
            published = last.published.attempt if last is not None and last.published is not None else ""
            if last is not None and published != attempt.attempt:  # else the publisher finds it published
                await self._abandon(attempt, rules.ended_by(last))

    def _over(self, seen: Seen) -> list[AttemptRecord]:
        """Return the attempts on the list that this daemon has abandoned, perhaps an earlier process of it."""
        with self._journal.read() as txn:
            records = [txn.attempts.get(entry.attempt) for entry in seen.pointer.open]
        return [one for one in records if one is not None and one.state is State.ABANDONED and not one.shared]

    async def _end(self, run: str, seen: Seen) -> None:
        """Say of attempts on the list that were abandoned why, and take them off it."""
        over = self._over(seen)
        epoch = self._ownership.epoch(run)
        if not over or epoch is None:
            return
        who = self._ownership.identity
        for attempt in over:
            ours = sealing.ended(attempt, epoch=epoch, owner=who.owner, at=who.at())
            with self._problems.passed(run):  # who reads it says that its reason cannot be read
                await self._writes.create(self._writes.keys.abandoned(run, attempt.attempt), ours, sealing.same_end)
        try:
            await promotion.end(self._writes, run, {one.attempt for one in over}, who, epoch=epoch)
        except FencedError:
            await self._ownership.check(run)
        for attempt in over:
            self._reports.forget(attempt.attempt)


def _own_again(attempt: str, txn: Txn) -> bool:
    """Return whether there is a record of an attempt; one of a save that this member opened as an earlier owner, and
    joined when it was none, is driven again. The publisher and a look may take over at once: the second finds it done.
    """
    record = txn.attempts.get(attempt)
    if record is not None and record.shared:
        txn.shared.delete(attempt)
        txn.update_attempt(attempt, shared="")  # also of one that was abandoned: as its owner, it ends the attempt
    return record is not None


def _insert(txn: Txn, record: AttemptRecord) -> None:
    if txn.attempts.get(record.attempt) is None:
        txn.attempts.put(record.attempt, msgspec.structs.replace(record, serial=txn.next_serial()))


def _grant(txn: Txn, record: AttemptRecord) -> None:
    same = [one for one in txn.attempts.scan() if (one.run, one.generation) == (record.run, record.generation)]
    if all(one.state.final for one in same):
        _insert(txn, record)
