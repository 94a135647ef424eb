"""Canonical JSON for the bucket: two encodings of equal values are equal bytes; decoding is strict."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from cachefs.errors import CorruptError

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder(order="sorted")


def encode(value: msgspec.Struct) -> bytes:
    """Return the canonical JSON bytes of a format struct (sorted keys, no spaces, one trailing newline)."""
    return _encoder.encode(value) + b"\n"


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Decode `data` as `kind`; unknown fields, wrong types and unknown versions are refused.

    Raises CorruptError that names `where` (the key or file the bytes came from).
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{where} is not a valid {kind.__name__}: {error}",
            hint="written by a newer cachefs, or damaged; nothing was changed",
        ) from error
