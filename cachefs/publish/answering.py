"""A member's answers: its report of each attempt, its share of the restore test, and what became of the attempt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import msgspec
import structlog
import trio

from cachefs.errors import CachefsError, CorruptError
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Abandoned, Manifest, MemberReport, Pin
from cachefs.formats.pointer import Pointer, Published
from cachefs.formats.records import AttemptRecord, SharedRecord, State
from cachefs.journal import Journal
from cachefs.publish import joined, rules, sealing
from cachefs.publish.problems import Problems
from cachefs.publish.promotion import departure
from cachefs.publish.settings import Confirm, Settings
from cachefs.publish.sharing import read_share
from cachefs.publish.steps import forget_shards
from cachefs.publish.writes import Writes, pin_of
from cachefs.restore.reader import Seen, read_pinned

T = TypeVar("T", bound=msgspec.Struct)
_log = structlog.get_logger(__name__)


class Answers:
    """The answers of one member. Shares of restore tests are read in `nursery`; `confirm` is asked before damage is
    reported.
    """

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        nursery: trio.Nursery,
        confirm: Confirm,
        problems: Problems,
        started: int,
    ) -> None:
        """`started` is the serial of the newest save when the daemon started."""
        self._started = started
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._nursery = nursery
        self._confirm = confirm
        self._problems = problems
        self._testing: set[tuple[str, int]] = set()
        self._sealed: dict[str, tuple[Pin, Manifest]] = {}
        """By attempt: the manifest of which this member has read its share last."""

    async def answer(self, run: str, absent_since: Mapping[str, float]) -> None:
        """Report in the order of the attempts: a later one that is complete first would be promoted first, and have
        this one refused for its older step. One that is closed and not ready holds back those after it.

        `absent_since` is since when this member is known to have no save of an attempt. Raises the store's errors.
        """
        saves = {save.attempt: save for save in joined.saves(self._journal, run)}
        for record in joined.shared(self._journal, run):
            if record.report is not None or not (self._expected(record) or record.refused):
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
                    await self._journal.write(partial(joined.abandon, save, apart))
                await self._report(record, save, apart)
            elif save is None and self._is_absent(absent_since.get(record.attempt)):
                await self._report(record, None, "")
            elif record.close is not None and (save is None or save.closed_at is not None):
                break

    def _expected(self, record: SharedRecord) -> bool:
        return self._settings.membership.declared(record.members)

    def _is_absent(self, since: float | None) -> bool:
        return since is not None and trio.current_time() - since >= self._settings.absent_after

    async def _report(self, record: SharedRecord, save: AttemptRecord | None, error: str) -> None:
        settings = self._settings
        key = self._writes.keys.member(record.run, record.attempt, settings.member)
        who = {"member": settings.member, "host": settings.host, "writer": settings.writer}
        ours = None
        if save is not None and not error:
            with self._journal.read() as txn:
                shards = txn.shards_of(save.attempt)
            try:
                ours = sealing.report(save, shards, **who)
            except CorruptError as damage:
                error = str(damage)
                await self._journal.write(partial(joined.abandon, save, error))
        ours = ours or sealing.empty_report(record, error=error, **who)
        pin: Pin | None
        try:
            _, pin = await self._writes.create(key, ours, sealing.same_report)
        except CorruptError as other:  # an earlier daemon of this name has answered, and its answer stands
            pin = await self._standing(key)
            error = f"an earlier daemon of member {settings.member} has answered for this attempt: {other}"
            if save is not None:
                await self._journal.write(partial(joined.abandon, save, error))
        answered = msgspec.structs.replace(record, report=pin, refused=error)
        await self._journal.write(partial(joined.answered, answered))

    async def _standing(self, key: str) -> Pin | None:
        """Return the pin of the report that stands under a key; None if it cannot be read: that ends the attempt."""
        try:
            found = await self._writes.read(self._writes.store.get, key)
        except CorruptError:
            return None
        return pin_of(found[0], hashlib.sha256(found[1]).hexdigest()) if found is not None else None

    async def test(self, run: str, seen: Seen) -> None:
        """Begin to read this member's share of every manifest that is sealed under the current epoch."""
        if self._settings.owner:
            return  # as part of the publisher's step
        epoch = seen.pointer.epoch
        for record in joined.shared(self._journal, run):
            if record.report is None or record.refused or record.tested == epoch or not self._expected(record):
                continue
            key = self._writes.keys.manifest(run, record.attempt, opened=record.epoch, sealed=epoch)
            if (record.attempt, epoch) in self._testing:
                continue
            sealed = None
            with self._problems.passed(run):
                found = await self._writes.hop(self._writes.store.get, key)
                if found is not None:
                    pin = pin_of(found[0], hashlib.sha256(found[1]).hexdigest())
                    sealed = pin, decode(found[1], Manifest, key)
            if sealed is not None:
                pin, manifest = sealed
                self._testing.add((record.attempt, epoch))
                self._sealed[record.attempt] = sealed
                self._nursery.start_soon(self._test_share, record, manifest, pin)

    async def _test_share(self, record: SharedRecord, manifest: Manifest, pin: Pin) -> None:
        member, keys = self._settings.member, self._writes.keys
        try:
            ours = await read_share(self._writes, manifest, self._settings, pin)
            if ours.error:
                await self._confirm(CorruptError(ours.error))
            key = keys.member_test(record.run, record.attempt, manifest.epoch, member)
            await self._writes.create(key, ours, sealing.same_test)
            await self._journal.write(partial(joined.tested, record.attempt, manifest.epoch))
        except CachefsError as error:  # the next look begins again
            _log.warning("cannot test my share", generation=record.generation, reason=str(error))
        finally:
            self._testing.discard((record.attempt, manifest.epoch))

    async def conclude(self, run: str, seen: Seen) -> None:
        """Record what became of attempts that are not on the list any more."""
        listed = {entry.attempt for entry in seen.pointer.open}
        for record in joined.shared(self._journal, run):
            if record.attempt in listed or seen.pointer.seq < record.seq:
                continue
            last = await departure(self._writes, run, seen, record.attempt)
            published = last.published if last is not None else None
            reason = ""
            if published is None or published.attempt != record.attempt:
                published, reason = None, await self._why(record, last)
            elif record.local and (reason := await self._missing(record, published)):
                published = None
            self._sealed.pop(record.attempt, None)
            if published is None and not record.local and self._expected(record):
                until = self._started if record.before else math.inf
                await self._journal.write(partial(joined.miss, run, {record.generation}, until=until))
            await self._journal.write(partial(joined.ended, record, published, reason))
            await self._journal.write(lambda txn: forget_shards(txn, run))

    async def _why(self, record: SharedRecord, last: Pointer | None) -> str:
        """Return why an attempt ended that `last` took off the list."""
        try:
            ended = await self._writes.small(self._writes.keys.abandoned(record.run, record.attempt), Abandoned)
        except CorruptError as error:
            return f"its owner has ended it; why cannot be read: {error}"
        return rules.ended_by(last) if ended is None else ended.reason

    async def _missing(self, record: SharedRecord, published: Published) -> str:
        """Return why what was published does not hold this member's save, "" if it does (I19): the set may have been
        complete without it, or hold the answer of an earlier daemon of this name.
        """
        member = self._settings.member
        pin, manifest = self._sealed.get(record.attempt, (None, None))
        try:
            if manifest is None or pin != published.manifest:
                manifest = await self._pinned(published.manifest, Manifest)
            reports = [entry.pin for entry in manifest.members if entry.member == member]
            if reports and reports[0] == record.report and not record.refused:
                return ""
            if reports and (await self._pinned(reports[0], MemberReport)).save == record.local:
                return ""  # answered by a process that could not record it
        except CorruptError as error:
            return f"it was published, and whether with the files of this member cannot be told: {error}"
        return f"it was published without the files of this member, {member}"

    async def _pinned(self, pin: Pin, kind: type[T]) -> T:
        return decode(await self._writes.hop(read_pinned, self._writes.store, pin), kind, pin.key)
