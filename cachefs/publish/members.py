"""What this member does for attempts of several members: finds them, joins its saves to them, answers, tests its share.

A look reads the run's pointer, whose list names the open attempts, and for each of them one small object: its close
record until there is one, then the manifest. Everything a look finds out is in the journal before anything follows from
it (SharedRecord), so a restart goes on. joining.py decides which save belongs to which attempt; the owner's side is
collecting.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import structlog
import trio

from cachefs.errors import CachefsError, CorruptError, UnavailableError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Abandoned, Close, Manifest, Open, Pin, Wanted
from cachefs.formats.pointer import Published
from cachefs.formats.records import AttemptRecord, RunRecord, SharedRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import joining, sealing
from cachefs.publish.joining import Absent, Decision, Join, Refuse
from cachefs.publish.promotion import Listed, left_the_list
from cachefs.publish.settings import Confirm, Settings, sure
from cachefs.publish.sharing import read_share
from cachefs.publish.steps import forget_shards, record_published, update
from cachefs.publish.writes import Conflict, Writes, pin_of
from cachefs.restore.reader import Seen, read_pointer

WANTED = "waits for an owner of the run to open it"
REPORTED = "has reported; waits for the owner and other members"
"""What a save of this member waits for, as the status shows it."""
_log = structlog.get_logger(__name__)


class CloseAsked(msgspec.Struct, frozen=True):
    """Another member saw the close signal: close this member's save as well.

    What was written a second time, at whatever time, may belong to the next save: the close record may have been held
    up, so that this member has seen the attempt open does not say that no save of it was over. After a weak signal
    files must be quiet first.
    """

    save: AttemptRecord
    close: Close
    since: float = 0.0

    @property
    def weak(self) -> bool:
        """Return whether the signal proves little about other members."""
        return self.close.strength not in ("A", "B")


class Member:
    """This member's part in the attempts of its runs. Not for concurrent looks at one run."""

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        nursery: trio.Nursery,
        *,
        started: int,
        close: Callable[[CloseAsked], None],
        joined: Callable[[], None] = lambda: None,
        confirm: Confirm = sure,
    ) -> None:
        """Shares of restore tests are read in `nursery`. `started` is the serial of the newest save when the daemon
        started. `close` carries a CloseAsked out; it is asked again at every look until the save is closed. `joined` is
        called when there may be something to send, `confirm` before damage is reported.
        """
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._nursery = nursery
        self._started = started
        self._close = close
        self._joined = joined
        self._confirm = confirm
        self._listed = Listed(writes)
        self._closes: dict[str, Close] = {}
        """Close records of attempts that this daemon opened."""
        self._absent_since: dict[str, float] = {}
        self._alone: dict[str, dict[str, int]] = {}
        """By run and save: at how many looks it found no attempt."""
        self._asked: set[str] = set()
        """The saves for which the owner was asked."""
        self._testing: set[tuple[str, int]] = set()

    async def look(self, run: str, *, new: bool = False) -> Seen | None:
        """Look at a run once and do what follows; return its pointer. `new` says that the run did not exist when this
        daemon had begun to look. Raises the store's errors: look again later.
        """
        with self._journal.read() as txn:
            record = txn.runs.get(run) or RunRecord(run)
        seen = await self._writes.hop(read_pointer, self._writes.store, self._writes.keys, run)
        seq = seen.pointer.seq if seen is not None else 0
        if seq < record.seq:
            raise UnavailableError(f"the pointer of run {run!r} reads older than it was: seq {seq} after {record.seq}")
        if seen is not None:
            await self._learn(run, seen, late=not record.looked and not new)
            await self._hear(run)
            await self._decide(run)
            await self._answer(run)
            await self._test(run, seen)
            await self._conclude(run, seen)
        await self._want(run)
        if not record.looked or seq != record.seq:
            await self._journal.write(lambda txn: _note_look(txn, run, seq))
        return seen

    # what there is

    def _shared(self, run: str) -> list[SharedRecord]:
        """Return the attempts of a run that others opened, the oldest first."""
        with self._journal.read() as txn:
            found = [record for record in txn.shared.scan() if record.run == run]
        return sorted(found, key=lambda record: (record.epoch, record.ordinal))

    def _saves(self, run: str) -> list[AttemptRecord]:
        """Return this member's saves of a run, the oldest first."""
        with self._journal.read() as txn:
            found = [save for save in txn.attempts.scan() if save.run == run and not save.foreign]
        return sorted(found, key=lambda save: save.serial)

    async def _learn(self, run: str, seen: Seen, *, late: bool) -> None:
        """Take up attempts that are new on the list."""
        with self._journal.read() as txn:
            known = {record.attempt for record in txn.shared.scan()}
            ours = {save.attempt for save in txn.attempts.scan() if not save.foreign}
        for entry in seen.pointer.open:
            if entry.attempt in known or (entry.attempt in ours and self._settings.owner):
                continue
            if not await self._take_up(run, entry.attempt, seen, late=late):
                raise CorruptError(f"attempt {entry.attempt} of run {run!r} is on the pointer's list without open.json")
            if entry.attempt in ours:  # opened by this member when it was the owner
                await self._journal.write(partial(_join, Join(entry.attempt, entry.attempt)))
        for save in self._saves(run):  # granted, and ended before this member looked again
            granted = joining.attempt_for(save.attempt)
            lonely = self._alone.get(run, {}).get(save.attempt, 0) > 2 and granted not in known
            if lonely and granted in await self._listed.ever(run, seen):
                await self._take_up(run, granted, seen, late=False)
        await self._take_back(run, seen)

    async def _take_up(self, run: str, attempt: str, seen: Seen, *, late: bool) -> bool:
        """Make a record of an attempt; return whether there is one."""
        opened = await self._small(self._writes.keys.open(run, attempt), Open)
        if opened is None:
            return False
        waiting = [save.attempt for save in self._saves(run) if save.generation == opened.generation and _waits(save)]
        record = SharedRecord(
            attempt=attempt,
            run=run,
            generation=opened.generation,
            kind=opened.kind,
            step=opened.step,
            epoch=opened.epoch,
            ordinal=opened.ordinal,
            members=opened.members,
            count=opened.count,
            seq=seen.pointer.seq,
            wish=opened.wish,
            late=late,
            waiting=tuple(waiting),
        )
        await self._put(record)
        return True

    async def _take_back(self, run: str, seen: Seen) -> None:
        """Take up attempts that this member opened when it was the owner, and that another owner has ended since.

        Those in which it has no part are that owner's.
        """
        if self._settings.owner:
            return
        with self._journal.read() as txn:
            foreign = any(save.run == run and save.foreign and not save.state.final for save in txn.attempts.scan())
        if foreign:
            await self._journal.write(partial(_forget_foreign, run))
        listed = {entry.attempt for entry in seen.pointer.open}
        for save in self._saves(run):
            if save.opened_epoch is None or save.shared or save.state.final or save.attempt in listed:
                continue
            record = SharedRecord(
                attempt=save.attempt,
                run=run,
                generation=save.generation,
                kind=save.kind,
                step=save.step,
                epoch=save.opened_epoch,
                ordinal=save.ordinal or 0,
                members=save.members,
                count=save.count,
                seq=seen.pointer.seq,
            )
            await self._put(record)
            await self._journal.write(partial(_join, Join(save.attempt, save.attempt)))

    async def _small(self, key: str, kind: type[Any]) -> Any:
        found = await self._writes.hop(self._writes.store.get, key)
        return None if found is None else decode(found[1], kind, key)

    async def _read_close(self, run: str, attempt: str) -> Close | None:
        close: Close | None = await self._small(self._writes.keys.close(run, attempt), Close)
        return close

    async def _put(self, record: SharedRecord) -> None:
        await self._journal.write(lambda txn: txn.shared.put(record.attempt, record))

    # the close

    async def _hear(self, run: str) -> None:
        """Tell the others of our close, and hear of theirs."""
        saves = {save.attempt: save for save in self._saves(run)}
        for record in self._shared(run):
            save = saves.get(record.local)
            close = record.close or await self._closed(run, record.attempt, save)
            if record.close is None and close is not None:
                await self._put(msgspec.structs.replace(record, close=close))
            self._ask(record.attempt, save, close)
        for save in saves.values():
            if save.count > 1 and not save.shared and save.opened_epoch is not None and not save.state.final:
                close = self._closes.get(save.attempt) or await self._closed(run, save.attempt, save)
                if close is not None:
                    self._closes[save.attempt] = close
                self._ask(save.attempt, save, close)

    async def _closed(self, run: str, attempt: str, save: AttemptRecord | None) -> Close | None:
        """Return the close record of an attempt; when our own save is closed, there is one afterwards."""
        if save is not None and save.closed_at is not None and not save.state.final:
            ours = sealing.closing(save, self._settings.member)
            standing, _ = await self._writes.create(self._writes.keys.close(run, attempt), ours, sealing.same_close)
            return standing
        return await self._read_close(run, attempt)

    def _ask(self, attempt: str, save: AttemptRecord | None, close: Close | None) -> None:
        if close is not None and save is not None and save.closed_at is None and not save.state.final:
            self._close(CloseAsked(save, close))

    # joining

    async def _decide(self, run: str) -> None:
        """Decide which saves belong to the attempts that this member has no part in yet (joining.py)."""
        saves, member = self._saves(run), self._settings.member
        offers: dict[str, list[SharedRecord]] = {}
        for record in self._shared(run):
            if not record.local and record.report is None and not record.refused:
                offers.setdefault(record.generation, []).append(record)
        for generation, group in offers.items():
            same = [save for save in saves if save.generation == generation]
            for save in same:
                if save.opened_epoch is None and (reason := joining.unwanted(group, save, member)):
                    await self._journal.write(partial(_abandon, save, reason))
            decisions = joining.decide(group, same, member=member, started=self._started)
            absent = {one.shared for one in decisions if isinstance(one, Absent)}
            for record in group:
                if record.attempt in absent:
                    self._absent_since.setdefault(record.attempt, trio.current_time())
                else:
                    self._absent_since.pop(record.attempt, None)
            for decision in decisions:
                await self._carry_out(run, generation, decision)

    async def _carry_out(self, run: str, generation: str, decision: Decision) -> None:
        match decision:
            case Join():
                await self._journal.write(partial(_join, decision))
                self._joined()
            case Refuse():
                _log.warning("cannot take part", run=run, generation=generation, reason=decision.reason)
                await self._journal.write(partial(_refuse, decision))

    async def _want(self, run: str) -> None:
        """Ask the owner for an attempt where a save has found none at two looks."""
        known = {record.generation for record in self._shared(run) if not record.report and not record.refused}
        lonely = [s for s in self._saves(run) if s.opened_epoch is None and not s.state.final]
        lonely = [save for save in lonely if save.generation not in known]
        for save in lonely:
            if (doubt := self._doubtful(save)) is not None:
                await self._journal.write(partial(_abandon, save, joining.doubts(doubt)))
        if self._settings.owner:
            return  # the publisher opens them
        before = self._alone.get(run, {})
        self._alone[run] = alone = {save.attempt: before.get(save.attempt, 0) + 1 for save in lonely}
        for save in lonely:
            if alone[save.attempt] > 1 and save.attempt not in self._asked:
                wanted = Wanted(
                    run=run,
                    generation=save.generation,
                    attempt=save.attempt,
                    member=self._settings.member,
                    kind=save.kind,
                    step=save.step,
                )
                await self._writes.create(self._writes.keys.wanted(run, save.attempt), wanted, _equal)
                self._asked.add(save.attempt)
                await self._journal.write(partial(_show, save.attempt, WANTED))

    def _doubtful(self, save: AttemptRecord) -> AttemptRecord | None:
        same = [one for one in self._saves(save.run) if one.generation == save.generation]
        return joining.doubtful(same, self._started) if self._settings.count > 1 else None

    # the answer

    async def _answer(self, run: str) -> None:
        """Report in the order of the attempts: a later one that is complete first would be promoted first, and have
        this one refused for its older step. One that is closed and not ready holds back those after it.
        """
        saves = {save.attempt: save for save in self._saves(run)}
        for record in self._shared(run):
            if record.report is not None or not self._expected(record):
                continue
            save = saves.get(record.local)
            refused = record.refused
            if record.local and (save is None or save.state is State.ABANDONED):
                refused = f"its save was abandoned: {save.error if save else 'it was removed'}"
            if refused:
                await self._report(record, save, refused)
            elif save is not None and save.state is State.FLUSHED and record.close is not None:
                apart = sealing.closed_together(save, record.close, self._settings.member)
                if apart:
                    await self._journal.write(partial(_abandon, save, apart))
                await self._report(record, save, apart)
            elif save is None and self._is_absent(record.attempt):
                await self._report(record, None, "")
            elif record.close is not None and (save is None or save.closed_at is not None):
                break

    def _expected(self, record: SharedRecord) -> bool:
        return not record.members or self._settings.member in record.members

    def _is_absent(self, attempt: str) -> bool:
        since = self._absent_since.get(attempt)
        return since is not None and trio.current_time() - since >= self._settings.absent_after

    async def _report(self, record: SharedRecord, save: AttemptRecord | None, error: str) -> None:
        settings = self._settings
        key = self._writes.keys.member(record.run, record.attempt, settings.member)
        who = {"member": settings.member, "host": settings.host, "writer": settings.writer}
        if save is not None and not error:
            with self._journal.read() as txn:
                shards = txn.shards_of(save.attempt)
            ours = sealing.report(save, shards, **who)
        else:
            ours = sealing.empty_report(record, error=error, **who)
        try:
            _, pin = await self._writes.create(key, ours, sealing.same_report)
        except Conflict:  # an earlier daemon of this name has answered, and its answer stands
            found = await self._writes.read(self._writes.store.get, key)
            if found is None:
                raise
            pin = pin_of(found[0], hashlib.sha256(found[1]).hexdigest())
            error = f"an earlier daemon of member {settings.member} has answered for this attempt"
            if save is not None:
                await self._journal.write(partial(_abandon, save, error))
        answered = msgspec.structs.replace(record, report=pin, refused=error)
        await self._journal.write(lambda txn: _answered(txn, answered))

    # the restore test

    async def _test(self, run: str, seen: Seen) -> None:
        """Begin to read this member's share of every manifest that is sealed under the current epoch."""
        if self._settings.owner:
            return  # as part of the publisher's step
        epoch = seen.pointer.epoch
        for record in self._shared(run):
            if record.report is None or record.refused or record.tested == epoch or not self._expected(record):
                continue
            key = self._writes.keys.manifest(run, record.attempt, opened=record.epoch, sealed=epoch)
            if (record.attempt, epoch) in self._testing:
                continue
            found = await self._writes.hop(self._writes.store.get, key)
            if found is not None:
                pin = pin_of(found[0], hashlib.sha256(found[1]).hexdigest())
                self._testing.add((record.attempt, epoch))
                self._nursery.start_soon(self._test_share, record, decode(found[1], Manifest, key), pin)

    async def _test_share(self, record: SharedRecord, manifest: Manifest, pin: Pin) -> None:
        member, keys = self._settings.member, self._writes.keys
        try:
            ours = await read_share(self._writes, manifest, self._settings, pin)
            if ours.error:
                await self._confirm(CorruptError(ours.error))
            key = keys.member_test(record.run, record.attempt, manifest.epoch, member)
            await self._writes.create(key, ours, sealing.same_test)
            await self._journal.write(lambda txn: _tested(txn, record.attempt, manifest.epoch))
        except CachefsError as error:  # the next look begins again
            _log.warning("cannot test my share", generation=record.generation, reason=str(error))
        finally:
            self._testing.discard((record.attempt, manifest.epoch))

    # the end

    async def _conclude(self, run: str, seen: Seen) -> None:
        """Record what became of attempts that are not on the list any more."""
        listed = {entry.attempt for entry in seen.pointer.open}
        for record in self._shared(run):
            if record.attempt in listed or seen.pointer.seq < record.seq:
                continue
            published = await left_the_list(self._writes, run, seen, record.attempt)
            reason = ""
            if published is None:
                why: Abandoned | None = await self._small(self._writes.keys.abandoned(run, record.attempt), Abandoned)
                reason = why.reason if why is not None else "its owner has ended it"
            await self._journal.write(partial(_ended, record, published, reason))
            await self._journal.write(lambda txn: forget_shards(txn, run))


