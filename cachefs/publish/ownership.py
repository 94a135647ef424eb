"""The epoch this process holds in each run.

A process takes a new epoch of a run at the first need (I9) and never a second one: a process that has lost a run must
not take it back, or two daemons would take it from each other for ever. So a fenced run stays fenced until a restart.
The journal's RunRecord shows it, and every part of the daemon that sends bytes of the run asks it first; staging goes
on.
"""

from __future__ import annotations

import msgspec
import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, FencedError
from cachefs.formats.pointer import Pointer
from cachefs.formats.records import RunRecord
from cachefs.journal import Journal, Txn
from cachefs.publish import rules
from cachefs.publish.promotion import Identity, take_epoch
from cachefs.publish.writes import Writes
from cachefs.restore.reader import read_pointer

_log = structlog.get_logger(__name__)


class Ownership:
    """The runs this process owns. `owner` is the member's name and an id of this process; `poll` is in seconds."""

    def __init__(
        self, journal: Journal, writes: Writes, member: str, *, poll: float, identity: Identity | None = None
    ) -> None:
        self.identity = identity or Identity(f"{member}/{clock.new_id()}")
        self._journal = journal
        self._writes = writes
        self._poll = poll
        self._epochs: dict[str, int] = {}
        self._locks: dict[str, trio.Lock] = {}
        self.problems: dict[str, str] = {}
        """By run: why its pointer could not be looked at last time."""

    @property
    def owner(self) -> str:
        """Return the owner id that pointers carry."""
        return self.identity.owner

    def epoch(self, run: str) -> int | None:
        """Return the epoch this process took in a run, also when it has lost it since; None before the first need."""
        return self._epochs.get(run)

    async def acquire(self, run: str, writes: Writes | None = None) -> int:
        """Return the epoch this process holds in the run, taking a new one at the first need.

        The grant was read back and is in the journal, which also lifts a fence that an earlier process left. `writes`
        reports retries elsewhere than the default. Raises FencedError when the run was lost, CorruptError when its
        pointer is gone or older than the journal remembers (nothing was written), and the store's errors.
        """
        async with self._locks.setdefault(run, trio.Lock()):
            if run not in self._epochs:
                with self._journal.read() as txn:
                    record = txn.runs.get(run)
                epoch = await take_epoch(writes or self._writes, run, self.identity, record)
                await self._journal.write(lambda txn: _granted(txn, run, epoch, self.owner))
                self._epochs[run] = epoch
        if reason := self.fenced_by(run):
            raise FencedError(
                f"run {run!r} was taken over by {reason}", hint="restart this daemon to take the run over again"
            )
        return self._epochs[run]

    def fenced_by(self, run: str) -> str:
        """Return who has taken the run from this process, or ""."""
        with self._journal.read() as txn:
            record = txn.runs.get(run)
        return record.fenced_by if record and run in self._epochs else ""

    async def fence(self, run: str, pointer: Pointer) -> None:
        """Record that the run was lost to the owner that `pointer` names; durable when this returns."""
        by = rules.holder(pointer)
        _log.warning("run fenced", run=run, by=by, epoch=self._epochs.get(run))
        await self._journal.write(lambda txn: _fenced(txn, run, by))

    async def check(self, run: str) -> None:
        """Look at the pointer of an owned run once; fence the run if it was lost.

        Raises CorruptError when the pointer is gone, and the store's errors.
        """
        seen = await self._writes.hop(read_pointer, self._writes.store, self._writes.keys, run)
        if seen is None:
            raise rules.hidden(run)
        epoch = self._epochs[run]
        if not rules.holds(seen.pointer, self.owner, epoch) and seen.pointer.epoch >= epoch:
            await self.fence(run, seen.pointer)

    async def watch(self) -> None:
        """Look at the pointers of all owned runs for ever, every `poll` seconds.

        An error of one look is logged and kept in `problems` until a look succeeds; promotion does not depend on it.
        """
        while True:
            await trio.sleep(clock.jitter(self._poll))
            for run in [run for run in self._epochs if not self.fenced_by(run)]:
                try:
                    await self.check(run)
                    self.problems.pop(run, None)
                except CachefsError as error:
                    self.problems[run] = str(error)
                    _log.warning("cannot check the pointer", run=run, error=str(error))


def _granted(txn: Txn, run: str, epoch: int, owner: str) -> None:
    record = txn.runs.get(run) or RunRecord(run)
    txn.runs.put(run, msgspec.structs.replace(record, epoch=epoch, owner=owner, ordinal=0, fenced_by=""))


def _fenced(txn: Txn, run: str, by: str) -> None:
    record = txn.runs.get(run) or RunRecord(run)
    txn.runs.put(run, msgspec.structs.replace(record, fenced_by=by))
