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
    """Paths that are open for writing. Hard links made while we watch share an id: a file is opened and closed under
    one of its names only, and is open under all of them."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._open: set[int] = set()
        self._next = count()

    def __contains__(self, path: object) -> bool:
        return self._ids.get(path) in self._open if isinstance(path, bytes) else False

    def opened(self, path: bytes) -> None:
        """A writable handle exists, or one more."""
        self._open.add(self._id(path))

    def closed(self, path: bytes) -> list[bytes]:
        """The last writable handle of the file at `path` is gone. Return its other names if it counted as open."""
        number = self._ids.get(path)
        if number is None or number not in self._open:
            return []
        self._open.remove(number)
        others = [name for name, value in self._ids.items() if value == number and name != path]
        if not others:
            del self._ids[path]
        return others

    def linked(self, old: bytes, path: bytes) -> None:
        """`path` is another name of the file at `old`."""
        self.removed(path)
        self._ids[path] = self._id(old)

    def removed(self, path: bytes) -> None:
        """The name, or the directory and all below it, is gone. What an unlinked file does no longer matters."""
        for name in [name for name in self._ids if inside(name, path)]:
            del self._ids[name]
        self._open.intersection_update(self._ids.values())

    def renamed(self, old: bytes, path: bytes) -> None:
        """`old` (a file, or a directory with all below it) became `path` and replaced what was there."""
        if old == path:
            return
        self.removed(path)
        for name in [name for name in self._ids if inside(name, old)]:
            self._ids[moved(name, old, path)] = self._ids.pop(name)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the open paths."""
        return (name for name, number in self._ids.items() if number in self._open)

    def below(self, root: bytes) -> Iterator[bytes]:
        """Yield the open paths that are `root` or lie below it."""
        return (name for name in self if inside(name, root))

    def _id(self, path: bytes) -> int:
        number = self._ids.get(path)
        if number is None:
            number = self._ids[path] = next(self._next)
        return number


class Seen(msgspec.Struct, frozen=True):
    """A close signal that fired: in words, the path that carried it, and when.

    When the `marker` changes again, the signal holds no longer. It is b"" where nothing takes the signal back: a
    tracker has named the save once, and goes on to name the next one.
    """

    label: str
    marker: bytes
    at: float


NO_SIGNAL = "the close signal"
"""What a save waits for as long as nothing says that it is complete."""


@dataclass(slots=True)
class Save:
    """One open save. `written` are the names changed in it, relative, `whole` those of them that came into it as they
    are, `gone` those that were removed, and when, `came` when names came first that came after a signal; `seen` the
    signals that fired, by preset.
    `why` says in words who closes it `by_hand`.

    `unread` are finished files that could not be read, so that nobody knows whether they are a signal, and when they
    are looked at again.

    `told` is what the caller knows: the signals that nothing takes back, in words by preset, and whether a file was
    removed after its signal. `torn` says so of a process that is gone.

    `stale` marks a save of a process that is gone: the next change starts another. `wake` is when to look again,
    `waiting` says what it waits for, `held` since when open files alone hold it back. `known` says whether a preset
    knows its files; None: to be looked at.
    """

    placement: Placement
    changed: float
    written: set[bytes] = field(default_factory=set)
    whole: set[bytes] = field(default_factory=set)
    gone: dict[bytes, float] = field(default_factory=dict)
    came: dict[bytes, float] = field(default_factory=dict)
    renamed: set[bytes] = field(default_factory=set)
    seen: dict[str, Seen] = field(default_factory=dict)
    told: tuple[dict[str, str], bool] = ({}, False)
    torn: bool = False
    by_hand: float | None = None
    why: str = ""
    stale: bool = False
    wake: float | None = None
    unread: dict[bytes, float] = field(default_factory=dict)
    held: float | None = None
    known: bool | None = None
    waiting: str = NO_SIGNAL

    def wrote(self, name: bytes, now: float) -> None:
        """A file was created, changed or brought here."""
        if self.seen and name not in self.written and name not in self.gone:
            self.came.setdefault(name, now)
        self.written.add(name)
        self.gone.pop(name, None)
        self.known = self.known or None
        self.changed = now

    def removed(self, name: bytes, now: float) -> None:
        """A name, or all below it, is gone and has no other one."""
        if name in self.written:
            self.gone[name] = now
        self.dropped(name, now)

    def dropped(self, name: bytes, now: float) -> None:
        """A name, or all below it, is gone."""
        if name in self.written:
            self.written.discard(name)
            self.renamed.discard(name)
        else:
            self.written = {path for path in self.written if not inside(path, name)}
            self.renamed = {path for path in self.renamed if not inside(path, name)}
        self.known = None
        self.changed = now

    def unmark(self, marker: bytes) -> None:
        """The path that carried a signal changes again: what it said no longer holds, see `Seen`."""
        self.unread.pop(marker, None)
        for preset in [preset for preset, seen in self.seen.items() if seen.marker == marker]:
            del self.seen[preset]

    def move(self, placement: Placement) -> None:
        """The root has a new name, and what is known of it goes by that."""
        old, self.placement, self.told = self.placement.path, placement, ({}, False)
        self.known = None
        for preset, seen in self.seen.items():
            if inside(seen.marker, old):
                self.seen[preset] = msgspec.structs.replace(seen, marker=moved(seen.marker, old, placement.path))


AGAIN = 1.0
"""Seconds after which a file that could not be read is looked at again."""


@dataclass(slots=True)
class Closed:
    """A closed save: the names it consisted of, and those that came later (addenda). `seen` says that it was closed
    here and stands where it stood then: only of such a one the names are known to be those that were closed.
    """

    placement: Placement
    names: frozenset[bytes]
    seen: bool
    late: set[bytes] = field(default_factory=set)

    def dropped(self, name: bytes) -> None:
        """A name, or all below it, is gone."""
        self.late = {path for path in self.late if not inside(path, name)}
