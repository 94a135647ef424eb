"""A request body that botocore neither copies nor sends in small pieces."""

from __future__ import annotations

import os

from cachefs.store.base import Buffer


def as_body(data: Buffer) -> bytes | bytearray | View:
    """Return `data` in a form that boto3 accepts: bytes are sent whole as they are, a memoryview needs a wrapper."""
    return View(data) if isinstance(data, memoryview) else data


class View:
    """A memoryview as the seekable file that botocore and urllib3 expect.

    `read` gives all that is left, whatever size is asked: urllib3 asks for 16 KiB at a time, a system call for each.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B") if data.nbytes else memoryview(b"")
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        left = self._data[self._at :]
        self._at = len(self._data)
        return left

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at
