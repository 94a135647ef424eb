"""What the detector's actions do to the journal and the pins. A save that cannot be journaled when it opens is let go
of, unless it is closed by then; what the journal refuses later (a close, an end, a second writing) is owed: written as
soon as the journal takes it.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress

import msgspec
import structlog
import trio

from cachefs import clock
from cachefs.errors import DAMAGE, StagingError
from cachefs.formats.names import to_text
from cachefs.formats.records import AttemptRecord, ShardRecord
from cachefs.generations import attempts
from cachefs.generations.actions import (
    AbandonSave,
    Action,
    CancelSave,
    CloseSave,
    Held,
    Incomplete,
    Loose,
    MoveSave,
    OpenSave,
    Proved,
)
from cachefs.generations.closing import ClosedSet, Closer
from cachefs.generations.early import EarlyUploads
from cachefs.generations.placement import Placement
from cachefs.generations.signals import by_name, marker_paths
from cachefs.generations.tracked import Hints, Tracked
from cachefs.generations.view import TreeView
from cachefs.journal import Journal, Txn
from cachefs.staging.pins import Pins
from cachefs.threads import in_thread
from cachefs.waiting import each

PATIENCE = 60.0
"""Seconds for which the operation that closed a save waits, with all others on its files, until they can be pinned."""
AGAIN = 1.0
"""Seconds between two tries to pin them."""
_FOR_GOOD = frozenset({*DAMAGE, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Why a file can never be pinned: its bytes are lost, or it is gone."""
_log = structlog.get_logger(__name__)


