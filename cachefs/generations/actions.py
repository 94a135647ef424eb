"""What the detector tells its caller (actions), and what it may ask about the visible tree (`View`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import msgspec

from cachefs.formats.records import Baseline
from cachefs.generations.completeness import Source
from cachefs.generations.placement import Placement


class View(Protocol):
    """The visible tree as it is now. Paths are relative to the mount root. No method raises: None is "not there". To
    read a source may raise CorruptError or UnreadableError.
    """

    def source(self, path: bytes) -> Source | None:
        """Return the bytes of a regular file."""

    def names(self, path: bytes) -> Sequence[bytes]:
        """Return every file and link below a directory, recursively, relative to it."""

    def readlink(self, path: bytes) -> bytes | None:
        """Return the target of a symbolic link."""

    def written(self, path: bytes) -> Sequence[bytes]:
        """Return the files at or below a path that somebody has open for writing, whether the mount knows it or not."""

    def identity(self, path: bytes) -> Baseline | None:
        """Return what stands under a path, links not followed. Only asked by `Detector.resume`."""


class OpenSave(msgspec.Struct, frozen=True):
    """The first change of a save: a new attempt begins. Take baselines of `marker_paths(placement, whole)`.

    `whole` are the names that came into the save as they are, so that they are no markers of an earlier one.
    """

    placement: Placement
    whole: Set[bytes] = frozenset()


class CloseSave(msgspec.Struct, frozen=True):
    """The file set of the save is complete and nobody has a file of it open for writing: pin it now.

    `signal` says in words what closed it. `step` is None when no name held one: the caller assigns it.
    """

    path: bytes
    preset: str
    signal: str
    step: int | None
    strength: str = "A"


class CancelSave(msgspec.Struct, frozen=True):
    """An open save is no more: removed, moved out of sight, or superseded by a new one (an `OpenSave` follows)."""

    path: bytes
    reason: str


class AbandonSave(msgspec.Struct, frozen=True):
    """The close signal came, but files stayed open for writing past the deadline; `reason` names them."""

    path: bytes
    reason: str


class Held(msgspec.Struct, frozen=True):
    """A save is complete but for files that are written past the mount: tell (`Kind.CLOSED`) when each is closed."""

    paths: Sequence[bytes]


class MoveSave(msgspec.Struct, frozen=True):
    """The directory (or file) of an open save has a new name; the save goes on under `placement`.

    `whole` are the names that were written in it, see `OpenSave`.
    """

    old: bytes
    placement: Placement
    whole: Set[bytes] = frozenset()


class Proved(msgspec.Struct, frozen=True):
    """Signals came that nothing takes back, in words by preset, and the save does not close yet. A later process must
    know them: what carried them may say something else by then. Told again when the save moves.

    `torn`: a file was removed after its signal, so that a later process must not take the save for complete.
    """

    path: bytes
    signals: Mapping[str, str]
    torn: bool = False


class Incomplete(msgspec.Struct, frozen=True):
    """A single file's last writer went away and left a torn file. The save stays open until it is rewritten or
    removed."""

    path: bytes
    why: str


class Loose(msgspec.Struct, frozen=True):
    """A file, link or directory outside every generation was finished, moved or removed: mirror what is there now."""

    path: bytes


Action = OpenSave | CloseSave | Held | CancelSave | AbandonSave | MoveSave | Proved | Incomplete | Loose


class ResumedSave(msgspec.Struct, frozen=True):
    """A save the journal knows after a restart. `baselines` are those taken when it was opened, by path in the mount.

    `closed` saves are only remembered, so that a change in them is told from a new save. `opened_as` is the temporary
    name under which it was written, as a path, b"" for none. `written` are the files, by path in the mount, that a
    process which outlived the mount still writes; it is told when they are closed. `signals`, `torn`: as in `Proved`.
    """

    path: bytes
    baselines: Mapping[bytes, Baseline | None] = {}
    closed: bool = False
    opened_as: bytes = b""
    written: Sequence[bytes] = ()
    signals: Mapping[str, str] = {}
    torn: bool = False
