"""The tracker watches the mount for the daemon: it feeds every change to the detector and carries out what follows, in
the journal and in the pins. What is acknowledged to the training code is journaled first: an opened save before its
first file, a closed save (with every file pinned) before the operation that closed it returns.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import msgspec
import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, NotFoundError, StagingError
from cachefs.formats.keys import Keys
from cachefs.formats.names import to_bytes, to_text
from cachefs.formats.records import AttemptRecord, ShardRecord, State
from cachefs.generations import attempts
from cachefs.generations.actions import (
    AbandonSave,
    Action,
    CancelSave,
    CloseSave,
    Incomplete,
    Loose,
    MoveSave,
    OpenSave,
    ResumedSave,
)
from cachefs.generations.closing import ClosedSet, Closer
from cachefs.generations.detector import Detector
from cachefs.generations.early import EarlyUploads
from cachefs.generations.outlived import Outlived
from cachefs.generations.placement import Placement, Placer
from cachefs.generations.retrying import persist
from cachefs.generations.signals import marker_paths
from cachefs.generations.tracked import Hints, Tracked, each
from cachefs.generations.view import TreeView
from cachefs.journal import Journal
from cachefs.link import CloseSave as CloseFrom
from cachefs.staging.changes import Change, Kind
from cachefs.staging.pins import Pins
from cachefs.staging.walking import open_directory

_log = structlog.get_logger(__name__)
_REWRITES = (Kind.OPENED, Kind.TRUNCATED)


class Tracker:
    """The saves of one mount. Only used from the event loop."""

    def __init__(
        self,
        journal: Journal,
        pins: Pins,
        tree_fd: int,
        detector: Detector,
        placer: Placer,
        keys: Keys,
        *,
        member: str,
        early_delay: float,
        hints: Hints,
    ) -> None:
        """`early_delay` in seconds, see early.py."""
        self._journal = journal
        self._pins = pins
        self._tree_fd = tree_fd
        self._detector = detector
        self._placer = placer
        self._keys = keys
        self._member = member
        self._hints = hints
        self._view = TreeView(tree_fd)
        self.outlived = Outlived(tree_fd, self._view, self.after)
        self._saves: dict[bytes, Tracked] = {}
        self._closing: dict[bytes, Tracked] = {}
        self._owed: list[Callable[[], Awaitable[None]]] = []
        """What the journal refused to take; `run` tries again."""
        self._changed = trio.Event()
        self._looks_at = float("inf")
        """When `run` looks again by itself."""
        self.early = EarlyUploads(journal, pins, tree_fd, delay=early_delay, key=self._key, pinned=hints.pinned)

    def _key(self, attempt: AttemptRecord, shard: str, path: str) -> str:
        return self._keys.shard(attempt.run, attempt.attempt, self._member, shard, path)

    # ---- called by the mount (mount.observer.Observer)

    def before(self, change: Change) -> Awaitable[None] | None:
        """Hold back what would touch a save that is being pinned, and drop an early pin that is written again."""
        if self._closing:
            for path in (change.path, change.old):
                save = self._closing_around(path) if path else None
                if save is not None and save.closing is not None:
                    return self._wait_for_close(save.closing, change)
        if change.kind in _REWRITES and (shard := self.early.opening(change.path)) is not None:
            return self.early.drop(shard)
        return None

    def is_closing(self) -> bool:
        """Return whether a save is being pinned: the detector let go of it, and the journal does not have it yet."""
        return bool(self._closing)

    def _closing_around(self, path: bytes) -> Tracked | None:
        for root, save in self._closing.items():
            if path == root or path.startswith(root + b"/") or root.startswith(path + b"/"):
                return save
        return None

    async def _wait_for_close(self, closing: trio.Event, change: Change) -> None:
        await closing.wait()
        again = self.before(change)
        if again is not None:
            await again

    def after(self, change: Change) -> Awaitable[None] | None:
        """Take a change in; the caller waits for the journal where something was opened or closed."""
        actions = self._detector.observe(change, clock.monotonic(), self._view)
        if change.kind in (Kind.REMOVED, Kind.RENAMED):
            self.early.gone(change.old or change.path)
        noted = None if change.is_dir else self._note(change)
        deadline = self._detector.next_deadline()
        if deadline is not None and deadline < self._looks_at:
            self._changed.set()
        carried = self._carry_out(actions)
        return each([noted, carried]) if noted is not None and carried is not None else noted or carried

    def _note(self, change: Change) -> Awaitable[None] | None:
        """Tell the save around a file of its change, and the early uploads of a file that is whole. To be waited for
        when the save is written again for the first time: a later process must know.
        """
        root = change.path
        while root := root.rpartition(b"/")[0]:
            save = self._saves.get(root)
            if save is not None:
                before = save.rewritten
                save.note(change)
                whole = change.writers == 0 and change.kind in (Kind.CLOSED, Kind.RENAMED, Kind.LINKED)
                if whole and save.closing is None and not save.placement.temporary:
                    self.early.closed(change.path, save.attempt, root)
                return self._write_again(save) if save.rewritten and not before else None
        return None

    async def _write_again(self, save: Tracked) -> None:
        await save.journaled.wait()
        try:
            await self._journal.write(lambda txn: attempts.written_again(txn, save.attempt))
        except StagingError:
            self._owe(lambda: self._journal.write(lambda txn: attempts.written_again(txn, save.attempt)))
            raise

    # ---- what follows from the detector's actions

    def _carry_out(self, actions: list[Action]) -> Awaitable[None] | None:
        """Start everything at once, so that nothing slips in between; return what remains to be waited for."""
        waiting: list[Awaitable[None]] = []
        for action in actions:
            match action:
                case OpenSave(placement):
                    waiting.append(self._open(placement))
                case MoveSave(old, placement):
                    waiting.append(self._move(old, placement))
                case CloseSave(path):
                    waiting.append(self._close(path, action))
                case CancelSave(path, reason) | AbandonSave(path, reason):
                    waiting.append(self._end(path, reason))
                case Incomplete(path, why):
                    _log.warning("file is incomplete and will not be published", path=to_text(path), reason=why)
                    waiting.append(self._incomplete(path, why))
                case Loose(path):
                    self._hints.loose(path)
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else each(waiting)

    def _open(self, placement: Placement) -> Awaitable[None]:
        save = Tracked(clock.new_id(), placement)
        self._saves[placement.path] = save
        return self._journal_open(save)

    async def _journal_open(self, save: Tracked) -> None:
        """Journal a new attempt. A name that a framework only writes under is journaled when it gets its real one."""
        placement = save.placement
        if placement.temporary and save.closing is None:
            return
        baselines = {to_text(path): self._view.identity(path) for path in marker_paths(placement)}
        record = AttemptRecord(
            attempt=save.attempt,
            path=to_text(placement.path),
            run=placement.run,
            generation=placement.generation,
            kind=placement.kind,
            preset=placement.candidates[0].name if placement.candidates else "",
            step=-1 if placement.step is None else placement.step,
            opened_at=clock.now(),
            serial=0,
            baselines=baselines,
        )
        try:
            await self._journal.write(lambda txn: attempts.insert(txn, record))
        except StagingError:
            self._lose(save)
            raise
        finally:
            save.journaled.set()
        if save.lost:  # an earlier write of it, under another name, failed
            await self._journal_end(save.attempt, "it could not be journaled in time")
        self._hints.opened()

    def _lose(self, save: Tracked) -> None:
        """A save could not be journaled: the next change below its path starts another one."""
        save.lost = True
        path = save.placement.path
        if self._saves.get(path) is save:
            del self._saves[path]
            self._detector.forget(path)

    def _move(self, old: bytes, placement: Placement) -> Awaitable[None]:
        save = self._saves.pop(old)
        if save.journaled.is_set():
            moved = Tracked(clock.new_id(), placement)
            self._saves[placement.path] = moved
            return each(
                [self._journal_end(save.attempt, f"renamed to {placement.generation}"), self._journal_open(moved)]
            )
        save.placement = placement
        self._saves[placement.path] = save
        return self._journal_open(save)

    def _close(self, path: bytes, action: CloseSave) -> Awaitable[None]:
        save = self._saves.pop(path)
        save.closing = trio.Event()
        self._closing[path] = save
        return self._pineach(path, save, action)

    async def _pineach(self, path: bytes, save: Tracked, action: CloseSave) -> None:
        assert save.closing is not None
        try:
            if save.placement.temporary:
                await self._journal_open(save)  # closed by hand under a name it was only to be written under
            await save.journaled.wait()
            if save.lost:
                raise StagingError(f"the save {to_text(path)} is not closed: it could not be journaled")
            while not await self._pin(path, save, action):
                pass
        finally:
            if self._closing.get(path) is save:
                del self._closing[path]
            save.closing.set()

    async def _pin(self, path: bytes, save: Tracked, action: CloseSave) -> bool:
        """Pin and record a save, or abandon it; False when an early pin was lost meanwhile: then all is done again."""
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
            closed = await trio.to_thread.run_sync(
                lambda: closer.close(path, early, temp_names=temp_names, trackers=trackers)
            )
        except OSError as error:
            # The operation that closed the save is done; the training code has no part in this failure.
            reason = f"its files could not be pinned: {error.strerror}"
            _log.error("save abandoned", path=to_text(path), reason=reason)
            await self._journal_end(save.attempt, reason)
            return True
        self.early.settled(save.attempt)
        try:
            if await self._record(attempt, action, closed):
                return True
        except StagingError:
            # The pins keep the bytes, whatever becomes of the files.
            self._owe(lambda: self._record_late(attempt, action, closed))
            raise
        for shard in closed.shards:
            if shard.shard not in closed.kept:
                await trio.to_thread.run_sync(self._pins.drop, shard.attempt, shard.shard)
        return False

    async def _journaled(self, save: Tracked) -> tuple[AttemptRecord, list[ShardRecord]]:
        """Return the records of a save and its early pins, without those whose drop is on its way to the journal."""
        early: list[ShardRecord] = []
        try:
            early = await self._journal.write(lambda txn: txn.shards_of(save.attempt))
        except StagingError as error:
            _log.error("early uploads are not used: the journal failed", attempt=save.attempt, reason=str(error))
        with self._journal.read() as txn:
            attempt = txn.attempts.get(save.attempt)
        if attempt is None:
            raise AssertionError("an attempt that is being closed is in the journal")
        return msgspec.structs.replace(attempt, rewritten=save.rewritten), early

    async def _record(self, attempt: AttemptRecord, action: CloseSave, closed: ClosedSet) -> bool:
        """Journal a close; False, and nothing done, when an early pin of it was dropped meanwhile."""
        dropped = await self._journal.write(lambda txn: attempts.closed(txn, attempt, action, closed))
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

    def _owe(self, write: Callable[[], Awaitable[None]]) -> None:
        """Have `run` repeat a write that the journal refused."""
        self._owed.append(write)
        self._changed.set()

    def _end(self, path: bytes, reason: str) -> Awaitable[None]:
        save = self._saves.pop(path)
        return self._journal_end(save.attempt, reason)

    async def _journal_end(self, attempt: str, reason: str) -> None:
        self.early.settled(attempt)
        try:
            await self._write_end(attempt, reason)
        except StagingError:
            self._owe(lambda: self._write_end(attempt, reason))
            raise

    async def _write_end(self, attempt: str, reason: str) -> None:
        await self._journal.write(lambda txn: attempts.ended(txn, attempt, reason))
        await trio.to_thread.run_sync(self._pins.drop_attempt, attempt)
        self._hints.opened()

    async def _incomplete(self, path: bytes, why: str) -> None:
        save = self._saves.get(path)
        if save is not None:
            await save.journaled.wait()
            await self._journal.write(lambda txn: attempts.noted(txn, save.attempt, why))

    # ---- the clock, by hand, and after a restart

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Close what only time closes, for ever."""
        task_status.started()
        while True:
            self._changed = trio.Event()
            await persist(self._catch_up, "closing")
            deadline = self._detector.next_deadline()
            self._looks_at = float("inf") if deadline is None else deadline
            wait = max(self._looks_at - clock.monotonic(), 0.01)
            with trio.move_on_after(wait):
                await self._changed.wait()

    async def _catch_up(self) -> None:
        owed, self._owed = self._owed, []
        while owed:
            try:
                await owed[0]()
            except StagingError:
                self._owed = owed + self._owed
                raise
            del owed[0]
        waiting = self._carry_out(self._detector.due(clock.monotonic(), self._view))
        if waiting is not None:
            await waiting

    async def close_now(self, path: bytes, *, wait: bool = True) -> str:
        """Close a generation by hand; return its attempt id once it is closed, or without `wait` once that is begun:
        files that are open for writing are waited for.

        Raises NotFoundError when nothing is there, InvalidError when the path is no generation, CachefsError when the
        save ended otherwise.
        """
        self._check_there(path)
        while (closing := self._closing_around(path)) is not None and closing.closing is not None:
            await closing.closing.wait()
        waiting = self._carry_out(self._detector.close_now(path, clock.monotonic(), self._view))
        self._changed.set()
        save = self._saves.get(path) or self._closing.get(path)
        with trio.CancelScope(shield=True):  # who asked may go away; a close that was begun is finished
            if waiting is not None:
                await waiting
        if save is None:
            raise CachefsError(f"{to_text(path)} was not closed")
        if wait:
            await self._wait_closed(path, save.attempt)
        return save.attempt

    async def close_from(self, close: CloseFrom) -> None:
        """Close a save because another member saw the close signal. Nothing happens when it is closed already, or must
        be quiet first; it is asked for again.

        A save of which files were written a second time is abandoned: its bytes may be those of the next save.
        """
        path, now = to_bytes(close.path), clock.monotonic()
        save = self._saves.get(path)
        if save is None or save.attempt != close.attempt or save.closing is not None:
            return
        if save.rewritten:
            self._detector.forget(path)
            reason = f"{close.by}; files of it were written again"
            await self._end(path, reason)
        elif now - self._detector.changed_at(path) >= close.quiet:
            waiting = self._carry_out(self._detector.close_now(path, now, self._view, close.by))
            self._changed.set()
            if waiting is not None:
                await waiting

    def forget_ended(self) -> None:
        """Let go of open saves whose attempt was ended by another part of the daemon: the next change opens another."""
        if not self._saves:
            return
        with self._journal.read() as txn:
            records = {path: txn.attempts.get(save.attempt) for path, save in self._saves.items()}
        for path, record in records.items():
            if record is not None and record.state.final:
                self.early.settled(record.attempt)
                del self._saves[path]
                self._detector.forget(path)

    def _check_there(self, path: bytes) -> None:
        above, _, name = path.rpartition(b"/")
        try:
            fd = open_directory(self._tree_fd, above)
            try:
                os.stat(name or b".", dir_fd=fd, follow_symlinks=False)
            finally:
                os.close(fd)
        except OSError as error:
            raise NotFoundError(f"{to_text(path)} does not exist in the mount") from error

    async def _wait_closed(self, path: bytes, attempt: str) -> None:
        while True:
            with self._journal.read() as txn:
                record = txn.attempts.get(attempt)
            if record is None:
                tracked = (*self._saves.values(), *self._closing.values())
                if all(save.attempt != attempt for save in tracked):
                    raise CachefsError(f"the save of {to_text(path)} ended before it was closed")
            elif record.closed_at is not None:
                return
            elif record.state.final:
                raise CachefsError(f"the save of {to_text(path)} was abandoned: {record.error}")
            await self._journal.wait_changed()

    def open_saves(self) -> dict[str, str]:
        """Return the open saves by path, and what each waits for."""
        return {to_text(path): waits for path, waits in self._detector.open_saves().items()}

    async def resume(self) -> None:
        """Take up the saves of an earlier process: drop pins nobody knows, close what was complete."""
        await self._journal.write(lambda txn: attempts.sweep(txn, self._pins))
        with self._journal.read() as txn:
            known = sorted((a for a in txn.attempts.scan() if not a.foreign), key=lambda record: record.serial)
            early = [shard for shard in txn.shards.scan() if shard.early]
        self.early.resume(early)
        latest = {attempt.path: attempt for attempt in known}
        resumed: list[ResumedSave] = []
        for attempt in latest.values():
            path = to_bytes(attempt.path)
            is_open = attempt.state is State.OPEN and attempt.closed_at is None
            if self._view.identity(path) is None:
                if is_open:
                    await self._journal_end(attempt.attempt, "removed before it was complete")
                continue
            if is_open or attempt.closed_at is not None:
                baselines = {to_bytes(marker): baseline for marker, baseline in attempt.baselines.items()}
                written = self.outlived.find(path, attempt) if is_open else []
                resumed.append(ResumedSave(path, baselines, closed=not is_open, written=written))
        # The detector names what it takes up by path, so the attempts must be known before it speaks.
        for save in resumed:
            if not save.closed:
                attempt = latest[to_text(save.path)]
                placement = self._placer.any(save.path, is_file=attempt.kind == "file")
                tracked = self._saves[save.path] = Tracked(attempt.attempt, placement)
                tracked.journaled.set()
                tracked.rewritten = attempt.rewritten
                tracked.finished = {save.path + b"/" + name for name in self._view.names(save.path)}
        waiting = self._carry_out(self._detector.resume(resumed, self._view, clock.monotonic()))
        if waiting is not None:
            await waiting
        self._changed.set()
