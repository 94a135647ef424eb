"""Where in the mount a path belongs: which generation's directory or file it lies in, judged by names alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from cachefs.formats.names import to_text
from cachefs.generations.presets import Preset, is_temporary, matches, step_of


class Placement(msgspec.Struct, frozen=True):
    """A generation's place. `path` is relative to the mount root; `run` and `generation` are its halves in text form.

    `step` is None when the name holds none. `temporary` says that the name is one a preset uses while it writes.
    """

    path: bytes
    run: str
    generation: str
    step: int | None
    kind: Literal["directory", "file"]
    candidates: tuple[Preset, ...]
    temporary: bool = False

    def relative(self, path: bytes) -> bytes:
        """Return `path` relative to the generation's directory; the file's own name when the generation is a file."""
        return path[len(self.path) + 1 :] if self.kind == "directory" else path.rpartition(b"/")[2]


def parent(path: bytes) -> bytes:
    """Return the directory of a path; b"" is the mount root."""
    return path.rpartition(b"/")[0]


class Placer:
    """Places paths under a fixed set of presets. Pure; answers per directory are cached, so a call costs a lookup.

    A name that only a checkpoint has (`step-100`) decides, and the outermost such directory is the generation: what
    lies deeper belongs to it. A directory with any other name becomes one only through a file of a generic preset's
    `evidence` in it, the innermost first. A file outside both is a generation of its own when its name matches. Below a
    directory with a temporary name only the first rule holds, and below one that is a save itself none: what is written
    there is looked at when the directory gets its name.
    """

    def __init__(self, presets: tuple[Preset, ...], default_run: str = "default") -> None:
        self._presets = presets
        self._default_run = default_run
        self._directories = tuple(preset for preset in presets if preset.kind == "directory")
        self._generic = tuple(preset for preset in self._directories if preset.generic)
        self._files = tuple(preset for preset in presets if preset.kind == "file")
        self._in_temporary = lru_cache(maxsize=16384)(is_temporary)
        self._named = lru_cache(maxsize=16384)(self._find_named)
        self._directory = lru_cache(maxsize=16384)(self._make_directory)

    def place(self, path: bytes, *, is_dir: bool = False) -> Placement | None:
        """Return where a changed path belongs, or None when it is a loose file."""
        directory = path if is_dir else parent(path)
        named = self._named(directory)
        if named is not None or is_dir:
            return named
        return self._by_evidence(path) or self._as_file(path)

    def is_loose(self, path: bytes) -> bool:
        """Return whether a file is in no generation, and neither it nor a directory above it has a temporary name."""
        return self.place(path) is None and not self.is_temporary(path)

    def is_temporary(self, path: bytes) -> bool:
        """Return whether a path or a directory above it has a temporary name."""
        return is_temporary(path.rpartition(b"/")[2]) or self._in_temporary(parent(path))

    def directory(self, path: bytes) -> Placement | None:
        """Return the placement of a directory itself, or None when no preset knows its name."""
        return self._directory(path)

    def any(self, path: bytes, *, is_file: bool) -> Placement:
        """Return the placement of a path that somebody says is a generation, also when no preset knows its name."""
        found = self._as_file(path) if is_file else (self._named(path) or self._directory(path))
        return found or self._build(path, None, "file" if is_file else "directory", (), temporary=False)

    def _find_named(self, directory: bytes) -> Placement | None:
        end = -1
        while directory and end < len(directory):
            end = directory.find(b"/", end + 1)
            end = len(directory) if end < 0 else end
            placement = self._directory(directory[:end])
            if placement and any(not preset.generic for preset in placement.candidates):
                return placement
        return None

    def _by_evidence(self, path: bytes) -> Placement | None:
        root = parent(path)
        while root:
            name = root.rpartition(b"/")[2]
            inside = path[len(root) + 1 :]
            for preset in self._generic:
                if not matches(inside, preset.evidence) or not (preset.match(name) or preset.match_temp(name)):
                    continue
                if (found := self._directory(root)) is not None:
                    return found
            root = parent(root)
        return None

    def _as_file(self, path: bytes) -> Placement | None:
        name = path.rpartition(b"/")[2]
        found = [(preset, match) for preset in self._files if (match := preset.match(name))]
        found = [(preset, match) for preset, match in found if not matches(name, preset.temp_names)]
        if not found or self._in_temporary(parent(path)):
            return None
        step = next((step for _, match in found if (step := step_of(match)) is not None), None)
        return self._build(path, step, "file", tuple(preset for preset, _ in found), temporary=False)

    def _make_directory(self, path: bytes) -> Placement | None:
        name = path.rpartition(b"/")[2]
        final = [(preset, match) for preset in self._directories if (match := preset.match(name))]
        temp = [(preset, match) for preset in self._directories if (match := preset.match_temp(name))]
        # A name of the second kind wins: `step100-tmp` also looks like a plain name to a preset that takes any.
        found = temp or final
        if not all(preset.generic for preset, _ in found):
            found = [(preset, match) for preset, match in found if not preset.fallback]
        if self._in_temporary(parent(path)):
            found = [] if self._in_draft(path) else [(preset, match) for preset, match in found if not preset.generic]
        if not found:
            return None
        step = next((step for _, match in found if (step := step_of(match)) is not None), None)
        return self._build(path, step, "directory", tuple(p for p, _ in found), temporary=bool(temp))

    def _in_draft(self, path: bytes) -> bool:
        """Return whether a directory above one is a save that waits for its name: it is hidden, or is called like a
        checkpoint but for the ending. `exp-tmp/step-5` is none: somebody may call the directory of a run so.
        """
        for part in parent(path).split(b"/"):
            if is_temporary(part):
                name = part.removesuffix(b"tmp")[:-1]
                named = any(not preset.generic and preset.match(name) for preset in self._directories)
                if named or part.startswith(b"."):
                    return True
        return False

    def _build(
        self,
        path: bytes,
        step: int | None,
        kind: Literal["directory", "file"],
        candidates: tuple[Preset, ...],
        *,
        temporary: bool,
    ) -> Placement:
        above, _, name = path.rpartition(b"/")
        run = to_text(above) if above else self._default_run
        return Placement(path, run, to_text(name), step, kind, candidates, temporary)
