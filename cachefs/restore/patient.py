"""Reads that outlast a bad moment of the network: for commands that move terabytes and have nobody to begin again."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TypeVar

from cachefs import clock
from cachefs.errors import UnavailableError
from cachefs.store.base import Listing, ObjectInfo, StoreReads

TRIES = 6
"""Tries of one read; one that has brought bytes counts as the first."""
PAUSE = 1.0
PAUSE_MOST = 8.0
"""Seconds before the second try, doubled before each further one, and at most."""

T = TypeVar("T")


class PatientReads:
    """A store of which a read that gets no answer, or half of one, is tried again; then UnavailableError. Blocks."""

    def __init__(self, store: StoreReads, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._store = store
        self._sleep = sleep

    def head(self, key: str, version_id: str | None = None) -> ObjectInfo | None:
        return self._patiently(lambda: self._store.head(key, version_id))

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        return self._patiently(lambda: self._store.get(key, version_id))

    def get_range(self, key: str, version_id: str, offset: int, length: int) -> bytes:
        return self._patiently(lambda: self._store.get_range(key, version_id, offset, length))

    def list(self, prefix: str, *, delimiter: str = "") -> Listing:
        return self._patiently(lambda: self._store.list(prefix, delimiter=delimiter))

    def get_stream(self, key: str, version_id: str) -> Iterator[bytes]:
        """See StoreReads. A stream that breaks is read again, and what had come already is left out: it is a version,
        so the bytes are the same.
        """
        done, failures = 0, 0
        while True:
            try:
                with closing(self._rest(key, version_id, done)) as rest:
                    for chunk in rest:
                        yield chunk
                        done, failures = done + len(chunk), 0
                return
            except UnavailableError:
                failures += 1
                if failures == TRIES:
                    raise
                self._pause(failures)

    def _rest(self, key: str, version_id: str, skip: int) -> Generator[bytes]:
        for chunk in self._store.get_stream(key, version_id):
            if skip < len(chunk):
                yield chunk[skip:]
            skip = max(0, skip - len(chunk))

    def _patiently(self, read: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return read()
            except UnavailableError:
                failures += 1
                if failures == TRIES:
                    raise
                self._pause(failures)

    def _pause(self, failures: int) -> None:
        self._sleep(clock.jitter(min(PAUSE * 2 ** (failures - 1), PAUSE_MOST)))
