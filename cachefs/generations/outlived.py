"""Saves whose writers outlived the mount they wrote to: held back until the last of their files is closed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.errors import StagingError
from cachefs.formats.names import to_text
from cachefs.formats.records import AttemptRecord
from cachefs.generations.view import TreeView
from cachefs.staging.changes import Change, Kind
from cachefs.staging.survivors import Survivors

_LOOK = 0.5
"""Seconds after which a file that a process of an earlier mount still writes is looked at again."""
_log = structlog.get_logger(__name__)


class Outlived:
    """The files that processes of an earlier mount still write, and the closes that no mount sees."""

    def __init__(self, tree_fd: int, view: TreeView, after: Callable[[Change], Awaitable[None] | None]) -> None:
        """`after` is told of every close, as the mount tells it."""
        self._survivors = Survivors(tree_fd)
        self._view = view
        self._after = after

    def find(self, path: bytes, attempt: AttemptRecord) -> list[bytes]:
        """Return the files of an open save that are still written, and watch them. Before the new mount serves any."""
        names = self._view.names(path) if attempt.kind == "directory" else ()
        written = self._survivors.find([path] if attempt.kind == "file" else [path + b"/" + name for name in names])
        if written:
            _log.warning("a process of the last mount still writes", path=attempt.path, files=len(written))
        return written

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell of every close, until there is no such file any more."""
        task_status.started()
        try:
            while self._survivors:
                for path in self._survivors.ended():
                    try:
                        waiting = self._after(Change(Kind.CLOSED, path))
                        if waiting is not None:
                            await waiting
                    except StagingError as error:  # what it refused is owed
                        _log.error("the journal failed", path=to_text(path), reason=str(error))
                await trio.sleep(_LOOK)
        finally:
            self._survivors.close()
