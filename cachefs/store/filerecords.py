"""The versions of one key in its directory: `<number>.json` is the record, `<number>-<random>` holds the bytes."""

from __future__ import annotations

import os
import re

import msgspec

from cachefs.errors import CorruptError, UnavailableError
from cachefs.store.base import ObjectInfo
from cachefs.store.files import link_exclusive, sync_directory, unlink

_RECORD = re.compile(r"(\d{8,})\.json")
_VERSION_ID = re.compile(r"(\d{8,})-[0-9a-f]{12}")
_TRIES = 16


class Record(msgspec.Struct, frozen=True):
    """One version. `size` in bytes, `sha256` hex as in ObjectInfo.checksum; a delete marker has no bytes."""

    key: str
    version_id: str
    size: int = 0
    sha256: str | None = None
    metadata: dict[str, str] = {}
    marker: bool = False

    @property
    def etag(self) -> str:
        """Return the ETag: the version id, which never comes twice."""
        return f'"{self.version_id}"'

    @property
    def number(self) -> int:
        """Return the place in the history of the key, from 1."""
        return int(self.version_id.partition("-")[0])

    def info(self) -> ObjectInfo:
        """Return the version as the store protocol shows it."""
        return ObjectInfo(self.key, self.version_id, self.etag, self.size, self.metadata, self.sha256)

    def encode(self) -> bytes:
        """Return the bytes of the record file, for people too."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def record_path(directory: str, number: int) -> str:
    """Return the path of a record."""
    return os.path.join(directory, f"{number:08d}.json")


def load(path: str) -> Record | None:
    """Read a record; None when there is none. Raises CorruptError."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{path} is not a version record: {error}") from error


def numbers(directory: str) -> list[int]:
    """Return the numbers of all versions, in no order."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(match[1]) for match in map(_RECORD.fullmatch, names) if match]


def current(directory: str) -> tuple[int, Record | None]:
    """Return the highest number in use and its record, or (0, None)."""
    for _ in range(_TRIES):
        number = max(numbers(directory), default=0)
        record = load(record_path(directory, number)) if number else None
        if record is not None or number == 0:
            return number, record  # otherwise it was deleted since the directory was read
    raise UnavailableError(f"{directory} does not settle", reason="stale")


def find(directory: str, version_id: str) -> Record | None:
    """Return the record of a version; None when it is gone or the id is none of ours."""
    match = _VERSION_ID.fullmatch(version_id)
    if match is None:
        return None
    record = load(record_path(directory, int(match[1])))
    return record if record and record.version_id == version_id else None


def link_version(directory: str, record: Record, body: str | None, draft: str) -> bool:
    """Put a version in place, durably; return False, with nothing changed, when its number is taken.

    The record appears last and only after the bytes are durable under their name: it is the commit.
    """
    path = os.path.join(directory, record.version_id)
    if body is not None:
        os.link(body, path)
        sync_directory(directory)
    if not link_exclusive(draft, record_path(directory, record.number)):
        unlink(path)
        return False
    sync_directory(directory)
    return True
