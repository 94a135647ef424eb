"""What the mount tells about the visible tree: one `Change` per finished operation, in the order they happened."""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(Enum):
    """What happened. Every `path` is relative to the mount root, bytes, without a leading slash."""

    CREATED = "created"
    """A regular file was created and is open for writing."""
    OPENED = "opened"
    """An existing file is about to be opened for writing, its bytes kept."""
    TRUNCATED = "truncated"
    """An existing file is about to lose bytes: opened with O_TRUNC, or truncated."""
    CLOSED = "closed"
    """The last writable handle of a file was released. `path` is where the file is now, whatever it was opened as."""
    RENAMED = "renamed"
    """`old` became `path`, replacing what was there. For an exchange two changes are sent."""
    LINKED = "linked"
    """`path` is a new hard link to the file at `old`."""
    SYMLINKED = "symlinked"
    """`path` is a new symbolic link to `target`."""
    REMOVED = "removed"
    """A file, link or empty directory was removed."""
    MADE_DIR = "made_dir"
    """A directory was created."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """One change of the visible tree. `writers` is how many writable handles are open on the file after the change."""

    kind: Kind
    path: bytes
    is_dir: bool = False
    old: bytes = b""
    target: bytes = b""
    writers: int = 0
