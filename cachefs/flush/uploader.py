"""The Flusher: takes pinned files from the journal, brings them into the store, and records the proof."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from functools import partial

import msgspec
import trio

from cachefs.errors import (
    CachefsError,
    CorruptError,
    DeniedError,
    NoStoreError,
    NotFoundError,
    StagingError,
    UnavailableError,
)
from cachefs.flush import plan, progress
from cachefs.flush.lanes import Lanes
from cachefs.flush.orphans import Orphans, known_runs
from cachefs.flush.progress import Dropped, Sent
from cachefs.flush.shard import Doors, Upload
from cachefs.flush.throttle import Throttle
from cachefs.formats.keys import Keys
from cachefs.formats.records import AttemptRecord, ShardRecord
from cachefs.journal import Journal
from cachefs.staging.pins import PinReader
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop

PAUSE = 0.05
"""Least seconds between two looks at the journal, so that hints in their thousands cost little."""


class FlushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`part_size` in bytes, `bandwidth` in bytes per second (0: no limit), times in seconds; `upload_concurrency` is
    the number of parts in memory at any time.
    """

    member: str
    part_size: int = 64 << 20
    upload_concurrency: int = 8
    bandwidth: int = 0
    tick: float = 5.0
    backoff_base: float = 0.5
    backoff_cap: float = 30.0


class FlushStatistics(msgspec.Struct, frozen=True):
    """What the flusher does now and did since its start.

    `bytes_in_flight` and `most_bytes_in_flight` are of the buffers; `uploading` counts shards; `resting` are the runs
    and shards in back-off. `failures` counts failures by reason, all of which are or were tried again; `orphan_errors`
    holds, by run, why orphaned uploads could not be looked for.
    """

    bytes_in_flight: int
    most_bytes_in_flight: int
    uploading: int
    queued: int
    resting: frozenset[str]
    flushed_files: int
    flushed_bytes: int
    discarded: int
    abandoned: int
    orphans_aborted: int
    failures: dict[str, int]
    orphan_errors: dict[str, str]


class _End(Enum):
    """What came of one try to send a shard."""

    FLUSHED = "flushed"
    DROPPED = "dropped"
    ABANDONED = "abandoned"
    POSTPONED = "postponed"


class _Pending(msgspec.Struct, frozen=True):
    queues: dict[str, list[ShardRecord]]
    settled: list[str]
    unfit: list[ShardRecord]
    """Shards whose part size is not fixed yet."""


