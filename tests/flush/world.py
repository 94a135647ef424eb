"""A node with real staging, pins and journal, and a flusher on a store that can fail."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio
import xxhash

from cachefs.flush.uploader import Flusher, FlushSettings
from cachefs.formats.keys import Keys
from cachefs.formats.records import AttemptRecord, Identity, RunRecord, ShardRecord, State
from cachefs.journal import Journal, Txn
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.store.hop import Hop, Inline, Threads
from cachefs.store.memory import MemoryStore
from tests.flush import records
from tests.store.faults import Crash, FaultyStore

T = TypeVar("T")

PART = 100
MEMBER = "node0"


def content(size: int, seed: int = 0) -> bytes:
    return bytes((i * 7 + i // 251 + seed) % 256 for i in range(size))


def xxh3(body: bytes) -> str:
    return xxhash.xxh3_128(body).hexdigest()


class InlineJournal(Journal):
    """Commits in place: with it and Inline hops nothing runs beside the clock that jumps."""

    async def write(self, fn: Callable[[Txn], T]) -> T:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        return self.write_now(fn)


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.keys = Keys("")
        self.settings = FlushSettings(
            member=MEMBER, part_size=PART, upload_concurrency=4, tick=5, backoff_base=1, backoff_cap=30
        )
        self.threads = False
        self.bodies: dict[str, bytes] = {}
        self.hooks = 0
        self._serial = 0
        self.open()

    def open(self) -> None:
        self.staging = Staging(self.root)
        self.pins = Pins(self.staging)
        self.journal = (Journal if self.threads else InlineJournal)(self.staging.journal)
        hop: Hop = Threads(8) if self.threads else Inline()
        self.flusher = Flusher(
            self.journal, self.store, self.keys, hop, self.pins, self.settings, on_flushed=self._hook
        )

    def use_threads(self) -> None:
        """Work in threads, as the daemon does; for tests on the real clock."""
        self.threads = True
        self.restart()

    def close(self) -> None:
        self.journal.close()
        self.staging.close()

    def restart(self) -> None:
        """What a killed daemon leaves, opened by the next one; the store sends no faults any more."""
        self.close()
        self.store = FaultyStore(self.memory)
        self.open()

    def _hook(self) -> None:
        self.hooks += 1

    # saves

    def save(
        self, name: str, files: dict[str, bytes], *, run: str = "run", early: bool = False, **changes: Any
    ) -> None:
        """Stage a closed save (or with `early`, an open one of which these files are pinned)."""
        self._serial += 1
        if early:
            changes = {"state": State.OPEN, "closed_at": None, **changes}
        record = records.attempt(name, run=run, serial=self._serial, **changes)
        shards = [self._shard(record, path, body, early) for path, body in files.items()]

        def write(txn: Any) -> None:
            txn.runs.put(run, RunRecord(run=run, epoch=1, owner="me"))
            txn.attempts.put(name, record)
            for shard in shards:
                txn.put_shard(shard)

        self.journal.write_now(write)

    def _shard(self, attempt: AttemptRecord, path: str, body: bytes, early: bool) -> ShardRecord:
        file = self.staging.tree / attempt.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
        shard = f"{attempt.attempt}-{path}"
        fd = os.open(file.parent, os.O_RDONLY)
        stat = self.pins.add(attempt.attempt, shard, fd, file.name.encode())
        os.close(fd)
        key = self.keys.shard(attempt.run, attempt.attempt, MEMBER, shard, path)
        self.bodies[key] = body
        identity = Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns, None if early else xxh3(body))
        return ShardRecord(attempt.attempt, shard, (path,), identity, 0o644, key, early=early)

    def file(self, attempt: str, path: str) -> Path:
        record = self.attempt(attempt)
        return self.staging.tree / record.path / path

    def attempt(self, name: str) -> AttemptRecord:
        with self.journal.read() as txn:
            record = txn.attempts.get(name)
        assert record is not None
        return record

    def shard(self, attempt: str, path: str) -> ShardRecord:
        with self.journal.read() as txn:
            record = txn.shard(attempt, f"{attempt}-{path}")
        assert record is not None
        return record

    def change(self, name: str, **changes: Any) -> None:
        self.journal.write_now(lambda txn: txn.update_attempt(name, **changes))
        self.flusher.wake()

    def change_shard(self, attempt: str, path: str, **changes: Any) -> None:
        record = msgspec.structs.replace(self.shard(attempt, path), **changes)
        self.journal.write_now(lambda txn: txn.put_shard(record))

    # running

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.flusher.run)
            yield
            nursery.cancel_scope.cancel()

    async def until(self, condition: Callable[[], bool], seconds: float = 3600) -> None:
        with trio.fail_after(seconds):
            while not condition():  # noqa: ASYNC110 - conditions on the journal; the clock jumps
                await trio.sleep(0.25)

    async def drained(self, seconds: float = math.inf) -> None:
        async with self.running():
            with trio.fail_after(seconds):
                await self.flusher.drain()

    async def crashes(self) -> bool:
        """Flush until everything is done or the store kills the process; return whether it did."""
        try:
            await self.drained(600)
        except BaseExceptionGroup as group:
            crashed, rest = group.split(Crash)
            assert crashed is not None
            assert rest is None, rest
            return True
        return False

    # what must be true at the end

    def check(self, *names: str) -> None:
        """Every save is flushed, and each of its pins names the one version of its key, with the staged bytes."""
        for name in names:
            assert self.attempt(name).state is State.FLUSHED
            with self.journal.read() as txn:
                shards = txn.shards_of(name)
                assert [part for shard in shards for part in txn.parts_of(shard)] == []
            for shard in shards:
                assert shard.pin is not None
                assert (shard.upload_id, shard.error) == ("", "")
                assert [v.version_id for v in self.memory.list_versions(shard.key)] == [shard.pin.version_id]
                found = self.memory.get(shard.key, shard.pin.version_id)
                assert found is not None
                assert found[1] == self.bodies[shard.key]
                assert (found[0].size, found[0].checksum) == (shard.pin.size, shard.pin.sha256)
                assert shard.identity.xxh3 == xxh3(found[1])
        assert self.memory.list_multiparts("") == []

    def count(self, operation: str) -> int:
        return self.store.operations().count(operation)
