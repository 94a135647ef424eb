"""Presets: what each framework writes, and which event completes one save of it.

A preset is plain data, so that a user can describe an own format in the config (`[[preset]]`) with the same fields.
How the fields are judged is in `signals.py`; where a generation lies is in `placement.py`.

Names are globs in which `*` stays inside one path component and `**` crosses `/`. Directory names are matched as a
whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from cachefs.errors import InvalidError

SignalKind = Literal[
    "renamed-in", "closed-in", "parent-file", "renamed-dir", "marker-removed", "symlink", "next-save", "quiet"
]
Strength = Literal["A", "B", "C", "D"]
Expected = Literal["dcp", "index", "names", "formats"]

TEMP_NAMES = (
    "**/.tmp*", "**/*.tmp", "**/*-tmp", "**/*.__lock", "**/*.dirty.pt", "**/*.orbax-checkpoint-tmp*",
    "**/.*.restoring-*",
)  # fmt: skip
"""Files and directories that are never published and forbid a quiet close while they exist. The last one is where a
restore writes (restore/files.py).
"""


class Signal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One event that completes a save. What `names` mean depends on `on`:

    - `renamed-in`: a file was renamed to one of `names` in the generation (DCP `.metadata`).
    - `closed-in`: one of `names` in the generation was written and closed in this save, or renamed in.
    - `parent-file`: one of `names` beside the generation was written, and its text is the generation's name, its step
      as a decimal number, or the path of either. Read when it is closed: trackers are rewritten in place and empty for
      a moment.
    - `symlink`: one of `names` beside the generation became a link to it.
    - `renamed-dir`: the directory was renamed from one of the preset's `temp` names to its own.
    - `marker-removed`: one of `names` beside the generation was removed (`{name}` is the generation's name).
    - `next-save`: another save of a higher step started in the run (proves in synchronous frameworks that this
      returned).
    - `quiet`: nothing but silence; only for strength D.
    """

    on: SignalKind
    names: tuple[str, ...] = ()


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to write a save. Seconds are monotonic time; every list may be empty.

    - `pattern`: regular expression for the whole name of the generation's directory (or file); group `step` if it has
      one.
    - `close`: any one of these completes the save, under the conditions below.
    - `strength`: A closes at once; B `settle` seconds after the signal and the last change; C and D after `quiet`
      seconds without a change, with no temp name left and the expected set there.
    - `guards`: files that must have been written in this save as well. `blocked_by`: files that must not exist.
    - `expected`: `dcp` (every directory with shards has a `.metadata` of this save, and what it lists exists), `index`
      (files in a `weight_map` exist), `names` (`-of-N` and `world_size_W_rank_R` sets are whole), `formats` (zip end
      records and safetensors sizes hold; strengths C and D).
    - `rank_files`: names with `{rank}`, all needed for ranks 0 to `ranks`-1 when `ranks` is set.
    - `evidence`: the preset applies once a file of this save matches one of these (empty: its name is proof enough).
    - `generic`: the directory's name proves nothing: it is no generation before a file of `evidence` appears directly
      there, and any preset that applies and stands earlier in the list goes first.
    - `fallback`: for a generic preset: it has no say in a directory whose name another preset knows, and its save gives
      way to a checkpoint that begins below it.
    - `temp`: names the directory has while it is written (regular expression; group `step`); no close under such a
      name.
    - `trackers`: files and links beside the generation that name it; recorded in the manifest.
    """

    name: str
    pattern: str
    close: tuple[Signal, ...] = ()
    kind: Literal["directory", "file"] = "directory"
    strength: Strength = "A"
    guards: tuple[str, ...] = ()
    blocked_by: tuple[str, ...] = ()
    expected: tuple[Expected, ...] = ()
    rank_files: tuple[str, ...] = ()
    ranks: int | None = None
    evidence: tuple[str, ...] = ()
    generic: bool = False
    fallback: bool = False
    temp: str = ""
    temp_names: tuple[str, ...] = TEMP_NAMES
    settle: float = 5.0
    quiet: float = 30.0
    trackers: tuple[str, ...] = ()

    def match(self, name: bytes) -> re.Match[bytes] | None:
        """Return the match of the whole of a directory or file name."""
        return _regex(self.pattern).fullmatch(name)

    def match_temp(self, name: bytes) -> re.Match[bytes] | None:
        """Return the match of a name the generation has only while it is written."""
        return _regex(self.temp).fullmatch(name) if self.temp else None


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), re.DOTALL)


@lru_cache(maxsize=4096)
def _globs(patterns: tuple[str, ...]) -> re.Pattern[bytes]:
    """Return one expression for a path that matches any of the globs."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    each = [
        "".join(tokens.get(token, re.escape(token)) for token in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
        for pattern in patterns
    ]
    return re.compile("|".join(each).encode(), re.DOTALL)