class Flusher:
    """See the module's head. Everything it knows is in the journal; a restart goes on where it was.

    `hop` must have more threads than `upload_concurrency`. `on_flushed` is called after an attempt became flushed or
    abandoned, as a hint.
    """

    def __init__(
        self,
        journal: Journal,
        store: ObjectStore,
        keys: Keys,
        hop: Hop,
        pins: PinReader,
        settings: FlushSettings,
        *,
        on_flushed: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
        self._keys = keys
        self._hop = hop
        self._settings = settings
        self._on_flushed = on_flushed
        self._lanes = Lanes(
            settings.upload_concurrency,
            settings.part_size,
            base=settings.backoff_base,
            cap=settings.backoff_cap,
            bandwidth=settings.bandwidth,
        )
        self._doors = Doors(journal, store, hop, pins, self._lanes, self._count)
        self._orphans = Orphans(self._doors, keys, settings.member)
        self._unswept: set[str] = set()
        self._queues: dict[str, deque[ShardRecord]] = {}
        self._active: dict[str, tuple[str, trio.CancelScope]] = {}
        self._left: Counter[str] = Counter()
        self._hint = trio.Event()
        self._looked = trio.Event()
        self._totals: Counter[str | _End] = Counter()
        self._failures: Counter[str] = Counter()
        self._orphan_errors: dict[str, str] = {}

    @property
    def throttle(self) -> Throttle:
        """Return the bandwidth limit, for what else is sent beside the flush."""
        return self._lanes.throttle

    def _key(self, attempt: AttemptRecord, shard: ShardRecord) -> str:
        """Return the object key of a shard: under the attempt that the owner has opened for the save."""
        return self._keys.shard(attempt.run, attempt.key, self._settings.member, shard.shard, shard.paths[0])

    def wake(self) -> None:
        """Hint that the journal changed: a save was announced, closed, staged, dropped or fenced."""
        self._hint.set()

    def pending(self) -> tuple[int, int]:
        """Return the files and bytes of closed saves that are not flushed, from the journal. Fenced runs do not count:
        nothing of theirs will be sent.
        """
        files = size = 0
        with self._journal.read() as txn:
            for attempt in txn.attempts.scan():
                if plan.waits(attempt, txn.runs.get(attempt.run)):
                    missing = [shard for shard in txn.shards_of(attempt.attempt) if shard.pin is None]
                    files += len(missing)
                    size += sum(shard.identity.size for shard in missing)
        return files, size

    async def drain(self) -> None:
        """Return when every closed save is flushed; `run` must be going on. Cancel it to stop waiting."""
        while self._waiting():
            self.wake()
            await self._looked.wait()

    def _waiting(self) -> bool:
        with self._journal.read() as txn:
            return any(plan.waits(attempt, txn.runs.get(attempt.run)) for attempt in txn.attempts.scan())

    def statistics(self) -> FlushStatistics:
        """Return what is going on now and the totals since the start."""
        lanes, totals = self._lanes.statistics(), self._totals
        return FlushStatistics(
            bytes_in_flight=lanes.bytes,
            most_bytes_in_flight=lanes.most_bytes,
            uploading=len(self._active),
            queued=sum(map(len, self._queues.values())),
            resting=lanes.resting,
            flushed_files=totals["files"],
            flushed_bytes=totals["bytes"],
            discarded=totals[_End.DROPPED],
            abandoned=totals[_End.ABANDONED],
            orphans_aborted=totals["orphans"],
            failures=dict(self._failures),
            orphan_errors=dict(self._orphan_errors),
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush for ever. Cancelling it ends each request under way and leaves the rest for the next start."""
        self._unswept = set(known_runs(self._journal))
        async with trio.open_nursery() as nursery:
            for run in self._unswept:
                nursery.start_soon(self._sweep, run)
            task_status.started()
            while True:
                self._hint = trio.Event()
                await self._look(nursery)
                await trio.sleep(PAUSE)
                with trio.move_on_after(self._settings.tick):
                    await self._hint.wait()

    async def _sweep(self, run: str) -> None:
        """Abort the orphaned uploads of a run; its files wait only until they are found."""
        try:
            try:
                orphans = await self._orphans.find(run)
            finally:
                self._unswept.discard(run)
                self.wake()
            for orphan in orphans:
                await self._orphans.abort(run, orphan)
                self._totals["orphans"] += 1
        except CachefsError as error:
            self._orphan_errors[run] = str(error)

    def _count(self, error: CachefsError) -> None:
        self._failures[error.reason if isinstance(error, UnavailableError) else type(error).__name__] += 1

    # from the journal to tasks

    async def _look(self, nursery: trio.Nursery) -> None:
        """Re-read the journal: fix part sizes, stop what is not wanted, start what waits, settle what is complete."""
        try:
            pending = await self._hop(self._read)
            if pending.unfit:
                await self._journal.write(partial(progress.fit, pending.unfit, self._settings.part_size, self._key))
                pending = await self._hop(self._read)
            self._assign(pending, nursery)
            if pending.settled:
                await self._journal.write(partial(progress.settle_all, pending.settled))
                self._on_flushed()
        except (StagingError, UnavailableError) as error:
            # The journal is full, or there is no thread: what is under way goes on, the next look tries again.
            self._count(error)
        self._looked.set()
        self._looked = trio.Event()

    def _read(self) -> _Pending:
        with self._journal.read() as txn:
            runs = {run.run: run for run in txn.runs.scan()}
            attempts = [attempt for attempt in txn.attempts.scan() if plan.uploads(attempt, runs.get(attempt.run))]
            live = [(attempt, txn.shards_of(attempt.attempt)) for attempt in attempts]
        queues = plan.order(live)
        settled = [attempt.attempt for attempt, shards in live if plan.flushed(attempt, shards)]
        unfit = [record for queue in queues.values() for record in queue if not record.part_size]
        return _Pending(queues, settled, unfit)

    def _assign(self, pending: _Pending, nursery: trio.Nursery) -> None:
        waiting = [record for queue in pending.queues.values() for record in queue]
        wanted = {record.key for record in waiting}
        for key, (_run, scope) in self._active.items():
            if key not in wanted:
                scope.cancel()
        self._left = Counter(record.attempt for record in waiting)
        self._queues = {
            run: deque(record for record in queue if record.part_size and record.key not in self._active)
            for run, queue in pending.queues.items()
            if run not in self._unswept
        }
        self._lanes.busy(len(pending.queues))
        for run in self._queues:
            self._start(run, nursery)

    def _start(self, run: str, nursery: trio.Nursery) -> None:
        """Keep as many shards of a run under way as there are slots; other runs have their own number."""
        queue = self._queues.get(run, deque())
        active = sum(1 for owner, _scope in self._active.values() if owner == run)
        while active < self._settings.upload_concurrency and queue:
            record = queue.popleft()
            if record.key not in self._active and not self._lanes.rests(record.key):
                scope = trio.CancelScope()
                self._active[record.key] = run, scope
                nursery.start_soon(self._ship, run, record, scope, nursery)
                active += 1

    # one shard

    async def _ship(self, run: str, queued: ShardRecord, scope: trio.CancelScope, nursery: trio.Nursery) -> None:
        upload = Upload(self._doors, run, queued)
        end = _End.DROPPED
        try:
            with scope:
                end = await self._try(upload)
            self._totals[end] += 1
            if end in (_End.DROPPED, _End.ABANDONED):
                await upload.abort()
        except CachefsError as error:  # the abort was refused: the next start finds the orphan
            self._count(error)
        finally:
            del self._active[queued.key]
        self._start(run, nursery)
        if not any(owner == run for owner, _scope in self._active.values()):
            self._hint.set()  # nothing known is left: there may be an attempt to settle, or new work

    async def _try(self, upload: Upload) -> _End:
        """Send one shard and record what came of it."""
        try:
            with self._journal.read() as txn:
                current = txn.shard(upload.record.attempt, upload.record.shard)
                if current is not None and current.pin is not None:
                    return _End.FLUSHED  # since the look at the journal
                upload.record = progress.current(txn, upload.record)
            return await self._record(upload.record, await upload.send())
        except Dropped:
            return _End.DROPPED
        except CorruptError as error:
            # An early file may have changed in an open save: the tracker will see that and drop it.
            return await (self._postpone if upload.record.early else self._abandon)(upload, error)
        except (CachefsError, OSError) as error:
            return await self._postpone(upload, error)

    async def _record(self, record: ShardRecord, sent: Sent) -> _End:
        self._left[record.attempt] -= 1
        last = self._left[record.attempt] <= 0
        flushed = await self._journal.write(partial(progress.prove, record, sent, last))
        self._totals["files"] += 1
        self._totals["bytes"] += sent.pin.size
        if flushed:
            self._on_flushed()
        return _End.FLUSHED

    async def _abandon(self, upload: Upload, error: Exception) -> _End:
        """These bytes must never be published: end the attempt, and name the file."""
        try:
            await self._journal.write(partial(progress.abandon, upload.record, str(error)))
        except Dropped:
            return _End.DROPPED
        except StagingError:
            return await self._postpone(upload, error)
        self._on_flushed()
        return _End.ABANDONED

    async def _postpone(self, upload: Upload, error: Exception) -> _End:
        """This try failed for a reason that will not go away at once: leave the shard alone for a while, say why."""
        self._failures[type(error).__name__] += 1
        self._lanes.failed(upload.record.key)
        if isinstance(error, (DeniedError, NoStoreError, NotFoundError)):  # of store or credentials, not of this file
            self._lanes.failed(upload.run)
        try:
            await self._journal.write(partial(progress.change, upload.record, 1, {"error": str(error)}))
        except Dropped:
            return _End.DROPPED
        except StagingError:
            pass  # counted above; what cannot be written cannot be noted either
        return _End.POSTPONED
