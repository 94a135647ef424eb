"""Early uploads: a file of an open save that was closed and left alone is pinned, so that its upload starts before the
save closes; not one that is torn. Opening it for writing again drops the pin and what was sent: nothing was promised
yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import structlog
import trio

from cachefs import clock
from cachefs.errors import CorruptError, StagingError, UnreadableError
from cachefs.formats.names import to_text
from cachefs.formats.records import AttemptRecord, ShardRecord, State
from cachefs.generations import retrying
from cachefs.generations.closing import pin_file
from cachefs.generations.completeness import check_file
from cachefs.generations.view import TreeView
from cachefs.journal import Journal, Txn
from cachefs.staging.pins import Pins
from cachefs.staging.walking import open_directory

_log = structlog.get_logger(__name__)


class EarlyUploads:
    """The early pins of all open saves. Only used from the event loop."""

    def __init__(
        self,
        journal: Journal,
        pins: Pins,
        tree_fd: int,
        *,
        delay: float,
        key: Callable[[AttemptRecord, str, str], str],
        pinned: Callable[[], None],
    ) -> None:
        """`delay` is how long, in seconds, a closed file must be left alone; `key(attempt, shard, path)` builds its
        object key; `pinned` is called when there is something to send.
        """
        self._journal = journal
        self._pins = pins
        self._tree_fd = tree_fd
        self._view = TreeView(tree_fd)
        self._delay = delay
        self._key = key
        self._pinned = pinned
        self._due: dict[bytes, tuple[float, str, bytes]] = {}
        self._by_ino: dict[int, ShardRecord] = {}
        self._changed = trio.Event()

    def resume(self, shards: Iterable[ShardRecord]) -> None:
        """Take over the early pins that the journal knows from before a restart."""
        self._by_ino = {shard.identity.ino: shard for shard in shards}

    def closed(self, path: bytes, attempt: str, root: bytes) -> None:
        """Note that the last writer of a file of an open save is gone. `root` is the generation's path."""
        self._due[path] = (clock.monotonic() + self._delay, attempt, root)
        self._changed.set()

    def gone(self, path: bytes) -> None:
        """Forget what was to be pinned at or below a path that was removed or renamed."""
        if self._due:
            below = path + b"/"
            self._due = {one: due for one, due in self._due.items() if one != path and not one.startswith(below)}

    def opening(self, path: bytes) -> ShardRecord | None:
        """Return the early pin that must be dropped before the file at `path` is written, or None; the fast path."""
        self._due.pop(path, None)
        if not self._by_ino:
            return None
        try:
            stat = os.stat(path, dir_fd=self._tree_fd, follow_symlinks=False)
        except OSError:
            return None
        return self._by_ino.get(stat.st_ino)

    async def drop(self, shard: ShardRecord) -> None:
        """Drop an early pin, in the journal first: the flusher then throws away what it has sent."""
        self._by_ino.pop(shard.identity.ino, None)
        try:
            dropped = await self._journal.write(lambda txn: _dropped(txn, shard))
        except StagingError:
            self._by_ino.setdefault(shard.identity.ino, shard)  # and the file is not opened
            raise
        if dropped:
            self._pins.drop(shard.attempt, shard.shard)

    def settled(self, attempt: str) -> None:
        """The attempt closed or ended: its pins are early no longer."""
        self._due = {path: due for path, due in self._due.items() if due[1] != attempt}
        self._by_ino = {ino: shard for ino, shard in self._by_ino.items() if shard.attempt != attempt}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pin what is due, for ever."""
        task_status.started()
        while True:
            self._changed = trio.Event()
            now = clock.monotonic()
            for path, (due, attempt, root) in list(self._due.items()):
                if due <= now and self._due.pop(path, None) is not None:
                    try:
                        await self._pin(path, attempt, root)
                    except StagingError as error:
                        _log.error("early upload: the journal failed", path=to_text(path), reason=str(error))
                    except (UnreadableError, OSError) as error:
                        _log.error("early upload failed", path=to_text(path), reason=str(error))
                        self._due.setdefault(path, (clock.monotonic() + retrying.LAST, attempt, root))
            wait = min((due for due, _, _ in self._due.values()), default=float("inf")) - clock.monotonic()
            with trio.move_on_after(max(wait, 0)):
                await self._changed.wait()

    async def _pin(self, path: bytes, attempt: str, root: bytes) -> None:
        with self._journal.read() as txn:
            record = txn.attempts.get(attempt)
        if record is None or record.closed_at is not None or record.state is not State.OPEN or self._is_torn(path):
            return
        above, _, name = path.rpartition(b"/")
        try:
            fd = open_directory(self._tree_fd, above)
        except OSError:
            return  # renamed, removed or replaced by a link meanwhile
        try:
            shard = pin_file(
                self._pins,
                record,
                fd,
                name,
                to_text(path[len(root) + 1 :]),
                new_id=clock.new_id,
                key=lambda shard, inside: self._key(record, shard, inside),
                early=True,
            )
        except OSError:
            return  # gone, written, or no room for the link: the close of the save pins what is there then
        finally:
            os.close(fd)
        self._by_ino[shard.identity.ino] = shard
        try:
            recorded = await self._journal.write(lambda txn: _record(txn, shard))
        except StagingError:
            self._pins.drop(shard.attempt, shard.shard)
            if self._by_ino.pop(shard.identity.ino, None) is shard:  # else it is being opened for writing
                self._due.setdefault(path, (clock.monotonic() + retrying.LAST, attempt, root))
            raise
        if recorded:
            self._pinned()
        else:
            self._by_ino.pop(shard.identity.ino, None)
            self._pins.drop(shard.attempt, shard.shard)

    def _is_torn(self, path: bytes) -> bool:
        """Return whether a file is empty or, by its format, cut short: its writer met a full disk, or is not done.

        Damaged ones count as torn: the close of the save finds that out, and says so. Raises UnreadableError.
        """
        source = self._view.source(path)
        if source is None or source.size == 0:
            return True
        try:
            check_file(to_text(path.rpartition(b"/")[2]), source)
        except CorruptError:
            return True
        return False


def _record(txn: Txn, shard: ShardRecord) -> bool:
    """Record an early pin, unless its save closed or ended while it was made."""
    attempt = txn.attempts.get(shard.attempt)
    if attempt is None or attempt.closed_at is not None or attempt.state is not State.OPEN:
        return False
    txn.put_shard(shard)
    return True


def _dropped(txn: Txn, shard: ShardRecord) -> bool:
    """Delete the record of an early pin; False when a closed save has it by now."""
    current = txn.shard(shard.attempt, shard.shard)
    if current is not None and not current.early:
        return False
    txn.drop_shard(shard)
    return True