class Effects:
    """Carries out the detector's actions, and holds the saves they are about. Only used from the event loop."""

    def __init__(
        self,
        journal: Journal,
        pins: Pins,
        tree_fd: int,
        early: EarlyUploads,
        *,
        boot: str,
        key: Callable[[AttemptRecord, str, str], str],
        hints: Hints,
        lost: Callable[[bytes], None],
        owing: Callable[[], None],
        held: Callable[[Sequence[bytes]], None],
    ) -> None:
        """`boot` is that of the machine. `key(attempt, shard, path)` builds an object key. `lost` is told the path of
        an open save that could not be journaled; `owing` is called when there is something to `repeat`, `held` with
        files that are written past the mount.
        """
        self._journal = journal
        self._pins = pins
        self._tree_fd = tree_fd
        self._view = TreeView(tree_fd)
        self._early = early
        self._boot = boot
        self._key = key
        self._hints = hints
        self._lost = lost
        self._owing = owing
        self._held = held
        self.saves: dict[bytes, Tracked] = {}
        """The open saves by path."""
        self.closing: dict[bytes, Tracked] = {}
        """Those being pinned: the detector let go of them, and the journal does not have their close yet."""
        self.late: set[bytes] = set()
        """Those whose close the journal has refused, and is told again."""
        self._owed: list[Callable[[], Awaitable[None]]] = []

    def closing_around(self, path: bytes) -> Tracked | None:
        """Return the save being pinned that a path lies in, or that lies below it; None if there is none."""
        for root, save in self.closing.items():
            if path == root or path.startswith(root + b"/") or root.startswith(path + b"/"):
                return save
        return None

    def carry_out(self, actions: list[Action]) -> Awaitable[None] | None:
        """Start everything at once, so that nothing slips in between; return what remains to be waited for.

        Waiting raises StagingError when the journal refuses.
        """
        waiting: list[Awaitable[None]] = []
        for action in actions:
            match action:
                case OpenSave(placement, whole):
                    waiting.append(self._open(placement, whole))
                case MoveSave(old, placement, whole):
                    waiting.append(self._move(old, placement, whole))
                case Proved(path, signals, torn):
                    waiting.append(self._proved(self.saves[path], signals, torn))
                case CloseSave(path):
                    waiting.append(self._close(path, action))
                case Held(paths):
                    self._held(paths)
                case CancelSave(path, reason):
                    waiting.append(self.end(path, reason, cancelled=True))
                case AbandonSave(path, reason):
                    waiting.append(self.end(path, reason))
                case Incomplete(path, why):
                    _log.warning("file is incomplete and will not be published", path=to_text(path), reason=why)
                    waiting.append(self._incomplete(path, why))
                case Loose(path):
                    self._hints.loose(path)
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else each(waiting)

    def _open(self, placement: Placement, whole: Set[bytes]) -> Awaitable[None]:
        save = Tracked(clock.new_id(), placement)
        self.saves[placement.path] = save
        return self._journal_open(save, whole)

    async def _journal_open(self, save: Tracked, whole: Set[bytes] = frozenset()) -> None:
        """Journal a new attempt. A name that a framework only writes under is journaled when it gets its real one."""
        placement = save.placement
        if placement.temporary and save.closing is None:
            return
        baselines = {to_text(path): self._view.identity(path) for path in marker_paths(placement, whole)}
        record = AttemptRecord(
            attempt=save.attempt,
            path=to_text(placement.path),
            run=placement.run,
            generation=placement.generation,
            kind=placement.kind,
            preset=by_name(placement),
            step=-1 if placement.step is None else placement.step,
            opened_at=clock.now(),
            serial=0,
            baselines=baselines,
            rewritten=save.rewritten,
            boot=self._boot,
            opened_as=to_text(save.opened_as),
        )
        try:
            await self._journal.write(lambda txn: attempts.insert(txn, record))
        except StagingError:
            if save.closing is None:
                self._lose(save)
            else:  # renamed into place: done, and complete; its close brings the record along
                save.unwritten = record
            raise
        finally:
            save.journaled.set()
        if save.lost:  # an earlier write of it, under another name, failed
            await self.end_attempt(save.attempt, "it could not be journaled in time")
        self._hints.opened()

    def _lose(self, save: Tracked) -> None:
        """A save could not be journaled: the next change below its path starts another one."""
        save.lost = True
        path = save.placement.path
        if self.saves.get(path) is save:
            del self.saves[path]
            self._lost(path)

    def _move(self, old: bytes, placement: Placement, whole: Set[bytes]) -> Awaitable[None]:
        save = self.saves.pop(old)
        opened_as = old if save.placement.temporary else save.opened_as
        if save.journaled.is_set():
            moved = self.saves[placement.path] = save.renamed(clock.new_id(), placement, opened_as)
            end = self.end_attempt(save.attempt, f"renamed to {to_text(placement.path)}", cancelled=True)
            return each([end, self._journal_open(moved, whole)])
        save.move(placement)
        save.opened_as = opened_as
        self.saves[placement.path] = save
        return self._journal_open(save, whole)

    async def _proved(self, save: Tracked, signals: Mapping[str, str], torn: bool) -> None:
        """Record signals. A tracker is written all the same when the journal fails: the record is then owed."""
        await save.journaled.wait()
        try:
            await self._journal.write(lambda txn: attempts.proved(txn, save.attempt, signals, torn))
        except StagingError:
            self._owe(lambda: self._journal.write(lambda txn: attempts.proved(txn, save.attempt, signals, torn)))

    async def _incomplete(self, path: bytes, why: str) -> None:
        save = self.saves.get(path)
        if save is not None:
            await save.journaled.wait()
            await self._journal.write(lambda txn: attempts.noted(txn, save.attempt, why))

    async def written_again(self, save: Tracked) -> None:
        """Record that an open save was written again. Raises StagingError; the record is then owed."""
        if save.placement.temporary and not save.journaled.is_set():
            return  # its record begins when it gets its name, and who would give it one may be the writer that waits
        await save.journaled.wait()
        try:
            await self._journal.write(lambda txn: attempts.written_again(txn, save.attempt))
        except StagingError:
            self._owe(lambda: self._journal.write(lambda txn: attempts.written_again(txn, save.attempt)))
            raise

    def _close(self, path: bytes, action: CloseSave) -> Awaitable[None]:
        save = self.saves.pop(path)
        save.closing = trio.Event()
        self.closing[path] = save
        return self._finish_close(path, save, action)

    async def _finish_close(self, path: bytes, save: Tracked, action: CloseSave) -> None:
        assert save.closing is not None
        try:
            if save.placement.temporary:
                await self._journal_open(save)  # closed by hand under a name it was only to be written under
            await save.journaled.wait()
            if save.lost:
                raise StagingError(f"the save {to_text(path)} is not closed: it could not be journaled")
            give_up = clock.monotonic() + PATIENCE
            while not await self._pin(path, save, action, give_up):
                pass
        finally:
            if self.closing.get(path) is save:
                del self.closing[path]
            save.closing.set()

    async def _pin(self, path: bytes, save: Tracked, action: CloseSave, give_up: float) -> bool:
        """Pin and record a save, or abandon it; False when all is to be done again: an early pin was lost meanwhile, or
        there was no room or no descriptor for a pin, and it is not time to `give_up` (monotonic).
        """
        attempt, early = await self._journaled(save)
        preset = next((one for one in save.placement.candidates if one.name == action.preset), None)
        closer = Closer(
            self._tree_fd,
            self._pins,
            attempt,
            new_id=clock.new_id,
            key=lambda shard, inside: self._key(attempt, shard, inside),
        )
        temp_names = preset.temp_names if preset else ()
        trackers = preset.trackers if preset else ()
        try:
            closed = await in_thread(lambda: closer.close(path, early, temp_names=temp_names, trackers=trackers))
        except OSError as error:
            # The operation that closed the save is done; the training code has no part in this failure.
            reason = f"its files could not be pinned: {error.strerror}"
            if error.errno not in _FOR_GOOD and clock.monotonic() < give_up:
                if attempt.error != reason:
                    _log.warning("closing waits", path=to_text(path), reason=reason)
                    with suppress(StagingError):  # on a full disk; the log has it
                        await self._journal.write(lambda txn: attempts.noted(txn, save.attempt, reason))
                await trio.sleep(AGAIN)
                return False
            _log.error("save abandoned", path=to_text(path), reason=reason)
            await self.end_attempt(save.attempt, reason)
            return True
        self._early.settled(save.attempt)
        try:
            if await self._record(attempt, action, closed):
                return True
        except StagingError:
            # The pins keep the bytes, whatever becomes of the files.
            self.late.add(path)
            self._owe(lambda: self._record_late(attempt, action, closed))
            raise
        for shard in closed.shards:
            if shard.shard not in closed.kept:
                with suppress(OSError):  # then they go with the attempt
                    await in_thread(self._pins.drop, shard.attempt, shard.shard)
        return False

    async def _journaled(self, save: Tracked) -> tuple[AttemptRecord, list[ShardRecord]]:
        """Return the records of a save and its early pins, without those whose drop is on its way to the journal."""
        early: list[ShardRecord] = []
        try:
            early = await self._journal.write(lambda txn: txn.shards_of(save.attempt))
        except StagingError as error:
            _log.error("early uploads are not used: the journal failed", attempt=save.attempt, reason=str(error))
        with self._journal.read() as txn:
            attempt = txn.attempts.get(save.attempt) or save.unwritten
        if attempt is None:
            raise AssertionError("an attempt that is being closed is in the journal")
        return msgspec.structs.replace(attempt, rewritten=save.rewritten), early

    async def _record(self, attempt: AttemptRecord, action: CloseSave, closed: ClosedSet) -> bool:
        """Journal a close, and the opening if that was refused; False, and nothing done, when an early pin of it was
        dropped meanwhile.
        """

        def write(txn: Txn) -> list[ShardRecord] | None:
            if txn.attempts.get(attempt.attempt) is None:
                attempts.insert(txn, attempt)
            return attempts.closed(txn, attempt, action, closed)

        dropped = await self._journal.write(write)
        if dropped is None:
            return False
        for shard in dropped:
            self._pins.drop(shard.attempt, shard.shard)
        _log.info("save closed", path=attempt.path, signal=action.signal, files=len(closed.shards))
        self._hints.closed()
        return True

    async def _record_late(self, attempt: AttemptRecord, action: CloseSave, closed: ClosedSet) -> None:
        if not await self._record(attempt, action, closed):
            await self._write_end(attempt.attempt, "a file of it was written again before its close was journaled")
        self.late.discard(action.path)

    def end(self, path: bytes, reason: str, *, cancelled: bool = False) -> Awaitable[None]:
        """Abandon an open save; `cancelled` says that the training has dropped it. Waiting raises StagingError; the end
        is then owed.
        """
        save = self.saves.pop(path)
        return self.end_attempt(save.attempt, reason, cancelled=cancelled)

    async def end_attempt(self, attempt: str, reason: str, *, cancelled: bool = False) -> None:
        """Abandon an attempt that is not closed, and drop its pins. Raises StagingError; the end is then owed."""
        self._early.settled(attempt)
        try:
            await self._write_end(attempt, reason, cancelled=cancelled)
        except StagingError:
            self._owe(lambda: self._write_end(attempt, reason, cancelled=cancelled))
            raise

    async def _write_end(self, attempt: str, reason: str, *, cancelled: bool = False) -> None:
        await self._journal.write(lambda txn: attempts.ended(txn, attempt, reason, cancelled=cancelled))
        try:
            await in_thread(self._pins.drop_attempt, attempt)
        except OSError as error:  # whoever removed or renamed the save has no part in it
            _log.error("the pins of an ended save are dropped later", attempt=attempt, reason=str(error))
            self._hints.over()
        self._hints.opened()

    def _owe(self, write: Callable[[], Awaitable[None]]) -> None:
        self._owed.append(write)
        self._owing()

    async def repeat(self) -> None:
        """Write what is owed, in the order in which it was refused. Raises StagingError; the rest stays owed."""
        owed, self._owed = self._owed, []
        while owed:
            try:
                await owed[0]()
            except StagingError:
                self._owed = owed + self._owed
                raise
            del owed[0]
