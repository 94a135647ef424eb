"""The detector: from changes of the visible tree to "this save is complete". No I/O and no clock of its own.

What it guarantees, whatever the changes are:
- a save is never closed while a file of it is open for writing;
- a save is closed by what happened in it, never by a marker that stood there before;
- no open or remembered generation lies inside another one.

After a close: a change of one of its files (truncating open, re-creation, rename over it) starts a new save; a new name
is an *addendum*, kept locally, and starts a new save only if it carries a close signal itself; a removal starts
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cachefs.errors import CorruptError, InvalidError, UnreadableError
from cachefs.formats.names import to_text
from cachefs.generations import signals
from cachefs.generations.actions import (
    Action,
    CancelSave,
    CloseSave,
    Held,
    Incomplete,
    MoveSave,
    Proved,
    ResumedSave,
    View,
)
from cachefs.generations.ledger import Ledger
from cachefs.generations.placement import Placement, Placer
from cachefs.generations.saves import AGAIN, Closed, Save, Seen, inside, moved
from cachefs.generations.verdict import SINGLE_FILE, file_signal, has_bytes, judge, waits_for
from cachefs.staging.changes import Change, Kind


class Detector(Ledger):
    """All saves of one mount. Feed every change in order; call `due` when `next_deadline` has come.

    `open_deadline` (seconds): how long a save waits for open files after its close signal before it is abandoned.
    `alone`: every file of a save is seen here (one member, or one that shares its directory); set False with several
    members.
    """

    def __init__(self, placer: Placer, *, open_deadline: float = 600.0, alone: bool = True) -> None:
        super().__init__(placer)
        self._open_deadline = open_deadline
        self._alone = alone

    # ---- what the caller asks

    def observe(self, change: Change, now: float, view: View) -> list[Action]:
        """Take one change in; return what follows from it, in order. `view` shows the tree after the change."""
        if change.kind in (Kind.CREATED, Kind.OPENED, Kind.TRUNCATED):
            self._opened(change, now)
        elif change.kind is Kind.CLOSED:
            if change.writers == 0:
                for path in [change.path, *self._files.closed(change.path)]:
                    self._finished(path, now, view, renamed=False)
        elif change.kind is Kind.RENAMED and change.is_dir:
            self._moved_directory(change.old, change.path, now, view)
        elif change.kind is Kind.RENAMED:
            self._moved_file(change, now, view)
        elif change.kind is Kind.LINKED:
            self._files.linked(change.old, change.path)
            self._arrived(change.path, change.kind, now, view)
        elif change.kind is Kind.SYMLINKED:
            self._symlinked(change.path, now, view)
        elif change.kind is Kind.REMOVED:
            self._removed(change.path, now, view)
        return self._settle(now, view)

    def due(self, now: float, view: View) -> list[Action]:
        """Return what follows from the time alone."""
        for save in self._saves.values():
            for path in [path for path, again in save.unread.items() if again <= now]:
                del save.unread[path]
                self._look_again(save, path, now, view)
        self._dirty.update(path for path, save in self._saves.items() if save.wake is not None and save.wake <= now)
        return self._settle(now, view)

    def next_deadline(self) -> float | None:
        """Return when `due` may have something to say, or None."""
        wakes = [save.wake for save in self._saves.values() if save.wake is not None]
        return min([*wakes, *(again for save in self._saves.values() for again in save.unread.values())], default=None)

    def open_saves(self) -> dict[bytes, str]:
        """Return the open saves and what each waits for, in words."""
        return {path: waits_for(save) for path, save in self._saves.items()}

    def closing(self) -> list[bytes]:
        """Return the open saves that go on by themselves: the close signal came, and they wait for a time or for files
        that are still open; or a file could not be read, and is looked at again.
        """
        return [path for path, save in self._saves.items() if save.wake is not None or save.unread]

    def close_now(self, path: bytes, now: float, view: View) -> list[Action]:
        """Close a generation by hand, whatever its preset still waits for; open files are waited for all the same.

        A closed generation, or a directory that no preset knows, is closed as a new save. Raises InvalidError when the
        path is empty, lies inside another generation or around one, and when there is not a single byte to publish:
        none of other members either, and nobody is writing one.
        """
        save = self._saves.get(path)
        placement = save.placement if save else self._placed_by_hand(path, view)
        if self._alone and not has_bytes(path, view) and not [*self._files.below(path), *view.written(path)]:
            raise InvalidError(f"{to_text(path)} holds no bytes", hint="close it when its files are written")
        if save is None:
            if path not in self._closed and not self._make_room(placement):
                hint = "close one of those (cachefs status lists them)"
                raise InvalidError(f"{to_text(path)} is not a generation: it holds others", hint=hint)
            self._open(placement, now).written.update(view.names(path))
        return self.close_as(path, now, view, "closed by hand")

    def unchanged(self, path: bytes, view: View) -> bool:
        """Return whether a generation is closed and certainly holds what was closed: to close it again says nothing."""
        closed = self._closed.get(path)
        return closed is not None and closed.seen and closed.names == _names(closed.placement, view)

    def close_as(self, path: bytes, now: float, view: View, why: str) -> list[Action]:
        """Close an open save whatever its preset still waits for; `why` says in words who closes it."""
        self._saves[path].by_hand = now
        self._saves[path].why = why
        self._saves[path].stale = False
        self._dirty.add(path)
        return self._settle(now, view)

    def least_recent(self) -> float | None:
        """Return when the open save changed last that has not changed for the longest time; None without any."""
        return min((save.changed for save in self._saves.values()), default=None)

    def changed_at(self, path: bytes) -> float:
        """Return when an open save changed last."""
        return self._saves[path].changed

    def forget(self, path: bytes) -> None:
        """Drop an open save that the caller gave up; a later change starts a new one."""
        self._saves.pop(path, None)

    def resume(self, saves: Iterable[ResumedSave], view: View, now: float) -> list[Action]:
        """Take in the saves of a process that is gone; close those whose signal came while nobody looked.

        Every file counts as closed but those still `written`. A marker that differs from its baseline was written in
        the save. A save that stays open is superseded by the next change in it.
        """
        for resumed in saves:
            placement = self._placer.any(resumed.path, is_file=view.source(resumed.path) is not None)
            if resumed.closed:
                self._closed[placement.path] = Closed(placement, _names(placement, view), seen=False)
                continue
            names = view.names(resumed.path) if placement.kind == "directory" else [placement.relative(resumed.path)]
            old = {path for path, baseline in resumed.baselines.items() if baseline and view.identity(path) == baseline}
            save = Save(placement, now, torn=resumed.torn, stale=True)
            save.written = {name for name in names if resumed.path + b"/" + name not in old}
            self._saves[resumed.path] = save
            self._dirty.add(resumed.path)
            for path in resumed.written:
                self._files.opened(path)
                save.renamed.add(placement.relative(path))
            if placement.kind == "file":
                if resumed.path not in self._files:
                    self._check_file(save, now, view, renamed=True)
                continue
            for name in sorted(save.written):
                if resumed.path + b"/" + name not in self._files:
                    self._inner(save, name, now, renamed=True)
            for preset in placement.candidates:
                for path in signals.named_paths(placement, preset):
                    if inside(path, resumed.path) or path in old:
                        continue
                    gone = view.identity(path) is None
                    if gone and resumed.baselines.get(path) is not None:
                        self._outer(save, path, "marker-removed", now, view)
                    elif not gone:
                        self._outer(save, path, "parent-file", now, view)
                        self._outer(save, path, "symlink", now, view)
            save.told = dict(resumed.signals), resumed.torn
            for preset_name, label in resumed.signals.items():
                save.seen.setdefault(preset_name, Seen(label, b"", now))
            if resumed.opened_as:
                self._renamed_root(save, resumed.opened_as, now)
        return self._settle(now, view)

    # ---- changes

    def _opened(self, change: Change, now: float) -> None:
        self._files.opened(change.path)
        self._unmark(change.path)
        save = self._touch(change.path, change.kind, now)
        if save is not None and change.kind is not Kind.OPENED:
            save.renamed.discard(save.placement.relative(change.path))

    def _finished(self, path: bytes, now: float, view: View, *, renamed: bool) -> None:
        """A file is whole as far as its writers say: a signal in the generation, beside one, or a loose file."""
        root = self._known(path)
        save = self._saves.get(root) if root is not None else None
        closed = self._closed.get(root) if root is not None else None
        if save is not None:
            self._dirty.add(save.placement.path)
            save.changed = max(save.changed, now)
            if save.placement.kind == "file":
                self._check_file(save, now, view, renamed=renamed)
            else:
                name = save.placement.relative(path)
                self._inner(save, name, now, renamed=renamed or name in save.renamed)
        elif closed is not None:
            self._addendum(closed, path, now, renamed=renamed)
        elif (placement := self._placer.place(path)) is None or placement.kind == "directory":
            self._loose(path)  # in no generation, or its directory holds generations and cannot be one
        for other in self._beside(path):
            self._outer(other, path, "parent-file", now, view)

    def _addendum(self, closed: Closed, path: bytes, now: float, *, renamed: bool) -> None:
        name = closed.placement.relative(path)
        if name not in closed.late:
            return
        if any(signals.inner_signal(preset, name, renamed=renamed) for preset in closed.placement.candidates):
            save = self._open_again(closed, now)
            self._inner(save, name, now, renamed=renamed)

    def _moved_file(self, change: Change, now: float, view: View) -> None:
        old, path = change.old, change.path
        self._unmark(old)
        self._unmark(path)
        if view.source(old) is None:
            self._files.renamed(old, path)
            self._left(old, path, now)
        elif change.writers == 0:  # an exchange, told as two renames: each says itself who still writes
            self._files.closed(path)
        if change.writers:
            self._files.opened(path)
        self._arrived(path, change.kind, now, view)

    def _left(self, old: bytes, path: bytes, now: float) -> None:
        """A file's name is gone because it was renamed."""
        root = self._known(old)
        if root == old and root in self._saves and self._saves[root].placement.kind == "file":
            placement = self._placer.place(path)
            if placement and placement.kind == "file" and self._known(path) is None:
                save = self._saves.pop(old)
                save.move(placement)
                self._saves[path] = save
                self._out.append(MoveSave(old, placement, save.written))
            else:
                self._cancel(old, "renamed to a place that is no generation of its own")
        elif root == old:
            self._closed.pop(old, None)
        elif root is not None:
            self._dropped(root, old, now)
        elif self._placer.place(old) is None:
            self._loose(old)

    def _dropped(self, root: bytes, path: bytes, now: float) -> None:
        """A name in a generation is gone, or all below it."""
        one = self._saves.get(root)
        if one is not None:
            one.dropped(one.placement.relative(path), now)
            self._dirty.add(root)
        elif (closed := self._closed.get(root)) is not None:
            closed.dropped(closed.placement.relative(path))

    def _arrived(self, path: bytes, kind: Kind, now: float, view: View) -> None:
        """A whole file appeared under a name: renamed or linked there."""
        save = self._touch(path, kind, now)
        if save is not None:
            save.renamed.add(save.placement.relative(path))
        if path not in self._files:
            self._finished(path, now, view, renamed=True)

    def _symlinked(self, path: bytes, now: float, view: View) -> None:
        if self._known(path) is None:
            placement = self._placer.place(path)
            if placement is None or placement.kind == "file":
                self._loose(path)
                for save in self._beside(path):
                    self._outer(save, path, "symlink", now, view)
                return
        self._touch(path, Kind.SYMLINKED, now)

    def _removed(self, path: bytes, now: float, view: View) -> None:
        self._files.removed(path)
        self._unmark(path)
        root = self._known(path)
        if root == path:
            self._cancel(path, "removed before it was complete")
            self._closed.pop(path, None)
        elif root is not None:
            save = self._saves.get(root)
            if save is not None:
                save.removed(save.placement.relative(path), now)
                self._dirty.add(root)
            else:
                self._dropped(root, path, now)
        else:
            placement = self._placer.place(path)
            if placement is None or placement.kind == "file":
                self._loose(path)
        for save in self._beside(path):
            self._outer(save, path, "marker-removed", now, view)

    def _moved_directory(self, old: bytes, path: bytes, now: float, view: View) -> None:
        if old == path:
            return
        self._files.renamed(old, path)
        for root in [root for root in self._saves if inside(root, path)]:
            self._cancel(root, "replaced by a directory renamed over it")
        for root in [root for root in self._closed if inside(root, path)]:
            del self._closed[root]
        inner = self._known(old)
        if inner is not None and inner != old:
            self._dropped(inner, old, now)
        for root in [root for root in self._closed if inside(root, old)]:
            closed = self._closed.pop(root)
            placement = self._root_at(moved(root, old, path), closed.placement)
            if placement is not None:
                closed.placement, closed.seen = placement, False
                self._closed[placement.path] = closed
        for root in [root for root in self._saves if inside(root, old)]:
            save = self._saves.pop(root)
            placement = self._root_at(moved(root, old, path), save.placement)
            if placement is None:
                self._out.append(CancelSave(root, "moved to a place that is no generation of its own"))
                continue
            save.move(placement)
            self._saves[placement.path] = save
            self._dirty.add(placement.path)
            self._out.append(MoveSave(root, placement, save.written))
            self._renamed_root(save, root, now)
        if path in self._saves or path in self._closed:
            return
        target = self._known(path) or (placed.path if (placed := self._placer.place(path, is_dir=True)) else None)
        appeared = self._placer.is_temporary(old) and not self._placer.is_temporary(path)
        if target is None and not appeared:
            self._loose(old)
            self._loose(path)
            return
        arrived = [path + b"/" + name for name in view.names(path)]
        # What makes a directory a generation first: single files in it are no saves of their own then.
        arrived.sort(key=lambda file: (place := self._placer.place(file)) is None or place.kind == "file")
        for file in arrived:
            self._touch(file, Kind.RENAMED, now)
        for file in arrived:
            if file not in self._files:
                self._finished(file, now, view, renamed=True)

    def _renamed_root(self, save: Save, old: bytes, now: float) -> None:
        """The generation's directory got its name: the close of presets that write under another one."""
        own = old.rpartition(b"/")[2]
        for preset in save.placement.candidates:
            match = preset.match_temp(own)
            if match and not save.placement.temporary and any(signal.on == "renamed-dir" for signal in preset.close):
                save.seen.setdefault(preset.name, Seen("directory renamed into place", save.placement.path, now))
        # What was written under the old name was not judged by the presets of the new one.
        for name in sorted(save.written):
            if save.placement.kind == "directory" and save.placement.path + b"/" + name not in self._files:
                self._inner(save, name, now, renamed=True, again=False)

    # ---- signals

    def _check_file(self, save: Save, now: float, view: View, *, renamed: bool) -> None:
        try:
            label = file_signal(save.placement.path, view, renamed=renamed)
        except CorruptError as error:
            save.seen.clear()
            save.waiting = str(error)
            self._out.append(Incomplete(save.placement.path, str(error)))
            return
        except UnreadableError as error:
            save.waiting = str(error)
            save.unread[save.placement.path] = now + AGAIN
            return
        if label is not None:
            save.seen[SINGLE_FILE] = Seen(label, save.placement.path, now)

    def _look_again(self, save: Save, path: bytes, now: float, view: View) -> None:
        """A finished file could not be read a moment ago."""
        if save.placement.kind == "file":
            self._check_file(save, now, view, renamed=save.placement.relative(path) in save.renamed)
        else:
            self._outer(save, path, "parent-file", now, view)
        self._dirty.add(save.placement.path)

    # ---- closing

    def _settle(self, now: float, view: View) -> list[Action]:
        for path in sorted(self._dirty):
            save = self._saves.get(path)
            if save is None:
                continue
            open_paths = list(self._files.below(path))
            action = judge(save, open_paths, now, view, alone=self._alone, open_deadline=self._open_deadline)
            if isinstance(action, CloseSave) and (held := view.written(path)):
                # By a map that outlives its descriptor, or under a name that the mount has not seen.
                for one in held:
                    self._files.opened(one)
                self._out.append(Held(held))
                action = judge(save, held, now, view, alone=self._alone, open_deadline=self._open_deadline)
            if action is None:
                self._prove(save)
                continue
            del self._saves[path]
            self._out.append(action)
            if isinstance(action, CloseSave):
                self._closed[path] = Closed(save.placement, _names(save.placement, view), seen=True)
        self._dirty.clear()
        out, self._out = self._out, []
        return out

    def _prove(self, save: Save) -> None:
        proved = {preset: seen.label for preset, seen in save.seen.items() if not seen.marker}
        torn = save.torn or signals.torn(save)
        if (proved, torn) != save.told and not save.placement.temporary:
            save.told = proved, torn
            self._out.append(Proved(save.placement.path, proved, torn))


def _names(placement: Placement, view: View) -> frozenset[bytes]:
    return frozenset(
        view.names(placement.path) if placement.kind == "directory" else [placement.relative(placement.path)]
    )
