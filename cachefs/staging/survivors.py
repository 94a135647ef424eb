"""Files that are written past the mount, so that nobody tells the daemon when they are closed: with the kernel data
path a process goes on writing to its open files after the daemon was killed, and to a map after its descriptor was
closed.

They are asked for again and again (writers.py). The descriptors kept here follow the files through renames.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from cachefs.staging.writers import is_written, open_to_ask


class Survivors:
    """The files that are still open for writing past the mount. Only used from the event loop."""

    def __init__(self, tree_fd: int) -> None:
        self._tree_fd = tree_fd
        self._open: list[int] = []

    def __len__(self) -> int:
        return len(self._open)

    def find(self, paths: Iterable[bytes]) -> list[bytes]:
        """Return those files that are open for writing, and watch them. Before the new mount serves any."""
        found = []
        for path in paths:
            try:
                fd = open_to_ask(path, self._tree_fd)
            except OSError:
                continue
            if is_written(fd):
                self._open.append(fd)
                found.append(path)
            else:
                os.close(fd)
        return found

    def watch(self, path: bytes) -> None:
        """Watch a file that was found to be written; one that is gone meanwhile has nothing to tell.

        Raises OSError when it cannot be opened.
        """
        try:
            self._open.append(open_to_ask(path, self._tree_fd))
        except FileNotFoundError:
            pass

    def ended(self) -> list[bytes]:
        """Return the files that are not open for writing any more, under their present names; stop watching them."""
        ended = [fd for fd in self._open if not is_written(fd)]
        self._open = [fd for fd in self._open if fd not in ended]
        above = os.readlink(b"/proc/self/fd/%d" % self._tree_fd) + b"/"
        paths = []
        for fd in ended:
            if os.fstat(fd).st_nlink:
                path = os.readlink(b"/proc/self/fd/%d" % fd)
                if path.startswith(above):
                    paths.append(path.removeprefix(above))
            os.close(fd)
        return paths

    def close(self) -> None:
        """Watch nothing any more."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()
