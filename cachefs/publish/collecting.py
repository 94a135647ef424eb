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
import trio

from cachefs import clock
from cachefs.errors import CorruptError, FencedError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import MemberReport, Open, Wanted
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import promotion, sealing
from cachefs.publish.joining import attempt_for
from cachefs.publish.ownership import Ownership
from cachefs.publish.settings import Settings
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
    ) -> None:
        """`path` is where a run's generation lies in the mount. `changed` is called when there is a step to take."""
        self._journal = journal
        self._writes = writes
        self._ownership = ownership
        self._settings = settings
        self._path = path
        self._changed = changed
        self._reports: dict[str, dict[str, MemberReport]] = {}
        self._since: dict[str, float] = {}
        self._wishes = OthersWishes(journal, writes)

    def fenced(self, run: str) -> bool:
        """Return whether this daemon has lost the run."""
        return bool(self._ownership.fenced_by(run))

    async def look(self, run: str, seen: Seen | None) -> None:
        """Look at a run once and do what follows; `seen` is its pointer. Raises FencedError, and the store's errors."""
        wishes = await self._wishes.due(run, seen) if self._settings.count > 1 else {}
        if wishes or (seen is not None and (self._unknown(seen) or self._over(seen))):
            await self._ownership.acquire(run)
        if self._ownership.epoch(run) is None:
            return
        if seen is not None:
            await self._take_over(run, seen)
        for wish in wishes.values():
            await self._open(wish)
        waiting = self._waiting(run)
        # Members report in order, so when the newest one is complete, what is read after it finds the older ones so.
        for attempt in reversed(waiting):
            await self._read_reports(attempt)
        for attempt in waiting:
            await self._judge(attempt)
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

    def _ours(self, attempt: str) -> bool:
        """Return whether this member has a save of that id: it was the owner once."""
        with self._journal.read() as txn:
            return txn.attempts.get(attempt) is not None

    async def take_over(self, run: str) -> None:
        """Make records of the attempts on the pointer's list that this daemon does not know; it holds the run."""
        seen = await self._writes.pointer(run)
        if seen is not None:
            await self._take_over(run, seen)

    async def _take_over(self, run: str, seen: Seen) -> None:
        for attempt in self._unknown(seen):
            if self._ours(attempt):
                await self._journal.write(partial(_own_again, attempt))
                continue
            opened = await self._opened(run, attempt)
            if opened is None:
                raise CorruptError(f"attempt {attempt} of run {run!r} is on the pointer's list without open.json")
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

    async def _opened(self, run: str, attempt: str) -> Open | None:
        key = self._writes.keys.open(run, attempt)
        found = await self._writes.hop(self._writes.store.get, key)
        return None if found is None else decode(found[1], Open, key)

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

    async def _read_reports(self, attempt: AttemptRecord) -> None:
        reports = self._reports.setdefault(attempt.attempt, {})
        keys = self._writes.keys
        listing = await self._writes.hop(self._writes.store.list, keys.members(attempt.run, attempt.attempt))
        for key in listing.keys:
            member = keys.name_of(key)
            found = None if member in reports else await self._writes.hop(self._writes.store.get, key)
            if found is not None:
                reports[member] = decode(found[1], MemberReport, key)
                self._wishes.granted(attempt.run, reports[member].save)

    async def _judge(self, attempt: AttemptRecord) -> None:
        reports = self._reports[attempt.attempt]
        reason, waits = verdict(attempt, reports)
        if not reason and not waits:
            await self._complete(attempt, reports)
            return
        if attempt.report is not None or attempt.foreign:
            since = self._since.setdefault(attempt.attempt, trio.current_time())
            if not reason and trio.current_time() - since >= self._settings.deadline:
                reason = f"{waits} for {self._settings.deadline:g} s: a member is missing"
        if reason:
            _log.error("generation abandoned", path=attempt.path, attempt=attempt.attempt, reason=reason)
            changes = {"state": State.ABANDONED, "error": reason}
        elif attempt.error == waits or (attempt.report is None and not attempt.foreign):
            return
        else:
            changes = {"error": waits}
        await self._journal.write(lambda txn: update(txn, attempt.attempt, **changes))
        self._changed()

    async def _complete(self, attempt: AttemptRecord, reports: dict[str, MemberReport]) -> None:
        if not attempt.foreign and attempt.report is None:
            return  # our own report comes first
        changes = {"complete": True, "error": "", "retries": 0}
        if attempt.foreign:
            changes |= {
                "state": State.FLUSHED,
                "closed_at": clock.now(),
                "files": sum(len(report.shards) for report in reports.values()),
                "size": sum(shard.pin.size for report in reports.values() for shard in report.shards),
            }
        await self._journal.write(lambda txn: update(txn, attempt.attempt, **changes))
        self._forget(attempt.attempt)
        self._changed()

    def _forget(self, attempt: str) -> None:
        self._reports.pop(attempt, None)
        self._since.pop(attempt, None)

    # the end

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
            await self._writes.create(self._writes.keys.abandoned(run, attempt.attempt), ours, sealing.same_end)
        try:
            await promotion.end(self._writes, run, {one.attempt for one in over}, who, epoch=epoch)
        except FencedError:
            await self._ownership.check(run)
        for attempt in over:
            self._forget(attempt.attempt)


def verdict(attempt: AttemptRecord, reports: dict[str, MemberReport]) -> tuple[str, str]:
    """Return why an attempt with these reports can never be complete, and what it waits for; pure. Both "" when it is
    complete.
    """
    for member, report in sorted(reports.items()):
        if report.error:
            return f"member {member} cannot take part: {report.error}", ""
    if attempt.members:
        others = sorted(set(reports) - set(attempt.members))
        if others:
            return f"member {others[0]} has reported and is none of {', '.join(attempt.members)}", ""
        missing = sorted(set(attempt.members) - set(reports))
        waits = f"waits for the reports of {', '.join(missing)}" if missing else ""
    else:
        if len(reports) > attempt.count:
            return f"{len(reports)} members have reported, {attempt.count} were expected: {', '.join(reports)}", ""
        here = ", ".join(sorted(reports)) or "none"
        waits = f"waits for the reports of {attempt.count} members, has {here}" if len(reports) < attempt.count else ""
    if not waits and not any(report.shards for report in reports.values()):
        return "no member has a file of it", ""
    return "", waits


def _own_again(attempt: str, txn: Txn) -> None:
    txn.shared.delete(attempt)
    update(txn, attempt, shared="")


def _insert(txn: Txn, record: AttemptRecord) -> None:
    if txn.attempts.get(record.attempt) is None:
        txn.attempts.put(record.attempt, msgspec.structs.replace(record, serial=txn.next_serial()))


def _grant(txn: Txn, record: AttemptRecord) -> None:
    same = [one for one in txn.attempts.scan() if (one.run, one.generation) == (record.run, record.generation)]
    if all(one.state.final for one in same):
        _insert(txn, record)
