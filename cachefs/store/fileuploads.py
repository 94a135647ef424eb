"""Multipart uploads of the directory store: one directory for each, with the parts as files (see directory.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from cachefs import clock
from cachefs.errors import BadPart, NoSuchUpload
from cachefs.store.base import Buffer, PartInfo, UploadInfo
from cachefs.store.digests import verify
from cachefs.store.files import make_directories, sync_directory, unlink, write_file

_PART = re.compile(r"(\d{5})-([0-9a-f]{64})")
_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")


class Upload(msgspec.Struct, frozen=True):
    """The file `upload`."""

    key: str
    metadata: dict[str, str] = {}


class Uploads:
    """The uploads below `<own>/uploads`. `work` gives a private directory on the same file system."""

    def __init__(self, own: str, work: Callable[[], AbstractContextManager[str]]) -> None:
        self._own = own
        self._base = os.path.join(own, "uploads")
        self._work = work

    def create(self, key: str, metadata: Mapping[str, str]) -> str:
        """Start an upload; it appears with everything in it, or not at all."""
        upload_id = clock.new_id()
        with self._work() as work:
            draft = os.path.join(work, "new")
            os.mkdir(draft)
            write_file(os.path.join(draft, "upload"), msgspec.json.encode(Upload(key, dict(metadata))))
            sync_directory(draft)
            make_directories(self._own, "uploads")
            os.rename(draft, self._path(upload_id))
            sync_directory(self._base)
        return upload_id

    def require(self, key: str, upload_id: str) -> Upload:
        """Return an upload. Raises NoSuchUpload."""
        upload = self._load(upload_id)
        if upload is None or upload.key != key:
            raise NoSuchUpload(f"no upload {upload_id} of {key}")
        return upload

    def add(self, key: str, upload_id: str, number: int, body: Buffer, sha256: bytes) -> str:
        """Store a part, in place of an earlier one of that number. Raises NoSuchUpload, BadPart."""
        self.require(key, upload_id)
        verify(body, sha256, f"part {number} of {key}")
        name = f"{number:05d}-{sha256.hex()}"
        directory = self._path(upload_id)
        with self._work() as work:
            draft = os.path.join(work, "part")
            write_file(draft, body)
            try:
                os.rename(draft, os.path.join(directory, name))
                sync_directory(directory)
                older = [other for other in os.listdir(directory) if other.startswith(name[:6]) and other != name]
            except FileNotFoundError as error:
                raise NoSuchUpload(f"upload {upload_id} of {key} is gone") from error
            for other in older:
                unlink(os.path.join(directory, other))
        return _etag(sha256)

    def parts(self, key: str, upload_id: str) -> list[PartInfo]:
        """Return the parts, by number. Raises NoSuchUpload."""
        self.require(key, upload_id)
        directory = self._path(upload_id)
        newest: dict[int, tuple[int, PartInfo]] = {}  # two parts of one number: the process died while replacing it
        for match in filter(None, map(_PART.fullmatch, os.listdir(directory))):
            status = os.stat(os.path.join(directory, match[0]))
            digest = bytes.fromhex(match[2])
            part = PartInfo(int(match[1]), _etag(digest), status.st_size, digest)
            newest[part.number] = max(newest.get(part.number, (-1, part)), (status.st_mtime_ns, part), key=_first)
        return [newest[number][1] for number in sorted(newest)]

    def chosen(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> tuple[Sequence[str], Sequence[bytes], int]:
        """Return the files, digests and total size of the parts asked for. Raises BadPart, NoSuchUpload."""
        if not parts or [part.number for part in parts] != list(range(1, len(parts) + 1)):
            raise BadPart(f"{key}: part numbers must be consecutive from 1")
        held = {part.number: part for part in self.parts(key, upload_id)}
        files: list[str] = []
        digests: list[bytes] = []
        for asked in parts:
            part = held.get(asked.number)
            if part is None or part.sha256 is None or part.etag != asked.etag or part.size != asked.size:
                raise BadPart(f"{key}: part {asked.number} is not the one uploaded")
            if asked.sha256 not in (None, part.sha256):
                raise BadPart(f"{key}: part {asked.number} has another SHA-256")
            files.append(os.path.join(self._path(upload_id), f"{part.number:05d}-{part.sha256.hex()}"))
            digests.append(part.sha256)
        return files, digests, sum(part.size for part in parts)

    def remove(self, upload_id: str) -> None:
        """Remove an upload in one step; unknown ones are fine."""
        if not _UPLOAD_ID.fullmatch(upload_id):
            return
        with self._work() as work:
            try:
                os.rename(self._path(upload_id), os.path.join(work, "old"))
            except FileNotFoundError:
                pass

    def list(self, prefix: str) -> list[UploadInfo]:
        """Return the uploads whose key starts with `prefix`."""
        try:
            names = sorted(os.listdir(self._base))
        except FileNotFoundError:
            return []
        found = []
        for upload_id in names:
            upload = self._load(upload_id)
            if upload is not None and upload.key.startswith(prefix):
                found.append(UploadInfo(upload.key, upload_id, self._initiated(upload_id)))
        return sorted(found, key=lambda info: (info.key, info.upload_id))

    def _initiated(self, upload_id: str) -> float:
        try:
            return os.stat(os.path.join(self._path(upload_id), "upload")).st_mtime
        except FileNotFoundError:
            return 0.0

    def _path(self, upload_id: str) -> str:
        return os.path.join(self._base, upload_id)

    def _load(self, upload_id: str) -> Upload | None:
        if not _UPLOAD_ID.fullmatch(upload_id):
            return None
        try:
            with open(os.path.join(self._path(upload_id), "upload"), "rb") as file:
                return msgspec.json.decode(file.read(), type=Upload)
        except FileNotFoundError:
            return None


def _first(pair: tuple[int, PartInfo]) -> int:
    return pair[0]


def _etag(sha256: bytes) -> str:
    return f'"{sha256.hex()}"'