def matches(path: bytes, globs: Sequence[str]) -> bool:
    """Return whether a path relative to the generation matches one of the globs."""
    return bool(globs) and _globs(tuple(globs)).fullmatch(path) is not None


def is_temporary(path: bytes, globs: Sequence[str] = TEMP_NAMES) -> bool:
    """Return whether any component of a path is a temporary name."""
    return any(matches(part, globs) for part in path.split(b"/"))


def step_of(match: re.Match[bytes]) -> int | None:
    """Return the number in the group `step`, or None when the pattern or this name has none."""
    text = match.groupdict().get("step")
    return int(text) if text and text.isdigit() and len(text) <= 18 else None


def check(preset: Preset) -> Preset:
    """Return the preset if its fields make sense together. Raises InvalidError that names the preset and the field."""
    where = f"preset {preset.name!r}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", preset.name):
        raise InvalidError(f"{where}: name must be lower-case letters, digits, dots and dashes")
    for field, pattern in (("pattern", preset.pattern), ("temp", preset.temp)):
        try:
            _regex(pattern)
        except re.error as error:
            raise InvalidError(f"{where}: {field} is not a regular expression: {error}") from error
    if not preset.pattern:
        raise InvalidError(f"{where}: pattern is empty")
    if preset.kind == "directory" and not preset.close:
        raise InvalidError(f"{where}: close is empty", hint="say which event completes a save")
    if preset.kind == "file" and (preset.close or preset.guards or preset.generic):
        raise InvalidError(f"{where}: a file closes by itself: close, guards and generic are for directories")
    for signal in preset.close:
        if signal.on in ("renamed-dir", "quiet", "next-save") and signal.names:
            raise InvalidError(f"{where}: close on {signal.on!r} takes no names")
        if signal.on not in ("renamed-dir", "quiet", "next-save") and not signal.names:
            raise InvalidError(f"{where}: close on {signal.on!r} needs names")
        if signal.on == "renamed-dir" and not preset.temp:
            raise InvalidError(f"{where}: close on 'renamed-dir' needs temp, the name before the rename")
        if signal.on == "quiet" and preset.strength != "D":
            raise InvalidError(f"{where}: close on 'quiet' is strength D")
    if preset.generic and not preset.evidence:
        raise InvalidError(f"{where}: a generic preset needs evidence")
    if preset.fallback and not preset.generic:
        raise InvalidError(f"{where}: only a generic preset can be a fallback")
    if not (0 <= preset.settle <= 86400 and 0 <= preset.quiet <= 86400):
        raise InvalidError(f"{where}: settle and quiet are seconds between 0 and 86400")
    if preset.strength in "CD" and preset.kind == "directory" and preset.quiet == 0:
        raise InvalidError(f"{where}: strength {preset.strength} needs a quiet time")
    if preset.ranks is not None and not 1 <= preset.ranks <= 1_000_000:
        raise InvalidError(f"{where}: ranks must be at least 1")
    if any("{rank}" not in name for name in preset.rank_files):
        raise InvalidError(f"{where}: every name of rank_files holds {{rank}}")
    return preset


def from_config(tables: Iterable[dict[str, Any]]) -> tuple[Preset, ...]:
    """Return the presets of the config's `[[preset]]` tables.

    Raises InvalidError for unknown keys, wrong types, values that make no sense, and a name given twice.
    """
    out: dict[str, Preset] = {}
    for number, table in enumerate(tables, 1):
        try:
            preset = check(msgspec.convert(table, Preset))
        except msgspec.ValidationError as error:
            raise InvalidError(f"[[preset]] number {number} ({table.get('name', 'no name')}): {error}") from error
        if preset.name in out:
            raise InvalidError(f"preset {preset.name!r} is defined twice")
        out[preset.name] = preset
    return tuple(out.values())
