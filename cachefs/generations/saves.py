"""The state the detector keeps: which files are open for writing, each open save, and what is known of closed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec

from cachefs.generations.placement import Placement


def inside(path: bytes, root: bytes) -> bool:
    """Return whether a path is `root` or lies below it."""
    return path == root or path.startswith(root + b"/")


def moved(path: bytes, old: bytes, new: bytes) -> bytes:
    """Return where a path that is `old` or lies below it is after `old` was renamed to `new`."""
    return new + path[len(old) :]


class OpenFiles:
    """Paths that are open for writing. Hard links of one open file share a token, since it is closed under one name
    only.
    """

    def __init__(self) -> None:
        self._tokens: dict[bytes, int] = {}
        self._next = count()

    def __contains__(self, path: object) -> bool:
        return path in self._tokens

    def opened(self, path: bytes) -> None:
        """A writable handle exists, or one more."""
        self._tokens.setdefault(path, next(self._next))

    def closed(self, path: bytes) -> None:
        """The last writable handle of the file at `path` is gone."""
        token = self._tokens.pop(path, None)
        if token is not None:
            for other in [name for name, value in self._tokens.items() if value == token]:
                del self._tokens[other]

    def linked(self, old: bytes, path: bytes) -> None:
        """`path` is another name of the file at `old`."""
        if old in self._tokens:
            self._tokens[path] = self._tokens[old]

    def removed(self, path: bytes) -> None:
        """The name, or the directory and all below it, is gone. What an unlinked file does no longer matters."""
        for name in [name for name in self._tokens if inside(name, path)]:
            del self._tokens[name]

    def renamed(self, old: bytes, path: bytes) -> None:
        """`old` (a file, or a directory with all below it) became `path` and replaced what was there."""
        if old == path:
            return
        self.removed(path)
        for name in [name for name in self._tokens if inside(name, old)]:
            self._tokens[moved(name, old, path)] = self._tokens.pop(name)

    def below(self, root: bytes) -> Iterator[bytes]:
        """Yield the open paths that are `root` or lie below it."""
        return (name for name in self._tokens if inside(name, root))


class Seen(msgspec.Struct, frozen=True):
    """A close signal that fired: in words, the path that carried it, and when."""

    label: str
    marker: bytes
    at: float


@dataclass(slots=True)
class Save:
    """One open save. `written` are the names changed in it, relative; `seen` the signals that fired, by preset.

    `stale` marks a save of a process that is gone: the next change starts another. `wake` is when to look again,
    `waiting` says what it waits for, `held` since when open files alone hold it back.
    """

    placement: Placement
    changed: float
    written: set[bytes] = field(default_factory=set)
    renamed: set[bytes] = field(default_factory=set)
    seen: dict[str, Seen] = field(default_factory=dict)
    by_hand: float | None = None
    stale: bool = False
    wake: float | None = None
    held: float | None = None
    waiting: str = "the close signal"

    def wrote(self, name: bytes, now: float) -> None:
        """A file was created, changed or brought here."""
        self.written.add(name)
        self.changed = now

    def dropped(self, name: bytes, now: float) -> None:
        """A name, or all below it, is gone."""
        self.written = {path for path in self.written if not inside(path, name)}
        self.renamed = {path for path in self.renamed if not inside(path, name)}
        self.changed = now

    def unmark(self, marker: bytes) -> None:
        """The path that carried a signal changes again: what it said no longer holds."""
        for preset in [preset for preset, seen in self.seen.items() if seen.marker == marker]:
            del self.seen[preset]

    def move(self, placement: Placement) -> None:
        """The root has a new name."""
        old, self.placement = self.placement.path, placement
        for preset, seen in self.seen.items():
            if inside(seen.marker, old):
                self.seen[preset] = msgspec.structs.replace(seen, marker=moved(seen.marker, old, placement.path))


@dataclass(slots=True)
class Closed:
    """A closed save: the names it consisted of, and those that came later (addenda)."""

    placement: Placement
    names: frozenset[bytes]
    late: set[bytes] = field(default_factory=set)
