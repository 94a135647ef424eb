"""The background task that publishes. The journal is its queue: it re-reads the records before every step, so a
wake-up, a tick and a restart are the same thing.

Runs are independent of each other; within one run one attempt at a time moves, in the order of the saves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog
import trio

from cachefs.errors import CachefsError, FencedError, StagingError
from cachefs.formats.keys import Keys
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish import rules
from cachefs.publish.joined import undecided
from cachefs.publish.ownership import Ownership
from cachefs.publish.sealing import Completeness, no_checks
from cachefs.publish.settings import Confirm, Settings, sure
from cachefs.publish.steps import Steps, Unpublishable, update
from cachefs.publish.writes import Pause, Writes, wait
from cachefs.staging.pins import PinReader
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop

T = TypeVar("T")

_log = structlog.get_logger(__name__)

Changed = Callable[[AttemptRecord], None]
"""Called after an attempt's record was changed in the journal, with the new record; must not block."""


def _nobody(attempt: AttemptRecord) -> None:
    pass


TakeOver = Callable[[str], Awaitable[None]]
"""Takes up the attempts that an earlier owner of a run left open."""


async def _nothing(run: str) -> None:
    pass


class Publisher:
    """Publishes the attempts in the journal. `completeness` checks formats; `changed` hears of every change."""

    def __init__(
        self,
        journal: Journal,
        store: ObjectStore,
        keys: Keys,
        hop: Hop,
        pins: PinReader,
        ownership: Ownership,
        settings: Settings,
        *,
        completeness: Completeness = no_checks,
        changed: Changed = _nobody,
        take_over: TakeOver = _nothing,
        confirm: Confirm = sure,
        started: int = 0,
    ) -> None:
        """`take_over` is called once for each run that this process owns, before the first step in it; `confirm` before
        an attempt is given up for what the store has answered. `started` is the serial of the newest save when the
        daemon started.
        """
        self._journal = journal
        self._store = store
        self._keys = keys
        self._hop = hop
        self._ownership = ownership
        self._settings = settings
        self._steps = Steps(journal, pins, ownership.identity, settings, completeness, started)
        self._changed = changed
        self._hint = trio.Event()
        self._take_over = take_over
        self._taken_over: set[str] = set()
        self._confirm = confirm
        self._active: set[str] = set()
        self._failing: set[str] = set()

    def wake(self) -> None:
        """Hint that an attempt may need a step."""
        self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publish, and watch the pointers of owned runs, for ever.

        Started when the local bytes of what was published before a crash have been released. May be cancelled or killed
        at any point; the next process goes on from the journal and the bucket. Errors are shown in the records and
        retried; none ends the task.
        """
        writes = self._writes("")
        for run in {attempt.run for attempt in self._attempts(lambda attempt: attempt.state.final)}:
            await self._insist(run, partial(self._steps.release, writes, run))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ownership.watch)
            task_status.started()
            while True:
                self._hint = trio.Event()
                for run in {attempt.run for attempt in self._attempts(lambda attempt: not attempt.state.final)}:
                    if run not in self._active:
                        self._active.add(run)
                        nursery.start_soon(self._drive, run)
                with trio.move_on_after(self._settings.tick):
                    await self._hint.wait()

    async def _drive(self, run: str) -> None:
        try:
            while await self._insist(run, partial(self._advance, run)):
                pass
        finally:
            self._active.discard(run)

    async def _insist(self, run: str, step: Callable[[], Awaitable[T]]) -> T:
        """Take a step that may be repeated until the journal lets it."""
        retries = 0
        while True:
            try:
                return await step()
            except StagingError as error:
                # Nothing can be recorded now. Whatever step was under way is found and taken over later.
                _log.error("the journal cannot be written", run=run, error=str(error), hint=error.hint)
                await trio.sleep(wait(retries))
                retries += 1

    async def _advance(self, run: str) -> bool:
        """Take one step in a run; return whether there may be another."""
        attempts = self._unfinished(run)
        if not attempts or self._ownership.fenced_by(run):
            return False
        attempt = attempts[0]
        try:
            epoch = await self._ownership.acquire(run, self._writes(attempt.attempt))
            if run not in self._taken_over:
                await self._take_over(run)
                self._taken_over.add(run)
            work = rules.next_attempt(
                self._unfinished(run), epoch, publish=self._settings.publish, undecided=self._undecided(run)
            )
            if work is not None:
                attempt, step = work
                await self._steps.take(step, self._writes(attempt.attempt), attempt, epoch)
        except Unpublishable as error:
            await self._abandon(attempt, error)
        except FencedError as error:
            await self._lost(attempt, error)
        except StagingError:
            raise
        except (CachefsError, OSError) as error:
            await self._pause(attempt.attempt, error, attempt.retries)
        else:
            await self._recovered(attempt.attempt)
            if work is None:
                return False
            self._tell(attempt.attempt)
        return True

    async def _abandon(self, attempt: AttemptRecord, error: Unpublishable) -> None:
        await self._confirm(error)
        reason = str(error)
        _log.error("generation abandoned", path=attempt.path, attempt=attempt.attempt, reason=reason)
        await self._journal.write(lambda txn: update(txn, attempt.attempt, state=State.ABANDONED, error=reason))
        await self._insist(attempt.run, partial(self._steps.release, self._writes(attempt.attempt), attempt.run))
        self._tell(attempt.attempt)

    async def _lost(self, attempt: AttemptRecord, error: FencedError) -> None:
        """A rule found another owner: see who it is, and stop working on the run."""
        try:
            await self._ownership.check(attempt.run)
        except CachefsError as other:
            await self._pause(attempt.attempt, other, attempt.retries)
        else:
            if not self._ownership.fenced_by(attempt.run):
                await self._pause(attempt.attempt, error, attempt.retries)

    async def _pause(self, attempt: str, error: Exception, retries: int) -> None:
        """Show why an attempt does not move on, and wait. Without one ("") the log alone tells."""
        if attempt not in self._failing:
            self._failing.add(attempt)
            _log.warning("publication waits", attempt=attempt, error=str(error), hint=getattr(error, "hint", ""))
        if attempt:
            await self._journal.write(lambda txn: _failed(txn, attempt, str(error)))
            self._tell(attempt)
        await self._confirm(error)
        await trio.sleep(wait(retries))

    async def _recovered(self, attempt: str) -> None:
        if attempt in self._failing:
            self._failing.discard(attempt)
            await self._journal.write(lambda txn: update(txn, attempt, error="", retries=0))

    def _writes(self, attempt: str) -> Writes:
        """Return a writer whose retries show in the record of an attempt."""

        async def pause(error: CachefsError, retries: int) -> None:
            await self._pause(attempt, error, retries)

        shown: Pause = pause
        return Writes(self._store, self._keys, self._hop, shown)

    def _attempts(self, wanted: Callable[[AttemptRecord], bool]) -> Sequence[AttemptRecord]:
        with self._journal.read() as txn:
            found = [attempt for attempt in txn.attempts.scan() if wanted(attempt)]
        return sorted(found, key=lambda attempt: attempt.serial)

    def _unfinished(self, run: str) -> Sequence[AttemptRecord]:
        return self._attempts(lambda attempt: attempt.run == run and not attempt.state.final)

    def _undecided(self, run: str) -> set[str]:
        """Return the generations with an attempt of other members to which a save of this one may belong. To one that
        declares others as its members none can, and this one never answers it.
        """
        with self._journal.read() as txn:
            seen = {record.attempt: record for record in txn.shared.scan() if record.run == run}
        member = self._settings.member
        unfinished = self._unfinished(run)
        foreign = [one for one in unfinished if one.foreign and (not one.members or member in one.members)]
        open_yet = [one for one in foreign if one.attempt not in seen or undecided(seen[one.attempt])]
        return {attempt.generation for attempt in open_yet}

    def _tell(self, attempt: str) -> None:
        with self._journal.read() as txn:
            record = txn.attempts.get(attempt)
        if record is not None:
            self._changed(record)


def _failed(txn: Txn, attempt: str, error: str) -> None:
    record = txn.attempts.get(attempt)
    if record is not None and not record.state.final:
        txn.update_attempt(attempt, error=error, retries=record.retries + 1)
