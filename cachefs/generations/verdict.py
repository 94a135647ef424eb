"""The verdict over one open save: close, abandon, or wait for what and until when."""

from __future__ import annotations

from collections.abc import Sequence

from cachefs.errors import CorruptError, UnreadableError
from cachefs.formats.names import to_text
from cachefs.generations import signals
from cachefs.generations.actions import AbandonSave, CloseSave, View
from cachefs.generations.completeness import check_file, check_zip, is_zip
from cachefs.generations.presets import Preset, Signal
from cachefs.generations.saves import AGAIN, NO_SIGNAL, Save, Seen

LEGACY = "last writer closed, then quiet"
"""The signal of a single file whose format has no end mark."""
SINGLE_FILE = "file"
"""Under which name `Save.seen` holds the signal of a single file."""
UNKNOWN = (
    "no preset in use knows these files yet: if the save is complete, close it (cachefs close), or add `plain` to the"
    " presets"
)
"""What a save waits for whose directory has a name that presets know, but no file that one of them proves itself by."""
TORN = "a file of it was removed after the close signal; what is written in it now begins another save"
"""Why a save does not close that an earlier process has left so: it was about to be deleted, perhaps."""
MANUAL = Preset(name="manual", pattern=".*", close=(Signal("quiet"),), strength="D")
"""The preset of a generation that was closed by hand while no other preset applied to it."""


def judge(
    save: Save, open_paths: Sequence[bytes], now: float, view: View, *, alone: bool, open_deadline: float
) -> CloseSave | AbandonSave | None:
    """Return what is to be done with a save now; None leaves `save.wake` and `save.waiting` saying what comes next.

    Never closes a save with open paths. Of the presets whose signal came the first that holds closes it.
    """
    save.wake = None
    found = _signalled(save)
    if not found:
        save.held = None
        return None
    if open_paths:
        since = save.held = now if save.held is None else save.held
        names = ", ".join(to_text(path) for path in sorted(open_paths)[:5])
        more = f" and {len(open_paths) - 5} more" if len(open_paths) > 5 else ""
        save.waiting = f"{names}{more} to be closed"
        if now >= since + open_deadline:
            return AbandonSave(
                save.placement.path,
                f"{found[0][1].label}, but still open for writing {now - since:.0f} s later: {names}{more}",
            )
        save.wake = since + open_deadline
        return None
    save.held = None
    for preset, seen in found:
        if save.by_hand is None:
            legacy = seen.label == LEGACY
            ready = save.changed + preset.quiet if legacy else signals.ready_at(save, preset, seen, open_deadline)
            if now < ready:
                save.waiting = f"{preset.name}: quiet after: {seen.label}"
                save.wake = ready if save.wake is None else min(save.wake, ready)
                continue
            if save.placement.kind == "directory":
                try:
                    reason = signals.unmet(save, preset, seen, view, alone=alone)
                except UnreadableError as error:
                    reason = str(error)
                    save.wake = now + AGAIN if save.wake is None else min(save.wake, now + AGAIN)
                if reason is not None:
                    save.waiting = f"{preset.name}: {reason}"
                    continue
        strength = "A" if save.by_hand is not None else preset.strength
        return CloseSave(save.placement.path, preset.name, seen.label, save.placement.step, strength)
    return None


def waits_for(save: Save) -> str:
    """Return in words what an open save waits for, and whether it waits in vain. Looks at the files only if they have
    changed: it is asked all the time.
    """
    if save.waiting != NO_SIGNAL or not save.written or save.placement.kind == "file":
        return save.waiting
    if save.known is None:
        save.known = bool(signals.applicable(save))
    return save.waiting if save.known else UNKNOWN


def file_signal(path: bytes, view: View, *, renamed: bool) -> str | None:
    """Return the signal of a single file that nobody writes any more; None when it is not there.

    Raises CorruptError for a torn file: empty, a zip without its end, a safetensors file of the wrong size; and
    UnreadableError.
    """
    source = view.source(path)
    if source is None:
        return None
    if source.size == 0:
        raise CorruptError("empty")
    known = check_file(to_text(path.rpartition(b"/")[2]), source)
    if known is None and is_zip(source):
        check_zip(source)
        known = "zip"
    if known is None:
        return LEGACY
    return f"{'renamed into place' if renamed else 'last writer closed'}, {known} complete"


def has_bytes(path: bytes, view: View) -> bool:
    """Return whether a file, or one below a directory, is not empty."""
    files = (view.source(one) for one in (path, *(path + b"/" + name for name in view.names(path))))
    return any(source.size for source in files if source is not None)


def _signalled(save: Save) -> list[tuple[Preset, Seen]]:
    """Return the presets whose close signal came and that may act on it, in order."""
    placement = save.placement
    if save.by_hand is not None:
        preset = next(iter(signals.applicable(save)), MANUAL)
        return [(preset, Seen(save.why, placement.path, save.by_hand))]
    if placement.kind == "file":
        seen = save.seen.get(SINGLE_FILE)
        preset = placement.candidates[0] if placement.candidates else MANUAL
        return [(preset, seen)] if seen else []
    if save.torn:
        save.waiting = TORN
        return []
    if placement.temporary:
        save.waiting = "the directory to get its final name"
        return []
    for preset in placement.candidates:
        if any(signal.on == "quiet" for signal in preset.close):
            save.seen.setdefault(preset.name, Seen("quiet", placement.path, save.changed))
    # Which presets apply takes a look at every name, so it is asked only after a signal.
    applicable = signals.applicable(save) if save.seen else []
    out = [(preset, save.seen[preset.name]) for preset in applicable if preset.name in save.seen]
    if not out:
        save.waiting = NO_SIGNAL
    return out
