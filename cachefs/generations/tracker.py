"""The tracker watches the mount for the daemon: it tells the detector of every change, of the time, of closes by hand
and of the saves of an earlier process; effects.py carries out what follows. What is acknowledged to the training code
is journaled first: an opened save before its first file, a closed save (with every file pinned) before the operation
that closed it returns.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable

import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, NotFoundError
from cachefs.formats.keys import Keys
from cachefs.formats.names import to_bytes, to_text
from cachefs.formats.records import AttemptRecord, State
from cachefs.generations import attempts
from cachefs.generations.actions import ResumedSave
from cachefs.generations.detector import Detector
from cachefs.generations.early import EarlyUploads
from cachefs.generations.effects import Effects
from cachefs.generations.outlived import Outlived
from cachefs.generations.placement import Placer
from cachefs.generations.retrying import persist
from cachefs.generations.tracked import Hints, Tracked
from cachefs.generations.view import TreeView
from cachefs.journal import Journal
from cachefs.link import CloseSave as CloseFrom
from cachefs.staging.changes import Change, Kind
from cachefs.staging.pins import Pins
from cachefs.staging.walking import open_directory
from cachefs.waiting import each

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
        boot: str,
        early_delay: float,
        hints: Hints,
    ) -> None:
        """`boot` is the id of this boot of the machine; `early_delay` in seconds, see early.py."""
        self._journal = journal
        self._pins = pins
        self._tree_fd = tree_fd
        self._detector = detector
        self._placer = placer
        self._view = TreeView(tree_fd)
        self._boot = boot
        self.outlived = Outlived(tree_fd, self._view, self.after)
        self._changed = trio.Event()
        self._looks_at = float("inf")
        """When `run` looks again by itself."""

        def key(attempt: AttemptRecord, shard: str, path: str) -> str:
            return keys.shard(attempt.run, attempt.attempt, member, shard, path)

        self.early = EarlyUploads(journal, pins, tree_fd, delay=early_delay, key=key, pinned=hints.pinned)
        self._effects = Effects(
            journal,
            pins,
            tree_fd,
            self.early,
            boot=boot,
            key=key,
            hints=hints,
            lost=detector.forget,
            owing=self._wake,
            held=self.outlived.watch,
        )

    def _wake(self) -> None:
        self._changed.set()

    # ---- called by the mount (mount.observer.Observer)

    def before(self, change: Change) -> Awaitable[None] | None:
        """Hold back what would touch a save that is being pinned, and drop an early pin that is written again."""
        if self._effects.closing:
            for path in (change.path, change.old):
                save = self._effects.closing_around(path) if path else None
                if save is not None and save.closing is not None:
                    return self._wait_for_close(save.closing, change)
        if change.kind in _REWRITES and (shard := self.early.opening(change.path)) is not None:
            return self.early.drop(shard)
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
            self._wake()
        carried = self._effects.carry_out(actions)
        return each([noted, carried]) if noted is not None and carried is not None else noted or carried

    def _note(self, change: Change) -> Awaitable[None] | None:
        """Tell the save around a file of its change, and the early uploads of a file that is whole. To be waited for
        when the save is written again for the first time: a later process must know.
        """
        root = change.path
        while root := root.rpartition(b"/")[0]:
            save = self._effects.saves.get(root)
            if save is not None:
                before = save.rewritten
                save.note(change)
                whole = change.writers == 0 and change.kind in (Kind.CLOSED, Kind.RENAMED, Kind.LINKED)
                if whole and save.closing is None and not save.placement.temporary:
                    self.early.closed(change.path, save.attempt, root)
                return self._effects.written_again(save) if save.rewritten and not before else None
        return None

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
        await self._effects.repeat()
        waiting = self._effects.carry_out(self._detector.due(clock.monotonic(), self._view))
        if waiting is not None:
            await waiting

    async def close_now(self, path: bytes, *, wait: bool = True) -> str:
        """Close a generation by hand; return its attempt id once it is closed, or without `wait` once that is begun:
        files that are open for writing are waited for. One that is closed and has not changed since keeps its attempt,
        unless that was abandoned.

        Raises NotFoundError when nothing is there, InvalidError when the path is no generation or holds no bytes,
        CachefsError when the save ended otherwise.
        """
        self._check_there(path)
        while (closing := self._effects.closing_around(path)) is not None and closing.closing is not None:
            await closing.closing.wait()
        if attempt := self._closed_already(path):
            return attempt
        waiting = self._effects.carry_out(self._detector.close_now(path, clock.monotonic(), self._view))
        self._wake()
        save = self._effects.saves.get(path) or self._effects.closing.get(path)
        with trio.CancelScope(shield=True):  # who asked may go away; a close that was begun is finished
            if waiting is not None:
                await waiting
        if save is None:
            raise CachefsError(f"{to_text(path)} was not closed")
        if wait:
            await self._wait_closed(path, save.attempt)
        return save.attempt

    def _closed_already(self, path: bytes) -> str:
        """Return the attempt of a generation that is closed and unchanged; "" when it is to be closed."""
        if not self._detector.unchanged(path, self._view):
            return ""
        with self._journal.read() as txn:
            ours = [a for a in txn.attempts.scan() if a.path == to_text(path) and not a.foreign]
        newest = max(ours, key=lambda attempt: attempt.serial, default=None)
        alive = newest is not None and newest.closed_at is not None and newest.state is not State.ABANDONED
        return newest.attempt if newest is not None and alive else ""

    async def close_from(self, close: CloseFrom) -> None:
        """Close a save because another member saw the close signal. Nothing happens when it is closed already, or must
        be quiet first; it is asked for again.

        A save of which files were written a second time is abandoned: its bytes may be those of the next save.
        """
        path, now = to_bytes(close.path), clock.monotonic()
        save = self._effects.saves.get(path)
        if save is None or save.attempt != close.attempt or save.closing is not None:
            return
        if save.rewritten:
            self._detector.forget(path)
            reason = f"{close.by}; files of it were written again"
            await self._effects.end(path, reason)
        elif now - self._detector.changed_at(path) >= close.quiet:
            waiting = self._effects.carry_out(self._detector.close_as(path, now, self._view, close.by))
            self._wake()
            if waiting is not None:
                await waiting

    def forget_ended(self) -> None:
        """Let go of open saves whose attempt was ended by another part of the daemon: the next change opens another."""
        if not self._effects.saves:
            return
        with self._journal.read() as txn:
            records = {path: txn.attempts.get(save.attempt) for path, save in self._effects.saves.items()}
        for path, record in records.items():
            if record is not None and record.state.final:
                self.early.settled(record.attempt)
                del self._effects.saves[path]
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
                tracked = (*self._effects.saves.values(), *self._effects.closing.values())
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

    def closing(self) -> list[str]:
        """Return the paths of open saves whose close signal came, and of those that are being pinned or journaled."""
        effects = self._effects
        return [to_text(path) for path in {*self._detector.closing(), *effects.closing, *effects.late}]

    def longest_idle(self) -> float:
        """Return for how many seconds the open save has not changed that has not for the longest time; 0 for none."""
        since = self._detector.least_recent()
        return 0.0 if since is None else max(0.0, clock.monotonic() - since)

    async def resume(self) -> None:
        """Take up the saves of an earlier process: abandon what a power cut may have torn, drop pins that nobody knows,
        close what was complete.
        """
        for lost in await self._journal.write(lambda txn: attempts.abandon_unsynced(txn, self._boot)):
            _log.error("save abandoned", path=lost.path, reason=attempts.UNSYNCED)
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
                    await self._effects.end_attempt(attempt.attempt, "removed before it was complete", cancelled=True)
                continue
            if is_open or attempt.closed_at is not None:
                baselines = {to_bytes(marker): baseline for marker, baseline in attempt.baselines.items()}
                written = self.outlived.find(path, attempt) if is_open else []
                resumed.append(
                    ResumedSave(
                        path,
                        baselines,
                        closed=not is_open,
                        opened_as=to_bytes(attempt.opened_as),
                        written=written,
                        signals=attempt.signals,
                        torn=attempt.torn,
                    )
                )
        # The detector names what it takes up by path, so the attempts must be known before it speaks.
        for save in resumed:
            if not save.closed:
                attempt = latest[to_text(save.path)]
                placement = self._placer.any(save.path, is_file=attempt.kind == "file")
                tracked = self._effects.saves[save.path] = Tracked(attempt.attempt, placement, save.opened_as)
                tracked.journaled.set()
                tracked.rewritten = attempt.rewritten
                tracked.finished = {save.path + b"/" + name for name in self._view.names(save.path)}
        waiting = self._effects.carry_out(self._detector.resume(resumed, self._view, clock.monotonic()))
        if waiting is not None:
            await waiting
        self._wake()
