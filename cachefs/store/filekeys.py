"""Object keys as paths in a directory, reversibly. Pure.

A key's components become nested directories, and the last one, with `@` added, is the directory of the key's versions:
`a/b` lives in `a/b@/`, beside `a/b/` for the keys below it. A component stays as it is, for plain tools, except that
- `%` is written `%25`, a control byte `%XX`, a first `.` `%2E`, a last `@` `%40`, and an empty component `%_`;
- one longer than COMPONENT_MAX bytes is cut into directories of which all but the last end in `%+`.
"""

from __future__ import annotations

import os
import re

from cachefs.errors import InvalidError

COMPONENT_MAX = 200
"""Longest name used for a part of a component, bytes; with escapes and marks it stays below NAME_MAX (255)."""

_CUT = b"%+"
_EMPTY = b"%_"
_VERSIONS = b"@"
_ESCAPED = re.compile(rb"[%\x00-\x1f\x7f]")
_ESCAPE = re.compile(rb"%([0-9A-F]{2})")


def versions_path(key: str) -> str:
    """Return the relative path of a key's versions. Raises InvalidError for one that is empty or not text."""
    try:
        components = key.encode().split(b"/")
    except UnicodeEncodeError as error:
        raise InvalidError(f"object key is not valid text: {key!r}") from error
    if not key:
        raise InvalidError("an object key is not empty")
    names = [name for component in components for name in _names(component)]
    names[-1] += _VERSIONS
    return os.fsdecode(b"/".join(names))


def _names(component: bytes) -> list[bytes]:
    if not component:
        return [_EMPTY]
    text = _ESCAPED.sub(lambda match: b"%%%02X" % match[0][0], component)
    if text.endswith(b"@"):
        text = text[:-1] + b"%40"
    pieces = [text[at : at + COMPONENT_MAX] for at in range(0, len(text), COMPONENT_MAX)]
    pieces = [b"%2E" + piece[1:] if piece.startswith(b".") else piece for piece in pieces]
    return [piece + _CUT for piece in pieces[:-1]] + pieces[-1:]


def is_versions(name: str) -> bool:
    """Return whether a directory of this name holds the versions of a key."""
    return name.endswith("@")


def extend(raw: bytes, name: str) -> bytes:
    """Return the still escaped key text of directory `name` below a directory whose text is `raw` (b"" at the top).

    The text of a plain directory ends with `/`; that of a key's versions is the whole key.
    """
    part = os.fsencode(name)
    if part.endswith(_CUT):
        return raw + part[: -len(_CUT)]
    whole = is_versions(name)
    part = part[:-1] if whole else part
    return raw + (b"" if part == _EMPTY else part) + (b"" if whole else b"/")


def key_bytes(raw: bytes) -> bytes:
    """Return the key, or the beginning of a key, for escaped text from `extend`."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), raw)
