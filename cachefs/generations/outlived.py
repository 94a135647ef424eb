"""Saves that are written past the mount, by writers of an earlier mount or through maps: held back until the last of
their files is closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import structlog
import trio

from cachefs.errors import StagingError
from cachefs.formats.names import to_text
from cachefs.formats.records import AttemptRecord
from cachefs.generations.view import TreeView
from cachefs.staging.changes import Change, Kind
from cachefs.staging.survivors import Survivors

_LOOK = 0.5
"""Seconds after which a file that is written past the mount is looked at again."""
_log = structlog.get_logger(__name__)


class Outlived:
    """The files that are written past the mount, and the closes that no mount sees."""

    def __init__(self, tree_fd: int, view: TreeView, after: Callable[[Change], Awaitable[None] | None]) -> None:
        """`after` is told of every close, as the mount tells it."""
        self._survivors = Survivors(tree_fd)
        self._view = view
        self._after = after
        self._asked: list[bytes] = []
        """Files that are not watched yet."""
        self._changed = trio.Event()

    def find(self, path: bytes, attempt: AttemptRecord) -> list[bytes]:
        """Return the files of an open save that are still written, and watch them. Before the new mount serves any."""
        names = self._view.names(path) if attempt.kind == "directory" else ()
        written = self._survivors.find([path] if attempt.kind == "file" else [path + b"/" + name for name in names])
        if written:
            _log.warning("a process of the last mount still writes", path=attempt.path, files=len(written))
        return written

    def watch(self, paths: Iterable[bytes]) -> None:
        """Watch files that were found to be written."""
        self._asked.extend(paths)
        self._watch_asked()
        self._changed.set()

    def _watch_asked(self) -> None:
        asked, self._asked = self._asked, []
        for path in asked:
            try:
                self._survivors.watch(path)
            except OSError:
                self._asked.append(path)  # no descriptor is left, perhaps: the save waits, and it is tried again

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell of every close, for ever."""
        task_status.started()
        try:
            while True:
                self._changed = trio.Event()
                self._watch_asked()
                for path in self._survivors.ended():
                    await self._tell(path)
                with trio.move_on_after(_LOOK if self._survivors or self._asked else float("inf")):
                    await self._changed.wait()
        finally:
            self._survivors.close()

    async def _tell(self, path: bytes) -> None:
        try:
            waiting = self._after(Change(Kind.CLOSED, path))
            if waiting is not None:
                await waiting
        except StagingError as error:  # what it refused is owed
            _log.error("the journal failed", path=to_text(path), reason=str(error))
