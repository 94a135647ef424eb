"""What the text of one value means: sizes, durations, directories, stores, addresses.

Every function raises InvalidError, which says what would be right; who called it adds the key and where the value came
from (load.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from cachefs.errors import CorruptError, InvalidError
from cachefs.formats.names import checked_path

MIB: Final = 1024**2
GIB: Final = 1024**3
_BYTES: Final = {"": 1, "b": 1} | {
    f"{letter}{tail}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for tail, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {"bytes": _BYTES, "seconds": _SECONDS}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def quantity(text: str, unit: str) -> float:
    """Return a text like `64MiB` or `10m` in its unit, `bytes` (rounded to whole ones) or `seconds`."""
    match = _QUANTITY.fullmatch(text)
    scale = _UNITS[unit].get(match[2].lower()) if match else None
    if match is None or scale is None:
        example = '"64MiB"' if unit == "bytes" else '"90s", "10m" or "2h"'
        raise InvalidError(f"must be a number of {unit}, or text like {example}")
    amount = float(match[1]) * scale
    return round(amount) if unit == "bytes" else amount


def with_unit(amount: float, unit: str) -> str:
    """Return bytes in whole MiB or GiB, or seconds, as one would write them."""
    if unit == "bytes":
        return f"{amount // GIB:g}GiB" if amount % GIB == 0 else f"{amount // MIB:g}MiB"
    return f"{amount:g}s"


def check_bounds(amount: float, unit: str, bounds: msgspec.Meta) -> None:
    """Refuse an amount outside its bounds, and name them with units."""
    least, most = bounds.ge or 0, bounds.le
    if not amount >= least:
        raise InvalidError(f"must be at least {with_unit(least, unit)}")
    if most is not None and amount > most:
        raise InvalidError(f"must be at most {with_unit(most, unit)}")


def absolute(raw: str | Path, base: Path) -> Path:
    """Return a directory as an absolute path; a relative one is relative to `base`, `~` is the user's home."""
    text = os.path.expanduser(raw)
    if not text.strip() or "\0" in text:
        raise InvalidError("must name a directory")
    return Path(os.path.abspath(base / text))


class Location(msgspec.Struct, frozen=True):
    """Where the store is. `path` for a directory store; `bucket` and `prefix` (no slashes around it) for S3."""

    scheme: Literal["file", "s3"]
    path: Path | None = None
    bucket: str = ""
    prefix: str = ""


def location(store: str) -> Location:
    """Return where a store URL points. Raises InvalidError."""
    scheme, separator, rest = store.partition("://")
    if scheme == "file" and separator:
        # Taken literally, not percent-decoded: people write file://$PWD/store.
        if not rest.startswith("/") or "\0" in rest:
            raise InvalidError("a directory store is file:// and an absolute path, like file:///data/checkpoints")
        return Location(scheme="file", path=Path(os.path.abspath(rest)))
    if scheme == "s3" and separator:
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket):
            raise InvalidError("an S3 store is s3://bucket/prefix; credentials come from the usual AWS settings")
        if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
            raise InvalidError("the prefix must not hold empty, '.' or '..' components")
        return Location(scheme="s3", bucket=bucket, prefix=prefix)
    raise InvalidError("must be file:///absolute/directory or s3://bucket/prefix")


def address(metrics: str) -> tuple[str, int] | None:
    """Return the host and port of HOST:PORT, None for `off`."""
    if metrics == "off":
        return None
    host, separator, port = metrics.rpartition(":")
    if not separator or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise InvalidError("must be HOST:PORT (port 0 to 65535) or off")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_endpoint(url: str) -> None:
    """Refuse what is not the address of an S3 endpoint."""
    if not re.fullmatch(r"https?://[^/@\s?#]+/?", url):
        raise InvalidError("must be http://HOST[:PORT] or https://HOST[:PORT], without credentials or a path")


def check_run(run: str) -> None:
    """Refuse what cannot be the name of a run."""
    try:
        checked_path(run)
    except CorruptError as error:
        raise InvalidError("must be a relative directory path without '.' and '..'") from error
