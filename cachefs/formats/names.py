"""File names of any bytes as text, reversibly.

A POSIX name is any bytes but `/` and NUL; JSON, logs and terminals want text. The *text form* keeps valid, printable
UTF-8 as it is and writes every other byte, and the percent sign itself, as `%XX`. It is used in manifests, in the
journal, in status output and in `cachefs ls`. `to_bytes(to_text(p)) == p` for every path.
"""

from __future__ import annotations

import re

from cachefs.errors import CorruptError

NAME_MAX = 255
"""Longest file name, bytes (Linux NAME_MAX)."""
PATH_MAX = 4096
"""Longest relative path accepted from a manifest, bytes (Linux PATH_MAX)."""

_ESCAPE = re.compile(rb"%([0-9A-F]{2})")


def to_text(path: bytes) -> str:
    """Return the text form of a relative path; `/` stays a separator."""
    out: list[str] = []
    for char in path.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            out.append(f"%{code - 0xDC00:02X}")
        elif char == "%" or not (char.isprintable() or char == "/"):
            out.extend(f"%{byte:02X}" for byte in char.encode())
        else:
            out.append(char)
    return "".join(out)


def to_bytes(text: str) -> bytes:
    """Return the bytes of a text form. Any `%` that does not start an escape stays as it is."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), text.encode())


def checked_path(text: str) -> bytes:
    """Return the bytes of a relative path from a manifest, after checking that it cannot leave its directory.

    Raises CorruptError for empty, absolute or over-long paths, NUL bytes, and the components `.` and `..`.
    """
    try:
        path = to_bytes(text)
    except UnicodeEncodeError as error:
        raise CorruptError(f"unsafe path in manifest: {text!r}") from error
    if not path or path.startswith(b"/") or b"\0" in path or len(path) >= PATH_MAX:
        raise CorruptError(f"unsafe path in manifest: {text!r}")
    for part in path.split(b"/"):
        if part in (b"", b".", b"..") or len(part) > NAME_MAX:
            raise CorruptError(f"unsafe path in manifest: {text!r}")
    return path
