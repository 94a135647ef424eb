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

from cachefs import clock
from cachefs.errors import CachefsError, CorruptError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Abandoned, Close, Manifest, Open, Pin, Wanted
from cachefs.formats.pointer import Published
from cachefs.formats.records import AttemptRecord, RunRecord, SharedRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import joining, sealing
from cachefs.publish.joining import Absent, Decision, Join, Refuse
from cachefs.publish.promotion import left_the_list
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

    `since` is the monotonic time of this machine at which the attempt was last seen open: what was written a second
    time after it may belong to the next save. After a weak signal files must be quiet first.
    """

    save: AttemptRecord
    since: float
    close: Close

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
        incarnation: str = "",
        close: Callable[[CloseAsked], None],
        joined: Callable[[], None] = lambda: None,
        confirm: Confirm = sure,
    ) -> None:
        """Shares of restore tests are read in `nursery`. `started` is the serial of the newest save when the daemon
        started, `incarnation` the id of the daemon, the same in each of its engines (default: a new one). `close`
        carries a CloseAsked out; it is asked again at every look until the save is closed. `joined` is called when
        there may be something to send, `confirm` before damage is reported.
        """
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._nursery = nursery
        self._started = started
        self._close = close
        self._joined = joined
        self._confirm = confirm
        self._incarnation = incarnation or clock.new_id()
        self._closes: dict[str, Close] = {}
        """Close records of attempts that this daemon opened."""
        self._seen_open: dict[str, float] = {}
        self._absent_since: dict[str, float] = {}
        self._alone: dict[str, set[str]] = {}
        """By run: the saves that found no attempt at the last look."""
        self._asked: set[str] = set()
        """The saves for which the owner was asked."""
        self._testing: set[tuple[str, int]] = set()

    async def look(self, run: str, *, new: bool = False) -> Seen | None:
        """Look at a run once and do what follows; return its pointer. `new` says that the run did not exist when this
        daemon had begun to look. Raises the store's errors: look again later.
        """
        with self._journal.read() as txn:
            meta = txn.meta.get("meta")
            record = txn.runs.get(run) or RunRecord(run)
        serial, looked = meta.serial if meta else 0, record.looked
        here = new or record.looked_by == self._incarnation
        seen = await self._writes.hop(read_pointer, self._writes.store, self._writes.keys, run)
        if seen is not None:
            await self._learn(run, seen, here=here)
            await self._hear(run)
            await self._decide(run, looked)
            await self._answer(run)
            await self._test(run, seen)
            await self._conclude(run, seen)
        await self._want(run)
        if serial != looked or record.looked_by != self._incarnation:
            await self._journal.write(lambda txn: _note_look(txn, run, serial, self._incarnation))
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

    async def _learn(self, run: str, seen: Seen, *, here: bool) -> None:
        """Take up attempts that are new on the list; `here` says that this daemon was there when they came on it."""
        with self._journal.read() as txn:
            known = {record.attempt for record in txn.shared.scan()}
            ours = {save.attempt for save in txn.attempts.scan() if not save.foreign}
        for entry in seen.pointer.open:
            if entry.attempt in known or (entry.attempt in ours and self._settings.owner):
                continue
            opened = await self._small(self._writes.keys.open(run, entry.attempt), Open)
            if opened is None:
                raise CorruptError(f"attempt {entry.attempt} of run {run!r} is on the pointer's list without open.json")
            close = None if here else await self._read_close(run, entry.attempt)
            record = SharedRecord(
                attempt=entry.attempt,
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
                late=close is not None,
                close=close,
            )
            await self._put(record)
            if entry.attempt in ours:  # opened by this member when it was the owner
                await self._journal.write(partial(_join, Join(entry.attempt, entry.attempt)))

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
        before = clock.monotonic()
        close = await self._read_close(run, attempt)
        if close is None:
            self._seen_open[attempt] = before
        return close

    def _ask(self, attempt: str, save: AttemptRecord | None, close: Close | None) -> None:
        if close is not None and save is not None and save.closed_at is None and not save.state.final:
            self._close(CloseAsked(save, self._seen_open.get(attempt, 0.0), close))

    # joining

    async def _decide(self, run: str, looked: int) -> None:
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
            decisions = joining.decide(group, same, member=member, looked=looked, started=self._started)
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
        if self._settings.owner:
            return  # the publisher opens them
        before, self._alone[run] = self._alone.get(run, set()), {save.attempt for save in lonely}
        for save in lonely:
            if save.attempt in before - self._asked:
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
                await self._journal.write(partial(_waits, save.attempt, WANTED))

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
                await self._report(record, save, "")
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
            self._seen_open.pop(record.attempt, None)

            await self._journal.write(partial(_ended, record, published, reason))
            await self._journal.write(lambda txn: forget_shards(txn, run))


def _note_look(txn: Txn, run: str, serial: int, daemon: str) -> None:
    record = txn.runs.get(run) or RunRecord(run)
    txn.runs.put(run, msgspec.structs.replace(record, looked=serial, looked_by=daemon))


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


def _waits(attempt: str, why: str, txn: Txn) -> None:
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
