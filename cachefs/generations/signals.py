"""May this save close now? Which presets apply, which events are a signal, and what still has to hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set

from cachefs.errors import CorruptError
from cachefs.generations.actions import View
from cachefs.generations.completeness import check_file, dcp_files, index_files, read_whole
from cachefs.generations.placement import Placement, parent
from cachefs.generations.presets import Preset, SignalKind, is_temporary, matches
from cachefs.generations.saves import Save, Seen, inside

_SCAN_MAX = 4 << 20
"""Longest manifest scanned here, bytes: the caller waits for it. Longer ones are checked when the generation is
sealed.
"""
_TRACKER_MAX = 4096


def applicable(save: Save) -> list[Preset]:
    """Return the presets that may close a save, judged by the files written in it."""
    return knowing(save.placement, save.written)


def knowing(placement: Placement, names: Collection[bytes]) -> list[Preset]:
    """Return the presets that a generation of these names is one of, the first of those that go by contents alone."""
    out: list[Preset] = []
    for preset in placement.candidates:
        if preset.evidence and not any(matches(name, preset.evidence) for name in names):
            continue
        if not (preset.generic and out):
            out.append(preset)
    return out


def by_name(placement: Placement) -> str:
    """Return the first preset that needs no evidence but the name; "" while files have to tell which one it is."""
    return next((preset.name for preset in placement.candidates if not preset.evidence), "")


def inner_signal(preset: Preset, name: bytes, *, renamed: bool) -> str | None:
    """Return the signal, in words, that a finished file in the generation is for a preset."""
    for signal in preset.close:
        if signal.on == "renamed-in" and renamed and matches(name, signal.names):
            return f"{_text(name)} renamed into place"
        if signal.on == "closed-in" and matches(name, signal.names):
            return f"{_text(name)} closed"
    return None


def outer_signal(preset: Preset, placement: Placement, on: SignalKind, path: bytes, view: View) -> str | None:
    """Return the signal that an event on a path beside the generation is: parent-file, symlink or marker-removed.

    Raises CorruptError and UnreadableError for a file that cannot be read.
    """
    name = path.rpartition(b"/")[2]
    for signal in preset.close:
        if signal.on != on:
            continue
        if on == "marker-removed":
            own = placement.path.rpartition(b"/")[2]
            if any(glob.encode().replace(b"{name}", own) == name for glob in signal.names):
                return f"{_text(name)} removed"
        elif matches(name, signal.names):
            text = view.readlink(path) if on == "symlink" else _head(path, view)
            if text is not None and _names_generation(text, placement):
                return f"{_text(name)} names it"
    return None


def _names_generation(text: bytes, placement: Placement) -> bool:
    last = text.strip().rstrip(b"/").rpartition(b"/")[2]
    if last == placement.path.rpartition(b"/")[2]:
        return True
    return last.isdigit() and len(last) <= 18 and placement.step == int(last)


def _head(path: bytes, view: View) -> bytes | None:
    source = view.source(path)
    return source.read(0, _TRACKER_MAX) if source is not None else None


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def ready_at(save: Save, preset: Preset, seen: Seen, limit: float) -> float:
    """Return when time alone no longer forbids the close. B waits at most `limit` for late files."""
    if preset.strength == "A":
        return seen.at
    if preset.strength == "B":
        return min(max(seen.at, save.changed) + preset.settle, seen.at + max(limit, preset.settle))
    return max(seen.at, save.changed) + preset.quiet


def unmet(save: Save, preset: Preset, seen: Seen, view: View, *, alone: bool) -> str | None:
    """Return what still forbids the close, in words, or None. Raises UnreadableError.

    `alone` says that every file of the save is visible here. If not, the other members' files cannot be asked for.
    """
    root = save.placement.path
    weak = preset.strength in "CD"
    for guard in preset.guards:
        if not any(matches(name, (guard,)) for name in save.written):
            return f"{guard} was not written in this save"
    if inside(seen.marker, root) and (reason := _torn(seen.marker, view)):
        return reason
    if preset.strength != "A" and (gone := _removed_since(save, preset, seen.at)):
        return f"{_text(gone)} was removed after the close signal"
    names = view.names(root)
    if blocked := [name for name in names if matches(name, preset.blocked_by)]:
        return f"{_text(blocked[0])} is still there"
    if weak and (temporary := [name for name in names if is_temporary(name, preset.temp_names)]):
        return f"{_text(temporary[0])} is a temporary name"
    if "dcp" in preset.expected and (reason := _dcp(save, view, alone)):
        return reason
    if alone:
        if preset.ranks is not None:
            for wanted in (
                name.replace("{rank}", str(rank)) for name in preset.rank_files for rank in range(preset.ranks)
            ):
                if wanted.encode() not in save.written:
                    return f"{wanted} was not written in this save"
        elif preset.strength == "D" and preset.rank_files and seen.label != NEXT_SAVE:
            return "preset.ranks is not configured, so only the start of the next save closes this one"
        if "index" in preset.expected and (reason := _index(root, names, view)):
            return reason
        if "names" in preset.expected and (reason := _counted(names, save.written)):
            return reason
    if weak and "formats" in preset.expected:
        return _formats(root, names, view)
    return None


NEXT_SAVE = "the next save started"


def torn(save: Save) -> bool:
    """Return whether a file was removed after a signal that it does not outlive."""
    return any(
        preset.strength != "A" and _removed_since(save, preset, save.seen[preset.name].at) is not None
        for preset in save.placement.candidates
        if preset.name in save.seen
    )


def _removed_since(save: Save, preset: Preset, signal: float) -> bytes | None:
    """Rotation deletes a save file by file, and may be killed in the middle. Return what it has removed, or None."""
    for name, at in save.gone.items():
        if (
            at > signal >= save.came.get(name, signal)
            and not is_temporary(name, preset.temp_names)
            and not matches(name, preset.blocked_by)
        ):
            return name
    return None


def _torn(marker: bytes, view: View) -> str | None:
    """A marker is also closed when its writer is killed in the middle of it."""
    source = view.source(marker)
    if source is None:
        return None
    name = marker.rpartition(b"/")[2]
    try:
        check_file(_text(name), source)
        end = source.read(max(0, source.size - 64), 64) if name.endswith(b".json") else b"}"
    except CorruptError as error:
        return f"{_text(name)}: {error}"
    return None if end.rstrip().endswith((b"}", b"]")) else f"{_text(name)} does not end as JSON does"


def _dcp(save: Save, view: View, alone: bool) -> str | None:
    for folder in sorted({parent(name) for name in save.written if name.endswith(b".distcp")}):
        metadata = folder + b"/.metadata" if folder else b".metadata"
        if metadata not in save.written:
            return f"{_text(metadata)} was not written in this save"
        source = view.source(save.placement.path + b"/" + metadata)
        if source is None:
            return f"{_text(metadata)} is not there"
        if not alone or source.size > _SCAN_MAX:
            continue
        try:
            listed = dcp_files(read_whole(source, _SCAN_MAX))
        except CorruptError as error:
            return f"{_text(metadata)}: {error}"
        above = save.placement.path + b"/" + (folder + b"/" if folder else b"")
        if missing := sorted(name for name in listed if view.source(above + name.encode()) is None):
            return f"{missing[0]}, listed in {_text(metadata)}, is not there"
    return None


def _index(root: bytes, names: Sequence[bytes], view: View) -> str | None:
    for name in names:
        if not name.endswith((b".safetensors.index.json", b".bin.index.json")):
            continue
        source = view.source(root + b"/" + name)
        if source is None or source.size > _SCAN_MAX:
            continue
        try:
            listed = index_files(read_whole(source, _SCAN_MAX))
        except CorruptError as error:
            return f"{_text(name)}: {error}"
        above = root + b"/" + (parent(name) + b"/" if parent(name) else b"")
        if missing := sorted(file for file in listed if view.source(above + file.encode()) is None):
            return f"{missing[0]}, listed in {_text(name)}, is not there"
    return None


_COUNTED = re.compile(rb"([A-Za-z_-]*)(\d+)-of-(\d+)|(world_size)_(\d+)_rank_(\d+)")


def _counted(names: Iterable[bytes], written: set[bytes]) -> str | None:
    """Check that sets whose names carry their count are whole, per top-level directory.

    Hugging Face counts from 1, ranks count from 0. Pipeline ranks share no parameter, so the grid is judged over all
    files, not per parameter. A set counts only if a file of it was written in this save: older, larger sets may lie
    beside it.
    """
    found: dict[tuple[bytes, bytes, int], set[int]] = {}
    current: set[tuple[bytes, bytes, int]] = set()
    for name in names:
        top, slash, _ = name.partition(b"/")
        for match in _COUNTED.finditer(name):
            label, number, total = (match[4], match[6], match[5]) if match[4] else (match[1], match[2], match[3])
            if len(total) > 6 or len(number) > 6:
                continue
            key = (top if slash else b"", label, int(total))
            found.setdefault(key, set()).add(int(number))
            if name in written:
                current.add(key)
    for folder, label, total in sorted(current):
        numbers = found[folder, label, total]
        if not (numbers >= set(range(total)) or numbers >= set(range(1, total + 1))):
            where = f" in {_text(folder)}" if folder else ""
            return f"{len(numbers)} of {total} files of the set {_text(label)}*-of-{total} are there{where}"
    return None


def _formats(root: bytes, names: Sequence[bytes], view: View) -> str | None:
    for name in names:
        source = view.source(root + b"/" + name)
        if source is None:
            continue
        try:
            check_file(_text(name), source)
        except CorruptError as error:
            return f"{_text(name)}: {error}"
    return None


def named_paths(placement: Placement, preset: Preset) -> list[bytes]:
    """Return the literal paths (no globs) of a preset's markers and guards for a generation."""
    above = parent(placement.path)
    own = placement.path.rpartition(b"/")[2]
    out = [placement.path + b"/" + guard.encode() for guard in preset.guards if "*" not in guard]
    for signal in preset.close:
        folder = placement.path if signal.on in ("renamed-in", "closed-in") else above
        for name in signal.names:
            if "*" not in name:
                path = name.encode().replace(b"{name}", own)
                out.append(folder + b"/" + path if folder else path)
    return out


def marker_paths(placement: Placement, whole: Set[bytes] = frozenset()) -> list[bytes]:
    """Return the paths whose `Baseline` is to be taken when a save opens, so that a restart can tell new from old.

    What belongs to the save already has none: `whole` are names in it.
    """
    paths = {path for preset in placement.candidates for path in named_paths(placement, preset)}
    return sorted(paths - {placement.path + b"/" + name for name in whole})