def _waits(save: AttemptRecord) -> bool:
    return save.opened_epoch is None and not save.state.final


def _note_look(txn: Txn, run: str, seq: int) -> None:
    record = txn.runs.get(run) or RunRecord(run)
    txn.runs.put(run, msgspec.structs.replace(record, looked=True, seq=seq))


def _forget_foreign(run: str, txn: Txn) -> None:
    for save in list(txn.attempts.scan()):
        if save.run == run and save.foreign and not save.state.final:
            txn.attempts.delete(save.attempt)


def _join(decision: Join, txn: Txn) -> None:
    shared, local = decision.shared, decision.local
    record, save = txn.shared.get(shared), txn.attempts.get(local)
    if record is None or save is None or save.state.final:
        return
    txn.shared.put(shared, msgspec.structs.replace(record, local=local))
    txn.update_attempt(
        local,
        shared=shared,
        opened_epoch=record.epoch,
        ordinal=record.ordinal,
        members=record.members,
        count=record.count,
        error="",
    )


def _refuse(decision: Refuse, txn: Txn) -> None:
    record = txn.shared.get(decision.shared)
    if record is not None:
        txn.shared.put(decision.shared, msgspec.structs.replace(record, refused=decision.reason))
    for save in decision.locals:
        update(txn, save, state=State.ABANDONED, error=decision.reason)


def _show(attempt: str, why: str, txn: Txn) -> None:
    update(txn, attempt, error=why)


def _abandon(save: AttemptRecord, reason: str, txn: Txn) -> None:
    update(txn, save.attempt, state=State.ABANDONED, error=reason)


def _answered(txn: Txn, record: SharedRecord) -> None:
    txn.shared.put(record.attempt, record)
    if record.local and not record.refused:
        update(txn, record.local, report=record.report, error=REPORTED, retries=0)


def _ended(record: SharedRecord, published: Published | None, reason: str, txn: Txn) -> None:
    txn.shared.delete(record.attempt)
    if record.local and published is not None:
        record_published(txn, record.local, published)
    elif record.local:
        update(txn, record.local, state=State.ABANDONED, error=reason)


def _tested(txn: Txn, shared: str, epoch: int) -> None:
    record = txn.shared.get(shared)
    if record is not None:
        txn.shared.put(shared, msgspec.structs.replace(record, tested=epoch))


def _equal(theirs: Wanted, ours: Wanted) -> bool:
    return theirs == ours
