"""A member with a real journal and real pins on disk, a store, and a stand-in for the flusher."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from cachefs.formats.keys import Keys
from cachefs.formats.manifest import Directory, Manifest, Pin, Symlink, Tracker, tree_digest
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord, State
from cachefs.journal import Journal, Txn
from cachefs.publish.ownership import Ownership
from cachefs.publish.publisher import Publisher
from cachefs.publish.sealing import Completeness, no_checks
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.reader import history, load_manifest, read_pointer
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins
from cachefs.store.base import CREATE_ONLY, ObjectStore
from cachefs.store.hop import Hop, Inline
from cachefs.store.memory import MemoryStore
from tests.store.faults import Crash

RUN = "exp/a"
PART = 8
FILES = {"model.bin": b"0123456789abcdefghij", "sub/empty": b"", "sub/small": b"x"}


class Member:
    """One node: its disk under `root` survives `restart`, which stands for a new process."""

    journal_type = Journal

    def __init__(self, root: Path, store: ObjectStore, *, name: str = "n1", keys: Keys | None = None) -> None:
        self.root = root
        self.name = name
        self.store = store
        self.keys = keys or Keys()
        self.staging = Staging(root / name)
        self.pins = Pins(self.staging)
        self.journal = self.journal_type(self.staging.journal)
        self.inner = getattr(store, "inner", store)
        self.flushes = True
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.journal.close()
            self.staging.close()

    def restart(self, store: ObjectStore | None = None) -> Member:
        self.close()
        return Member(self.root, store or self.inner, name=self.name, keys=self.keys)

    # what the mount, the stager and the flusher do

    def save(
        self,
        generation: str,
        step: int,
        files: Mapping[str, bytes] = FILES,
        *,
        run: str = RUN,
        state: State = State.STAGED,
        attempt: str = "",
        **fields: Any,
    ) -> str:
        with self.journal.read() as txn:
            serial = sum(1 for _ in txn.attempts.scan()) + 1
        attempt = attempt or hashlib.sha256(f"{run}/{generation}/{serial}".encode()).hexdigest()[:32]
        record = AttemptRecord(
            attempt=attempt,
            path=f"{run}/{generation}",
            run=run,
            generation=generation,
            kind=fields.pop("kind", "directory"),
            preset="auto",
            step=step,
            opened_at=1000.0 + serial,
            serial=serial,
            state=state,
            signal="marker",
            closed_at=1001.0 + serial if state is not State.OPEN else None,
            **fields,
        )
        shards = [self._pin(record, number, path, data) for number, (path, data) in enumerate(files.items())]

        def put(txn: Txn) -> None:
            txn.attempts.put(attempt, record)
            for shard in shards:
                txn.put_shard(shard)

        self.journal.write_now(put)
        return attempt

    def _pin(self, record: AttemptRecord, number: int, path: str, data: bytes) -> ShardRecord:
        staged = self.staging.tree / record.attempt / path
        staged.parent.mkdir(parents=True, exist_ok=True)
        staged.write_bytes(data)
        fd = os.open(staged.parent, os.O_RDONLY)
        try:
            stat = self.pins.add(record.attempt, f"s{number}", fd, os.fsencode(staged.name))
        finally:
            os.close(fd)
        key = self.keys.shard(record.run, record.attempt, self.name, f"s{number}", path)
        identity = Identity(ino=stat.st_ino, size=len(data), mtime_ns=stat.st_mtime_ns)
        return ShardRecord(
            attempt=record.attempt, shard=f"s{number}", paths=(path,), identity=identity, mode=0o640, key=key
        )

    def flush(self, attempt: str) -> None:
        with self.journal.read() as txn:
            record, shards = txn.attempts.get(attempt), txn.shards_of(attempt)
        assert record is not None
        flushed = [self._upload(record, shard) for shard in shards]

        def put(txn: Txn) -> None:
            for shard in flushed:
                txn.put_shard(shard)
            txn.update_attempt(attempt, state=State.FLUSHED)

        self.journal.write_now(put)

    def flush_open(self) -> None:
        """Flush what an earlier process has opened."""
        with self.journal.read() as txn:
            opened = [a for a in txn.attempts.scan() if a.state is State.STAGED and a.opened_epoch is not None]
        for attempt in opened if self.flushes else []:
            self.flush(attempt.attempt)

    def _upload(self, attempt: AttemptRecord, shard: ShardRecord) -> ShardRecord:
        data = self.pins.path(shard.attempt, shard.shard).read_bytes()
        cut = [data[at : at + PART] for at in range(0, len(data), PART)] or [b""]
        digests = tuple(hashlib.sha256(part).digest() for part in cut)
        key = self.keys.shard(attempt.run, attempt.key, self.name, shard.shard, shard.paths[0])
        found = self.inner.head(key)
        if found is None:
            found = self.inner.put(key, data, condition=CREATE_ONLY)
        pin = Pin(key=key, version_id=found.version_id, size=len(data), sha256=tree_digest(digests))
        return msgspec.structs.replace(shard, key=key, part_size=PART, digests=digests, pin=pin)

    # the publisher

    def ownership(self, *, journal: Any = None, poll: float = 15.0, **given: Any) -> Ownership:
        writes = Writes(self.store, self.keys, Inline())
        return Ownership(journal or self.journal, writes, self.name, poll=poll, **given)

    def publisher(
        self,
        *,
        journal: Any = None,
        pins: Any = None,
        hop: Hop | None = None,
        ownership: Ownership | None = None,
        completeness: Completeness = no_checks,
        changed: Callable[[AttemptRecord], None] = lambda attempt: None,
        **settings: Any,
    ) -> Publisher:
        def seen(attempt: AttemptRecord) -> None:
            opened = attempt.state is State.STAGED and attempt.opened_epoch is not None
            if opened and self.flushes:
                self.flush(attempt.attempt)
            changed(attempt)

        return Publisher(
            journal or self.journal,
            self.store,
            self.keys,
            hop or Inline(),
            pins or self.pins,
            ownership or self.ownership(journal=journal),
            Settings(member=self.name, host="host", **settings),
            completeness=completeness,
            changed=seen,
        )

    async def publish(self, until: Callable[[], bool] | None = None, **given: Any) -> bool:
        """Run a publisher until nothing is left to do (or `until`); return whether it crashed."""
        until = until or self.idle
        done = trio.Event()

        def changed(attempt: AttemptRecord) -> None:
            if until():
                done.set()

        self.flush_open()
        publisher = self.publisher(changed=changed, **given)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(publisher.run)
                if not until():
                    await done.wait()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            _, rest = group.split(Crash)
            if rest:
                raise rest from None
            return True
        except Crash:
            return True
        return False

    def idle(self) -> bool:
        with self.journal.read() as txn:
            return all(attempt.state.final for attempt in txn.attempts.scan())

    # looking

    def attempt(self, attempt: str) -> AttemptRecord:
        with self.journal.read() as txn:
            record = txn.attempts.get(attempt)
        assert record is not None
        return record

    def shards(self, attempt: str) -> list[ShardRecord]:
        with self.journal.read() as txn:
            return txn.shards_of(attempt)

    def generations(self, run: str = RUN) -> list[str]:
        """Return what the pointer has named, oldest first."""
        return [entry.published.generation for entry in history(self.inner, self.keys, run)][::-1]

    def manifest(self, run: str = RUN) -> Manifest:
        seen = read_pointer(self.inner, self.keys, run)
        assert seen is not None
        assert seen.pointer.published is not None
        return load_manifest(self.inner, run, seen.pointer.published)


def memory() -> MemoryStore:
    return MemoryStore(now=lambda: 0.0)


TREE = {
    "symlinks": (Symlink("link", "model.bin"),),
    "directories": (Directory(".", 0o750, 10**18), Directory("sub", 0o700, 10**18 + 1)),
    "trackers": (Tracker("latest", b"step-1\n"), Tracker("newest", b"step-1", symlink=True)),
}
