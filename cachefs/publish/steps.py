"""The steps of one attempt. Each is an effect in the store followed by its result in the journal, and may be repeated:
a step that finds its effect already there takes it over. rules.next_step says which step is due.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from cachefs import clock
from cachefs.errors import CorruptError, NotFoundError, PendingError, RestoreTestFailed
from cachefs.formats.codec import decode
from cachefs.formats.manifest import Close, Manifest, MemberReport, Open, Order, Pin
from cachefs.formats.pointer import OpenAttempt, Published
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import joining, loading, promotion, sealing
from cachefs.publish.promotion import Identity
from cachefs.publish.restoretest import check_pinned, check_stored
from cachefs.publish.rules import Refused, Step, releasable
from cachefs.publish.sealing import Completeness
from cachefs.publish.settings import Settings, expected
from cachefs.publish.sharing import share_test
from cachefs.publish.writes import Writes, pin_of
from cachefs.restore.reader import read_pinned
from cachefs.staging.pins import PinReader

T = TypeVar("T", bound=msgspec.Struct)


class Unpublishable(RestoreTestFailed):
    """This attempt can never be published: it is abandoned, and says why."""


class Steps:
    """Takes the steps of attempts; holds no state of its own."""

    def __init__(
        self,
        journal: Journal,
        pins: PinReader,
        who: Identity,
        settings: Settings,
        completeness: Completeness,
        started: int,
    ) -> None:
        self._journal = journal
        self._pins = pins
        self._who = who
        self._settings = settings
        self._completeness = completeness
        self._started = started
        self._take: dict[Step, Callable[[Writes, AttemptRecord, int], Awaitable[None]]] = {
            Step.OPEN: self._open,
            Step.REPORT: self._report,
            Step.SEAL: self._seal,
            Step.TEST: self._test,
            Step.PROMOTE: self._promote,
        }

    async def take(self, step: Step, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        """Take a step of an attempt in a run of which this process holds `epoch`; its result is in the journal then.

        Raises Unpublishable when the attempt is to be abandoned, FencedError when the run was lost, and every other
        error that leaves the attempt where it is.
        """
        await self._take[step](writes, attempt, epoch)

    async def _open(self, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        with self._journal.read() as txn:
            record = txn.run(attempt.run)
            saves = [one for one in txn.attempts.scan() if one.run == attempt.run]
            offers = [one for one in txn.shared.scan() if one.run == attempt.run]
        ended = {one.attempt for one in saves if one.state.final}
        same = [one for one in saves if one.generation == attempt.generation and not one.foreign]
        if not attempt.foreign and self._settings.count > 1:
            doubt = joining.doubtful(same, self._started)
            if doubt is not None:
                raise Unpublishable(joining.doubts(doubt))
            if attempt.attempt in joining.superseded(same, (), self._started):
                raise Unpublishable(joining.WRITTEN_AGAIN)
        names, count = expected(attempt, self._settings)
        if self._settings.service and not attempt.foreign and count > 1:
            raise Unpublishable("this node publishes what the members save, and is none of them")
        ours = sealing.opening(
            attempt,
            epoch=epoch,
            ordinal=record.ordinal + 1,
            owner=self._who.owner,
            members=names,
            count=count,
            again=attempt.again if attempt.foreign else joining.again(attempt, same),
            resumed=attempt.resumed if attempt.foreign else joining.follows(attempt, same, offers, record.ended),
        )
        key = writes.keys.open(attempt.run, attempt.attempt)
        with _condemns("open.json"):
            standing, _ = await writes.create(key, ours, sealing.same_open)
        listed = OpenAttempt(attempt.generation, attempt.attempt)
        refused = await promotion.announce(writes, attempt.run, listed, self._who, epoch=epoch, ended=ended)
        if refused is not None:
            raise Unpublishable(refused.reason)
        await self._journal.write(lambda txn: _opened(txn, attempt, standing, epoch))

    async def _report(self, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        settings, keys = self._settings, writes.keys
        with self._journal.read() as txn:
            shards = txn.shards_of(attempt.attempt)
        with _condemns("report"):
            ours = sealing.report(attempt, shards, member=settings.member, host=settings.host, writer=settings.writer)
            close = sealing.closing(attempt, settings.member)
            standing, _ = await writes.create(keys.close(attempt.run, attempt.attempt), close, sealing.same_close)
            if apart := sealing.closed_together(attempt, standing, settings.member):
                raise Unpublishable(apart)
            key = keys.member(attempt.run, attempt.attempt, settings.member)
            _, pin = await writes.create(key, ours, sealing.same_report)
        alone = attempt.count == 1 and attempt.members in ((), (settings.member,))
        await self._moved(attempt, report=pin, complete=alone)

    async def _seal(self, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        run, keys = attempt.run, writes.keys
        if attempt.sealed_epoch is not None:
            # Sealed by an earlier process of ours, which may have promoted it and died before it could say so.
            seen = await writes.standing_pointer(run)
            published = await promotion.published_since(writes, run, seen, attempt.attempt, attempt.sealed_epoch)
            if published is not None:
                return await self._published(writes, attempt, published)
        with _condemns("records"):
            opened, closed, reports = await self._collect(writes, attempt)
        with self._journal.read() as txn:
            shards = txn.shards_of(attempt.attempt)
        with _condemns("manifest"):
            ours = sealing.manifest(
                opened,
                closed,
                reports,
                place=lambda member: keys.shards(run, attempt.attempt, member),
                epoch=epoch,
                owner=self._who.owner,
                sealed_at=self._who.at(),
            )
            await writes.hop(
                check_pinned, self._completeness, ours, self._pins, shards, writes.store, ranges=self._settings.ranges
            )
            key = keys.manifest(run, attempt.attempt, opened=opened.epoch, sealed=epoch)
            _, pin = await writes.create(key, ours, sealing.same_manifest)
        await writes.assert_single(key)
        await self._moved(attempt, state=State.SEALED, manifest=pin, sealed_epoch=epoch)
        return None

    async def _collect(
        self, writes: Writes, attempt: AttemptRecord
    ) -> tuple[Open, Close, list[tuple[MemberReport, Pin]]]:
        """Return the open and close records and the reports of the members, as they stand in the store."""
        try:
            opened, _ = await self._small(writes, writes.keys.open(attempt.run, attempt.attempt), Open)
        except NotFoundError as error:
            # This process slept for longer than the grace between the create of the record and the announcement.
            raise Unpublishable(f"{error}: garbage collection took the attempt for an orphan") from error
        closed, _ = await self._small(writes, writes.keys.close(attempt.run, attempt.attempt), Close)
        reports: list[tuple[MemberReport, Pin]] = []
        missing: list[str] = []
        for member in opened.members or await self._reported(writes, attempt):
            key = writes.keys.member(attempt.run, attempt.attempt, member)
            try:
                reports.append(await self._small(writes, key, MemberReport))
            except NotFoundError:
                missing.append(member)
        if missing:
            raise PendingError(f"waits for the reports of {', '.join(missing)}")
        return opened, closed, reports

    async def _reported(self, writes: Writes, attempt: AttemptRecord) -> list[str]:
        keys = writes.keys
        listing = await writes.read(writes.store.list, keys.members(attempt.run, attempt.attempt))
        return [keys.name_of(key) for key in listing.keys]

    async def _small(self, writes: Writes, key: str, kind: type[T]) -> tuple[T, Pin]:
        found = await writes.read(writes.store.get, key)
        if found is None:
            raise NotFoundError(f"{key} is not in the store")
        info, body = found
        return decode(body, kind, key), pin_of(info, hashlib.sha256(body).hexdigest())

    async def _test(self, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        pin, settings = attempt.manifest, self._settings
        if pin is None or attempt.opened_epoch is None:
            raise Unpublishable("sealed without a manifest: the journal is damaged")
        with _condemns("restore test"):
            manifest = decode(await writes.read(read_pinned, writes.store, pin), Manifest, pin.key)
            testers = await share_test(writes, manifest, pin, settings)
            checks = await check_stored(writes, self._completeness, manifest, ranges=settings.ranges)
            how, loaded = settings.load, None
            if how is not None:
                loaded = await loading.load(writes, manifest, how, workers=settings.workers, ranges=settings.ranges)
            ours = sealing.evidence(
                manifest,
                pin,
                level=settings.level,
                member=settings.member,
                checks=checks,
                at=self._who.at(),
                testers=testers,
                loaded=loaded,
            )
            key = writes.keys.test(attempt.run, attempt.attempt, opened=attempt.opened_epoch, sealed=epoch)
            await writes.create(key, ours, sealing.same_evidence)
        await self._moved(attempt, state=State.TESTED)

    async def _promote(self, writes: Writes, attempt: AttemptRecord, epoch: int) -> None:
        if attempt.manifest is None or attempt.opened_epoch is None or attempt.ordinal is None:
            raise Unpublishable("tested without a manifest: the journal is damaged")
        candidate = Published(
            generation=attempt.generation,
            attempt=attempt.attempt,
            order=Order(step=attempt.step, epoch=attempt.opened_epoch, ordinal=attempt.ordinal),
            manifest=attempt.manifest,
        )
        outcome = await promotion.promote(
            writes, attempt.run, candidate, self._who, epoch=epoch, sealed_epoch=attempt.sealed_epoch or 0
        )
        if isinstance(outcome, Refused):
            raise Unpublishable(outcome.reason)
        await self._published(writes, attempt, outcome)

    async def _published(self, writes: Writes, attempt: AttemptRecord, published: Published) -> None:
        await self._journal.write(lambda txn: record_published(txn, attempt.attempt, published))
        await self.release(writes, attempt.run)

    async def release(self, writes: Writes, run: str) -> None:
        """Drop the pins and shard records of all attempts of a run that need them no more. May be repeated. Raises
        StagingError; waits for a thread.
        """
        with self._journal.read() as txn:
            ids = releasable([attempt for attempt in txn.attempts.scan() if attempt.run == run])
            listed = any(txn.shards_of(ident) for ident in ids)
        if listed:
            await self._journal.write(lambda txn: forget_shards(txn, run))
        # Pins go after their records: a record without its pin would read as damage, a pin without a record is swept.
        # For use in one process: where another process owns the pins (PinReader) this does nothing, and that one drops
        # the pins of attempts that are over and have no records.
        await writes.read(_drop_pins, self._pins, ids)

    async def _moved(self, attempt: AttemptRecord, **changes: Any) -> None:
        await self._journal.write(lambda txn: update(txn, attempt.attempt, error="", retries=0, **changes))


@contextmanager
def _condemns(what: str) -> Iterator[None]:
    """Turn what is wrong with the attempt itself into Unpublishable; errors of the store pass."""
    try:
        yield
    except CorruptError as error:
        kept = "the local bytes are kept until a later save of the run is published"
        raise Unpublishable(f"{what}: {error}; {kept}", hint=error.hint) from error


def update(txn: Txn, attempt: str, **changes: Any) -> AttemptRecord | None:
    """Replace fields of an attempt that is there and not final; anything else was decided elsewhere meanwhile."""
    record = txn.attempts.get(attempt)
    if record is None or record.state.final:
        return None
    return txn.update_attempt(attempt, **changes)


def _opened(txn: Txn, attempt: AttemptRecord, standing: Open, epoch: int) -> None:
    if standing.epoch == epoch:
        txn.update_run(attempt.run, ordinal=max(txn.run(attempt.run).ordinal, standing.ordinal))
    update(
        txn,
        attempt.attempt,
        opened_epoch=standing.epoch,
        ordinal=standing.ordinal,
        members=standing.members,
        count=standing.count,
        error="",
        retries=0,
    )


def record_published(txn: Txn, attempt: str, published: Published) -> None:
    """Record a publication, also of an attempt that was abandoned meanwhile: the pointer decides, and was read back."""
    if txn.attempts.get(attempt) is not None:
        txn.update_attempt(
            attempt,
            state=State.PUBLISHED,
            published_at=clock.now(),
            manifest=published.manifest,
            error="",
            retries=0,
        )


def forget_shards(txn: Txn, run: str) -> None:
    """Drop the shard records of all attempts of a run that need them no more (rules.releasable)."""
    for attempt in releasable([attempt for attempt in txn.attempts.scan() if attempt.run == run]):
        for shard in txn.shards_of(attempt):
            txn.drop_shard(shard)


def _drop_pins(pins: PinReader, attempts: list[str]) -> None:
    for attempt in attempts:
        pins.drop_attempt(attempt)
