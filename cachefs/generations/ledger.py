"""The detector's ledger: which saves are open or remembered, which files are open, where a path belongs."""

from __future__ import annotations

from collections.abc import Collection

from cachefs.errors import CorruptError, InvalidError, UnreadableError
from cachefs.formats.names import to_text
from cachefs.generations import signals
from cachefs.generations.actions import Action, CancelSave, Incomplete, Loose, OpenSave, View
from cachefs.generations.placement import Placement, Placer, parent
from cachefs.generations.presets import SignalKind
from cachefs.generations.saves import AGAIN, Closed, OpenFiles, Save, Seen, inside
from cachefs.staging.changes import Kind

_NEW_NAME = (Kind.CREATED, Kind.RENAMED, Kind.LINKED, Kind.SYMLINKED)


class Ledger:
    """Keeps one rule above all: no open or remembered generation lies inside another one.

    Actions collect in `_out` in the order they happen; `_dirty` are the saves to be judged again.
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._files = OpenFiles()
        self._saves: dict[bytes, Save] = {}
        self._closed: dict[bytes, Closed] = {}
        self._dirty: set[bytes] = set()
        self._out: list[Action] = []

    def open_loose(self) -> list[bytes]:
        """Return the loose files that are open for writing: logs, that may never be closed."""
        return [path for path in self._files if self._known(path) is None and self._placer.is_loose(path)]

    def _known(self, path: bytes) -> bytes | None:
        """Return the root of the open or remembered generation that a path lies in."""
        root = path
        while root:
            known = self._saves.get(root) or self._closed.get(root)
            if known is not None and (root == path or known.placement.kind == "directory"):
                return root
            root = parent(root)
        return None

    def _root_at(self, path: bytes, was: Placement) -> Placement | None:
        """Return the placement of a moved generation root, or None when it is none any more."""
        if self._known(path) is not None:
            return None
        if was.kind == "file":
            placement = self._placer.place(path)
            return placement if placement and placement.path == path else None
        named = self._placer.place(path, is_dir=True)
        placement = named or self._placer.directory(path)
        return placement if placement and placement.path == path else None

    def _placed_by_hand(self, path: bytes, view: View) -> Placement:
        """Return the placement of a path that somebody says is a generation. Raises InvalidError for one inside another
        generation, and for the mount itself.
        """
        closed, known = self._closed.get(path), self._known(path)
        placement = closed.placement if closed else self._placer.any(path, is_file=view.source(path) is not None)
        if not path or placement.path != path or known not in (None, path):
            raise InvalidError(
                f"{to_text(path)} is not a generation: it lies inside another one",
                hint=f"close {to_text(known or placement.path)}",
            )
        return placement

    def _touch(self, path: bytes, kind: Kind, now: float) -> Save | None:
        """A path changed: return the save it belongs to, opening one if this is its first change; None outside."""
        root = self._known(path)
        placement = self._placer.place(path)
        closed = self._closed.get(root) if root is not None else None
        if closed is not None and placement is not None and _outgrown(closed, placement):
            del self._closed[closed.placement.path]
            root, closed = None, None
        elif root in self._saves and placement is not None and self._gives_way(self._saves[root], placement):
            self._cancel(root, f"{placement.generation} began in it: it is the directory of a run")
            root = None
        if root is not None and (save := self._saves.get(root)) is not None:
            if save.stale:
                self._cancel(root, "superseded: written again after a restart")
                save = self._open(save.placement, now)
        elif closed is not None:
            name = closed.placement.relative(path)
            if name not in closed.names and (kind in _NEW_NAME or name in closed.late):
                closed.late.add(name)
                return None
            save = self._open_again(closed, now)
        else:
            if placement is None or (kind is Kind.SYMLINKED and placement.kind == "file"):
                return None
            if placement.kind == "directory" and not self._make_room(placement, path):
                return None
            save = self._open(placement, now)
        save.wrote(save.placement.relative(path), now)
        if kind in (Kind.RENAMED, Kind.LINKED):
            save.whole.add(save.placement.relative(path))
        self._dirty.add(save.placement.path)
        return save

    def _gives_way(self, save: Save, placement: Placement) -> bool:
        """Return whether an open save ends because another one begins in its directory: that one has a name of its own,
        and only a fallback takes this one for a save.
        """
        if not _by_contents(save.placement) or not all(one.fallback for one in signals.applicable(save)):
            return False
        return _is_below(placement, save.placement) and (
            _has_name(placement) or (placement.kind == "file" and placement.step is not None)
        )

    def _make_room(self, placement: Placement, path: bytes = b"") -> bool:
        """Single files below a new generation become part of it; a directory generation below forbids it. So do the
        single files of a run, which have steps, when a fallback takes its directory for a generation because of `path`.
        """
        below = [root for root in (*self._saves, *self._closed) if inside(root, placement.path)]
        known = [(self._saves.get(root) or self._closed[root]).placement for root in below]
        if any(one.kind == "directory" for one in known):
            return False
        weak = bool(path) and _by_fallback(placement, {placement.relative(path)})
        if weak and any(one.step is not None for one in known):
            return False
        for root in below:
            self._cancel(root, "part of a generation now")
            self._closed.pop(root, None)
        return True

    def _open(self, placement: Placement, now: float) -> Save:
        self._closed.pop(placement.path, None)
        save = self._saves[placement.path] = Save(placement, now)
        self._dirty.add(placement.path)
        self._out.append(OpenSave(placement, save.whole))
        for path, other in self._saves.items():
            if other is save or other.stale or other.placement.run != placement.run or placement.step is None:
                continue
            if other.placement.step is None or other.placement.step >= placement.step:
                continue
            for preset in other.placement.candidates:
                seen = other.seen.get(preset.name)
                # The first one proves it; the others say nothing new.
                if any(signal.on == "next-save" for signal in preset.close) and (seen is None or seen.marker):
                    other.seen[preset.name] = Seen(signals.NEXT_SAVE, b"", now)
                    self._dirty.add(path)
        return save

    def _open_again(self, closed: Closed, now: float) -> Save:
        """Open a save where one was closed. It may have begun with names that the closed one did not have."""
        save = self._open(closed.placement, now)
        save.written |= closed.late
        save.whole |= closed.late
        return save

    def _cancel(self, path: bytes, reason: str) -> None:
        if self._saves.pop(path, None) is not None:
            self._out.append(CancelSave(path, reason))

    def _loose(self, path: bytes) -> None:
        if not self._placer.is_temporary(path):
            self._out.append(Loose(path))

    def _beside(self, path: bytes) -> list[Save]:
        """Return the saves that a path beside them may be a signal for; not those of a process that is gone: who wrote
        them may have failed when it went.
        """
        above = parent(path)
        return [
            save
            for root, save in self._saves.items()
            if parent(root) == above and root != path and save.placement.kind == "directory" and not save.stale
        ]

    def _unmark(self, path: bytes) -> None:
        for save in self._saves.values():
            save.unmark(path)

    def _inner(self, save: Save, name: bytes, now: float, *, renamed: bool, again: bool = True) -> None:
        for preset in save.placement.candidates:
            label = signals.inner_signal(preset, name, renamed=renamed)
            seen = save.seen.get(preset.name)
            # A file in the save proves no more than what nothing takes back, and may be written once more.
            if label and (seen is None or (again and seen.marker)):
                save.seen[preset.name] = Seen(label, save.placement.path + b"/" + name, now)

    def _outer(self, save: Save, path: bytes, on: SignalKind, now: float, view: View) -> None:
        for preset in save.placement.candidates:
            try:
                label = signals.outer_signal(preset, save.placement, on, path, view)
            except UnreadableError:
                save.unread[path] = now + AGAIN
                continue
            except CorruptError as error:
                self._out.append(Incomplete(save.placement.path, str(error)))
                continue
            if label:
                # A marker that was removed is the save's own: made again, it says that the save is not complete.
                save.seen[preset.name] = Seen(label, path if on == "marker-removed" else b"", now)
                self._dirty.add(save.placement.path)


def _outgrown(closed: Closed, placement: Placement) -> bool:
    """Return whether something appeared below a directory that only its contents made a generation, and shows that it
    is the directory of a run: a checkpoint's own name; or a single file, where a fallback took it for a generation.

    Then that was a save into a run's directory: the generations of the run go on, each by itself.
    """
    if not _by_contents(closed.placement) or not _is_below(placement, closed.placement):
        return False
    return _has_name(placement) or (placement.kind == "file" and _by_fallback(closed.placement, closed.names))


def _by_contents(placement: Placement) -> bool:
    return all(preset.generic for preset in placement.candidates)


def _by_fallback(placement: Placement, names: Collection[bytes]) -> bool:
    known = signals.knowing(placement, names)
    return bool(known) and all(preset.fallback for preset in known)


def _is_below(placement: Placement, root: Placement) -> bool:
    return placement.path != root.path and inside(placement.path, root.path)


def _has_name(placement: Placement) -> bool:
    """Return whether a directory is called like a checkpoint."""
    return placement.kind == "directory" and not _by_contents(placement)
