"""The epoch this process holds in each run.

A process takes a new epoch of a run at the first need (I9) and never a second one. A daemon that has lost a run must
not take it back, or two daemons would take it from each other for ever: a fenced run stays fenced until the daemon is
restarted. The process that publishes may die and be started again within the life of the daemon, its incarnation. So
the journal's RunRecord keeps which incarnation was granted the run, or lost it, and a new process goes by that. Every
part of the daemon that sends bytes of the run asks the record for a fence first; staging goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs import clock
from cachefs.errors import FencedError
from cachefs.formats.pointer import Pointer
from cachefs.journal import Journal, Txn
from cachefs.publish import rules
from cachefs.publish.problems import Problems
from cachefs.publish.promotion import Identity, take_epoch
from cachefs.publish.writes import Swap, Writes
from cachefs.restore.reader import Seen, read_pointer

_log = structlog.get_logger(__name__)


class _Lost(Exception):
    """The run went to another owner while no process of this daemon looked."""

    def __init__(self, pointer: Pointer) -> None:
        super().__init__(rules.holder(pointer))
        self.pointer = pointer


class _Guarded(Writes):
    """Raises _Lost from every look at the pointer of a run that `lost` says is lost; tells `asked` the epoch of a grant
    before it is sent.

    The look that a grant is computed from is one of them, so the run cannot be lost between the check and the grant.
    """

    def __init__(self, writes: Writes, lost: Callable[[Seen], Awaitable[bool]], asked: Callable[[int], None]) -> None:
        super().__init__(writes.store, writes.keys, writes.hop, writes.pause)
        self._lost = lost
        self._asked = asked

    async def pointer(self, run: str) -> Seen | None:
        seen = await super().pointer(run)
        if seen is not None and await self._lost(seen):
            raise _Lost(seen.pointer)
        return seen

    async def swap(self, run: str, ours: Pointer) -> Swap:
        self._asked(ours.epoch)
        return await super().swap(run, ours)


class Ownership:
    """The runs this process owns. `poll` is in seconds; `incarnation` is the id of the daemon, the same in every
    process that it starts to publish (default: a new one). `owner` is `<member>/<incarnation>/<process id>`. What keeps
    the pointers from being watched is shown in `problems`, which nothing else may write.
    """

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        member: str,
        *,
        poll: float,
        incarnation: str = "",
        problems: Problems | None = None,
    ) -> None:
        self.incarnation = incarnation or clock.new_id()
        self._ours = f"{member}/{self.incarnation}/"
        self.identity = Identity(self._ours + clock.new_id())
        self._journal = journal
        self._writes = writes
        self._poll = poll
        self._epochs: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        """By run: the epoch of the first grant that this process has sent, while it holds none: one whose outcome was
        left open may have landed.
        """
        self._locks: dict[str, trio.Lock] = {}
        self._problems = problems or Problems()

    @property
    def owner(self) -> str:
        """Return the owner id that pointers carry."""
        return self.identity.owner

    def epoch(self, run: str) -> int | None:
        """Return the epoch this process took in a run, also when it has lost it since; None before the first need."""
        return self._epochs.get(run)

    def owned(self) -> list[str]:
        """Return the runs of which this process holds the epoch, as far as it knows."""
        return [run for run in self._epochs if not self.fenced_by(run)]

    async def acquire(self, run: str, writes: Writes | None = None) -> int:
        """Return the epoch this process holds in the run, taking a new one at the first need.

        The grant was read back and is in the journal, which also lifts a fence that an earlier daemon left. `writes`
        reports retries elsewhere than the default. Raises FencedError when this daemon has lost the run, in this
        process or in an earlier one, CorruptError when its pointer is gone or older than the journal remembers
        (nothing was written), and the store's errors.
        """
        async with self._locks.setdefault(run, trio.Lock()):
            if run not in self._epochs and not self.fenced_by(run):
                await self._take(run, writes or self._writes)
        if reason := self.fenced_by(run):
            raise FencedError(
                f"run {run!r} was taken over by {reason}", hint="restart this daemon to take the run over again"
            )
        return self._epochs[run]

    async def _take(self, run: str, writes: Writes) -> None:
        """Take the next epoch of the run, or fence it when another owner has followed an earlier process of ours."""
        with self._journal.read() as txn:
            record = txn.runs.get(run)
        held = record.epoch if record and record.incarnation == self.incarnation else 0
        open_since = self._asked.get(run)

        async def lost(seen: Seen) -> bool:
            if 0 < held < seen.pointer.epoch and not seen.pointer.owner.startswith(self._ours):
                return True
            return open_since is not None and await self._was_ours(writes, run, seen, open_since)

        def asked(epoch: int) -> None:
            self._asked.setdefault(run, epoch)

        try:
            epoch = await take_epoch(_Guarded(writes, lost, asked), run, self.identity, record)
        except _Lost as error:
            await self.fence(run, error.pointer)
        else:
            await self._journal.write(lambda txn: _granted(txn, run, epoch, self.owner, self.incarnation))
            self._epochs[run] = epoch
            self._asked.pop(run, None)

    async def _was_ours(self, writes: Writes, run: str, seen: Seen, since: int) -> bool:
        """Return whether another owner has followed a grant of this process, of the epoch `since` or a later one."""
        at: Seen | None = seen
        while at is not None and at.pointer.epoch >= since:
            if at.pointer.owner == self.owner:
                return at is not seen
            at = await writes.before(run, at)
        return False

    def fenced_by(self, run: str) -> str:
        """Return who has taken the run from this daemon, or ""."""
        with self._journal.read() as txn:
            record = txn.runs.get(run)
        return record.fenced_by if record and record.incarnation == self.incarnation else ""

    async def fence(self, run: str, pointer: Pointer) -> None:
        """Record that the run was lost to the owner that `pointer` names; durable when this returns."""
        by = rules.holder(pointer)
        _log.warning("run fenced", run=run, by=by, epoch=self._epochs.get(run))
        await self._journal.write(lambda txn: _fenced(txn, run, by, self.incarnation))

    async def check(self, run: str) -> None:
        """Look at the pointer of a run once; fence the run if this process held it and has lost it.

        Raises CorruptError when the pointer is gone, and the store's errors.
        """
        epoch = self._epochs.get(run)
        if epoch is None:
            return
        seen = await self._writes.hop(read_pointer, self._writes.store, self._writes.keys, run)
        if seen is None:
            raise rules.hidden(run)
        if not rules.holds(seen.pointer, self.owner, epoch) and seen.pointer.epoch >= epoch:
            await self.fence(run, seen.pointer)

    async def watch(self) -> None:
        """Look at the pointers of all owned runs for ever, every `poll` seconds.

        An error of one look is a problem of the run until a look succeeds; promotion does not depend on it.
        """
        while True:
            await trio.sleep(clock.jitter(self._poll))
            for run in self.owned():
                with self._problems.look(run):
                    await self.check(run)


def _granted(txn: Txn, run: str, epoch: int, owner: str, incarnation: str) -> None:
    txn.update_run(run, epoch=epoch, owner=owner, incarnation=incarnation, ordinal=0, fenced_by="")


def lift_fences(txn: Txn) -> None:
    """Forget who has taken runs from this daemon: it was started as a member that owns none, so it has none to lose.

    A fence would keep it from sending what the new owner waits for.
    """
    for record in list(txn.runs.scan()):
        if record.fenced_by:
            txn.update_run(record.run, fenced_by="")


def _fenced(txn: Txn, run: str, by: str, incarnation: str) -> None:
    txn.update_run(run, fenced_by=by, incarnation=incarnation)
