"""The upload of one shard: one PutObject up to the part size, an upload in parts above.

Every part is read in order, for the hash of the whole file, and hashed; a part that the store already holds with this
very digest is not sent. So an upload that is taken up again sends what is missing and still knows that every byte of
the object is the byte that was closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio
import xxhash

from cachefs.errors import BadPart, CachefsError, CorruptError, NoSuchUpload, UnavailableError
from cachefs.flush import progress
from cachefs.flush.lanes import Lanes
from cachefs.flush.parts import damaged, read_part
from cachefs.flush.plan import Range, held_parts, parts
from cachefs.flush.progress import Dropped, Sent
from cachefs.formats.manifest import Pin, tree_digest
from cachefs.formats.records import PartRecord, ShardRecord
from cachefs.journal import Journal
from cachefs.staging.pins import PinReader
from cachefs.store.base import ObjectInfo, ObjectStore, PartInfo
from cachefs.store.createonly import WRITE_ID, complete_create_only, create_only
from cachefs.store.hop import Hop

T = TypeVar("T")

MAX_REFUSALS = 5
"""How often a part may be refused (BadDigest, InvalidPart) before the upload is given up for a while."""


@dataclass(frozen=True)
class Doors:
    """What an upload works with. `failed` is told about every failure that is tried again."""

    journal: Journal
    store: ObjectStore
    hop: Hop
    pins: PinReader
    lanes: Lanes
    failed: Callable[[CachefsError], None]


class Upload:
    """One shard on its way. `record.part_size` is fixed: digests and objects of an earlier try depend on it."""

    def __init__(self, doors: Doors, run: str, record: ShardRecord) -> None:
        self.record = record
        self.run = run
        self._doors = doors
        self._refusals = 0

    async def send(self) -> Sent:
        """Bring the file into the store; waits out every unclear or refused answer and takes up what was begun.

        Raises
        - CorruptError: the bytes are not those that were pinned, or the key holds others: never to be published,
        - Dropped: the record is gone or replaced,
        - BadPart: the store refused parts again and again,
        - DeniedError, OSError, StagingError, Unsupported: this try failed; the file stays dirty.
        """
        ranges = parts(self.record.identity.size, self.record.part_size)
        if len(ranges) == 1:
            return await self._send_whole(ranges[0])
        while True:
            try:
                return await self._send_parts(ranges)
            except NoSuchUpload as error:
                await self._start_over(error)

    async def abort(self) -> None:
        """Abort the upload in parts, if there is one; insists until the store has answered, wanted or not."""
        if not self.record.upload_id:
            return
        done = False
        while not done:
            try:
                await self._insist(self._doors.store.abort_multipart, self.record.key, self.record.upload_id)
                done = True
            except Dropped:  # by the journal, while a failure was noted in it
                continue
        await self._doors.journal.write(partial(progress.forget, self.record))
        self.record = msgspec.structs.replace(self.record, upload_id="")

    # one request

    async def _send_whole(self, part: Range) -> Sent:
        doors, record = self._doors, self.record
        while True:
            try:
                async with doors.lanes.slot(self.run, part.length) as buffer:
                    whole = xxhash.xxh3_128()
                    digest = await doors.hop(read_part, doors.pins, record, part, buffer, whole)
                    self._check(whole)
                    self._ask()
                    await doors.lanes.throttle.take(part.length)
                    info = await create_only(
                        doors.store, doors.hop, record.key, buffer, write_id=record.shard, sha256=digest
                    )
            except (UnavailableError, BadPart) as error:
                await self._failed(error)
            else:
                doors.lanes.succeeded(self.run)
                return self._sent(info, (digest,), whole)

    # in parts

    async def _send_parts(self, ranges: Sequence[Range]) -> Sent:
        held = await self._take_up(ranges)
        while True:
            sent, whole = await self._send_missing(ranges, held)
            self._check(whole)
            ordered = [sent[part.number] for part in ranges]
            digests = tuple(part.sha256 or b"" for part in ordered)
            try:
                return self._sent(await self._complete(ordered, tree_digest(digests)), digests, whole)
            except BadPart as error:
                await self._failed(error)
                held = held_parts(ranges, self._journaled(), await self._list())

    async def _take_up(self, ranges: Sequence[Range]) -> dict[int, PartInfo]:
        """Return the parts that an upload begun earlier holds; begin one if there is none."""
        if not self.record.upload_id:
            await self._begin()
            return {}
        held = held_parts(ranges, self._journaled(), None)
        if len(held) == len(ranges):
            return held  # Complete may have been sent, and the upload be gone for the best of reasons
        return held_parts(ranges, self._journaled(), await self._list())

    async def _begin(self) -> None:
        upload_id = await self._insist(
            self._doors.store.create_multipart, self.record.key, metadata={WRITE_ID: self.record.shard}
        )
        # Known here first: should the journal not want it any more, it is there to be aborted.
        self.record = msgspec.structs.replace(self.record, upload_id=upload_id)
        await self._change(upload_id=upload_id)

    async def _start_over(self, error: NoSuchUpload) -> None:
        await self.abort()
        await self._failed(error)

    def _journaled(self) -> list[PartRecord]:
        with self._doors.journal.read() as txn:
            return txn.parts_of(self.record)

    async def _list(self) -> list[PartInfo]:
        return await self._insist(self._doors.store.list_parts, self.record.key, self.record.upload_id)

    async def _send_missing(
        self, ranges: Sequence[Range], held: dict[int, PartInfo]
    ) -> tuple[dict[int, PartInfo], xxhash.xxh3_128]:
        sent: dict[int, PartInfo] = {}
        whole = xxhash.xxh3_128()
        room = trio.Semaphore(self._doors.lanes.limit)
        try:
            async with trio.open_nursery() as nursery:
                for part in ranges:
                    await room.acquire()
                    # Returns once the part is read: reads are in order, sending is not.
                    await nursery.start(self._send_part, part, held.get(part.number), whole, sent, room)
        except BaseExceptionGroup as group:
            raise _weightiest(group) from None
        return sent, whole

    async def _send_part(
        self,
        part: Range,
        held: PartInfo | None,
        whole: xxhash.xxh3_128,
        sent: dict[int, PartInfo],
        room: trio.Semaphore,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        doors, record = self._doors, self.record
        digest = b""
        while part.number not in sent:
            try:
                async with doors.lanes.slot(self.run, part.length) as buffer:
                    hashed = None if digest else whole
                    again = await doors.hop(read_part, doors.pins, record, part, buffer, hashed)
                    if not digest:
                        digest = again
                        task_status.started()
                    elif digest != again:
                        raise damaged(record, f"reads differently each time (part {part.number})")
                    if held is not None and held.sha256 == digest:
                        sent[part.number] = held
                        break
                    self._ask()
                    await doors.lanes.throttle.take(part.length)
                    etag = await doors.hop(
                        doors.store.upload_part, record.key, record.upload_id, part.number, buffer, sha256=digest
                    )
            except (UnavailableError, BadPart) as error:
                await self._failed(error)
                if isinstance(error, UnavailableError) and error.reason == "5xx" and (gone := await self._gone()):
                    raise gone from error
            else:
                doors.lanes.succeeded(self.run)
                await self._acknowledged(PartRecord(part.number, record.upload_id, etag, digest))
                sent[part.number] = PartInfo(part.number, etag, part.length, digest)
        room.release()

    async def _complete(self, ordered: list[PartInfo], sha256: str) -> ObjectInfo:
        doors, record = self._doors, self.record
        complete = partial(complete_create_only, doors.store, doors.hop, record.key, record.upload_id, ordered)
        gone: NoSuchUpload | None = None
        while True:
            try:
                async with doors.lanes.slot(self.run):
                    self._ask()
                    info = await complete(write_id=record.shard, sha256=sha256)
            except UnavailableError as error:
                if gone is not None:  # there was no upload any more, and then no object either
                    raise gone from error
                await self._failed(error)
                gone = await self._gone()
            else:
                doors.lanes.succeeded(self.run)
                return info

    async def _gone(self) -> NoSuchUpload | None:
        """Return what the store says of an upload that it does not know; to more parts or its end some answer 500."""
        try:
            await self._list()
        except NoSuchUpload as error:
            return error
        return None

    # what both share

    def _ask(self) -> None:
        """Ask the journal before bytes are sent. Raises Dropped: the run may have been lost while this one waited."""
        with self._doors.journal.read() as txn:
            progress.current(txn, self.record)

    def _check(self, whole: xxhash.xxh3_128) -> None:
        known = self.record.identity.xxh3
        if known is not None and whole.hexdigest() != known:
            raise damaged(
                self.record, f"changed in staging after its save closed: hash {whole.hexdigest()}, it was {known}"
            )

    def _sent(self, info: ObjectInfo, digests: tuple[bytes, ...], whole: xxhash.xxh3_128) -> Sent:
        pin = Pin(info.key, info.version_id, self.record.identity.size, tree_digest(digests))
        return Sent(pin, digests, whole.hexdigest())

    async def _insist(self, request: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await self._insisted(partial(self._doors.hop, request, *args, **kwargs))

    async def _insisted(self, request: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                async with self._doors.lanes.slot(self.run):
                    result = await request()
            except UnavailableError as error:
                await self._failed(error)
            else:
                self._doors.lanes.succeeded(self.run)
                return result

    async def _failed(self, error: UnavailableError | BadPart | NoSuchUpload) -> None:
        """Count a failure, journal it, and let the run rest; raises a refusal that came too often."""
        doors = self._doors
        doors.failed(error)
        if isinstance(error, BadPart):
            self._refusals += 1
            if self._refusals > MAX_REFUSALS:
                raise error
        doors.lanes.failed(self.run)
        await self._change(error=str(error), retries=1)

    async def _change(self, *, retries: int = 0, **changes: Any) -> None:
        await self._doors.journal.write(partial(progress.change, self.record, retries, changes))

    async def _acknowledged(self, part: PartRecord) -> None:
        await self._doors.journal.write(partial(progress.acknowledge, self.record, part))


def _weightiest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of several parallel parts that decides: a crash, then damage, then any other."""

    def leaves(error: BaseException) -> list[BaseException]:
        return (
            [leaf for e in error.exceptions for leaf in leaves(e)] if isinstance(error, BaseExceptionGroup) else [error]
        )

    def weight(error: BaseException) -> int:
        if isinstance(error, trio.Cancelled):
            return 0
        if not isinstance(error, Exception):
            return 3
        return 2 if isinstance(error, CorruptError) else 1

    return max(leaves(group), key=weight)
