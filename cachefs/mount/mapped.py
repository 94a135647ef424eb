"""Files that are written past their handles: by shared maps, and by who opened them in an earlier mount.

With the kernel data path a map holds the staging file and not the FUSE file (Linux, fs/fuse/passthrough.c,
`fuse_passthrough_mmap`), so RELEASE comes with close(2) although the map lives on. The file counts as open for writing
until the kernel says that nobody writes it any more (staging/writers.py): a handle that nobody opened stands for its
writers meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.errors import CachefsError
from cachefs.mount.handles import Handles
from cachefs.mount.inodes import InodeTable, Node
from cachefs.staging.writers import is_written, open_to_ask

_SOON, _LATE = 0.001, 0.5
"""Seconds after which a file is looked at again: soon at first, since RELEASE is sent a moment before the kernel closes
the staging file; then half as often each time.
"""
_log = structlog.get_logger(__name__)


class Mapped:
    """The files that are still written although no writable handle is open. Only used from the FUSE loop."""

    def __init__(self, table: InodeTable, handles: Handles) -> None:
        self._table = table
        self._handles = handles
        self._held: dict[int, Node] = {}
        self._pause = _SOON
        self._changed = trio.Event()
        self._unknown = False
        self.release: Callable[[int], Awaitable[None]]
        """Closes a handle and tells of it (content.py)."""
        self.ended: Callable[[Node], None] = lambda node: None
        """Called when a file is not written any more: the kernel may hold attributes of a moment before."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, node: Node, *, served: bool = True) -> bool:
        """Return whether a file without writable handles is written all the same; it is held open then, until it is
        not. `served` by the kernel before: that nobody can tell is worth a word.
        """
        if not node.names:
            return False
        try:
            fd = open_to_ask(node.names[-1][1], self._table.descriptor(self._table.node(node.names[-1][0])))
        except OSError:
            return False  # gone, or no descriptor is left: whoever pins the file asks again
        written = is_written(fd)
        if written is None and served and not self._unknown:
            self._unknown = True
            _log.warning("maps cannot be seen here: a file counts as closed when its descriptors are")
        if not written:
            os.close(fd)
            return False
        self._handles.hold(fd, node)
        self._held[fd] = node
        node.past = True
        self._pause = _SOON
        self._changed.set()
        return True

    async def look(self, only: Node | None = None) -> None:
        """Let go of the files that are not written any more, or of one of them alone."""
        for fd, held in list(self._held.items()):
            if only not in (None, held):
                continue
            if fd in self._held and not is_written(fd):
                node = self._held.pop(fd)  # the descriptor may have become another file's meanwhile
                node.past = False
                self.ended(node)
                try:
                    await self.release(fd)
                except (OSError, CachefsError):
                    pass  # the journal's, which owes it from now on; of a release nobody is told

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            self._changed = trio.Event()
            await self.look()
            pause, self._pause = self._pause, min(2 * self._pause, _LATE)
            with trio.move_on_after(pause if self._held else float("inf")):
                await self._changed.wait()
