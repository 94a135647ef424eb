"""The journal: an LMDB environment in staging that is both the queue and the memory of the daemon.

Every background step reads its work from here and writes its result back here, so a restart and a wake-up are one code
path. `Journal.write` is durable when it returns (one fdatasync for all writers that wait together); reads see what is
committed. Records are MessagePack structs from formats/records.py.

    attempts   key: attempt id
               One AttemptRecord per attempt. Written by the tracker (open, close, staged), the flusher (flushed) and
               the publisher (sealed and later). A crash leaves at worst an older state; the step that follows is
               repeated.
    shards     key: attempt id "/" shard id
               One ShardRecord per pinned file. Written when the file is pinned, then by the flusher only. A record
               without its pin in staging/pins means the crash came between the two: the tracker pins first and records
               second, so such a record is damage and its attempt is abandoned; a pin without a record is swept.
    parts      key: attempt id "/" shard id "/" part number, five digits
               One PartRecord per acknowledged part of a multipart upload; deleted with the upload. A crash may lose the
               last one: that part is sent again.
    shared     key: attempt id in the bucket
               What this member knows of attempts that other daemons opened; deleted when they have ended. A crash costs
               a look.
    runs       key: run
               The epoch held, the ordinal and the highest step used. Epochs of an earlier process are never reused.
    loose      key: path
               What was mirrored last; a file that differs from it is sent again.
    meta       key: "meta"
               Journal format, the attempt serial, and which store and member the journal belongs to.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import lmdb
import msgspec
import trio

from cachefs.errors import StagingError
from cachefs.formats.records import AttemptRecord, LooseRecord, Meta, PartRecord, RunRecord, ShardRecord, SharedRecord
from cachefs.threads import NoThread, in_thread

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

FORMAT = 1
MAP_SIZE = 8 << 30
"""Bytes of address space; the file grows only with its content."""
RESERVED = 8 << 20
"""Bytes preallocated in the file, so that a full disk does not stop the journal from recording it."""

_KEY_MAX = 480  # LMDB keys end at 511 bytes


def _key(text: str) -> bytes:
    raw = text.encode()
    if len(raw) <= _KEY_MAX:
        return raw
    return raw[: _KEY_MAX - 65] + b"#" + hashlib.sha256(raw).hexdigest().encode()


class Table(Generic[R]):
    """One database inside one transaction."""

    def __init__(self, txn: Any, db: Any, kind: type[R]) -> None:
        self._txn = txn
        self._db = db
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], R] = msgspec.msgpack.Decoder(kind).decode

    def get(self, key: str) -> R | None:
        """Return the record, or None."""
        raw = self._txn.get(_key(key), db=self._db)
        return None if raw is None else self._decode(raw)

    def put(self, key: str, record: R) -> None:
        """Write a record, replacing an older one."""
        self._txn.put(_key(key), self._encode(record), db=self._db)

    def delete(self, key: str) -> None:
        """Delete a record; none there is fine."""
        self._txn.delete(_key(key), db=self._db)

    def scan(self, prefix: str = "") -> Iterator[R]:
        """Iterate over the records whose keys start with `prefix`, in key order."""
        start = prefix.encode()
        cursor = self._txn.cursor(db=self._db)
        found = cursor.set_range(start) if start else cursor.first()
        while found and cursor.key().startswith(start):
            yield self._decode(cursor.value())
            found = cursor.next()

    def count(self) -> int:
        """Return how many records there are."""
        return cast(int, self._txn.stat(self._db)["entries"])


class Txn:
    """A transaction: the tables, and the few operations that span them. `version` is the newest commit that one for
    reading sees.
    """

    def __init__(self, txn: Any, dbs: dict[str, Any]) -> None:
        self.version = int(txn.id())
        self.attempts = Table(txn, dbs["attempts"], AttemptRecord)
        self.shards = Table(txn, dbs["shards"], ShardRecord)
        self.parts = Table(txn, dbs["parts"], PartRecord)
        self.shared = Table(txn, dbs["shared"], SharedRecord)
        self.runs = Table(txn, dbs["runs"], RunRecord)
        self.loose = Table(txn, dbs["loose"], LooseRecord)
        self.meta = Table(txn, dbs["meta"], Meta)

    def about(self) -> Meta:
        """Return what is recorded of the journal as a whole."""
        return self.meta.get("meta") or Meta()

    def update_about(self, **changes: Any) -> Meta:
        """Replace fields of what is recorded of the journal as a whole, and return it."""
        meta = msgspec.structs.replace(self.about(), **changes)
        self.meta.put("meta", meta)
        return meta

    def next_serial(self) -> int:
        """Take the next attempt serial."""
        return self.update_about(serial=self.about().serial + 1).serial

    def run(self, run: str) -> RunRecord:
        """Return the record of a run, a fresh one when there is none."""
        return self.runs.get(run) or RunRecord(run)

    def update_run(self, run: str, **changes: Any) -> None:
        """Replace fields of a run's record."""
        self.runs.put(run, msgspec.structs.replace(self.run(run), **changes))

    def update_attempt(self, attempt: str, **changes: Any) -> AttemptRecord:
        """Replace fields of an attempt's record and return the new one. Raises KeyError when there is none."""
        record = self.attempts.get(attempt)
        if record is None:
            raise KeyError(attempt)
        record = msgspec.structs.replace(record, **changes)
        self.attempts.put(attempt, record)
        return record

    def shards_of(self, attempt: str) -> list[ShardRecord]:
        """Return the attempt's shard records."""
        return list(self.shards.scan(f"{attempt}/"))

    def shard(self, attempt: str, shard: str) -> ShardRecord | None:
        """Return one shard record, or None when it was dropped."""
        return self.shards.get(f"{attempt}/{shard}")

    def put_shard(self, record: ShardRecord) -> None:
        """Write a shard record."""
        self.shards.put(f"{record.attempt}/{record.shard}", record)

    def drop_shard(self, record: ShardRecord) -> None:
        """Delete a shard record and its parts."""
        self.drop_parts(record)
        self.shards.delete(f"{record.attempt}/{record.shard}")

    def parts_of(self, record: ShardRecord) -> list[PartRecord]:
        """Return the acknowledged parts of the shard's current upload, by number."""
        prefix = f"{record.attempt}/{record.shard}/"
        return [part for part in self.parts.scan(prefix) if part.upload_id == record.upload_id]

    def put_part(self, record: ShardRecord, part: PartRecord) -> None:
        """Record an acknowledged part."""
        self.parts.put(f"{record.attempt}/{record.shard}/{part.number:05d}", part)

    def drop_parts(self, record: ShardRecord) -> None:
        """Forget all parts of a shard."""
        prefix = f"{record.attempt}/{record.shard}/"
        for number in [part.number for part in self.parts.scan(prefix)]:
            self.parts.delete(f"{prefix}{number:05d}")


class _Write(Generic[T]):
    def __init__(self, fn: Callable[[Txn], T]) -> None:
        self.fn = fn
        self.turn = trio.Event()
        """Set when it is answered, or is to lead the next batch."""
        self.answered = False
        self.result: T
        self.error: BaseException | None = None


class Journal:
    """The journal of one staging directory, in one process. LMDB keeps several processes apart: the daemon's two share
    it, and the staging lock keeps other daemons out.
    """

    def __init__(self, directory: Path) -> None:
        """Open or create the journal. Raises StagingError when it is damaged or of another format."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(str(directory), map_size=MAP_SIZE, max_dbs=8, subdir=True, mode=0o600)
            self.forget_dead_readers()
            self._reserve(directory)
            names = ("attempts", "shards", "parts", "shared", "runs", "loose", "meta")
            self._dbs = {name: self._env.open_db(name.encode()) for name in names}
            meta = self._check()
        except (lmdb.Error, OSError, msgspec.MsgspecError) as error:
            raise StagingError(
                f"the journal in {directory} cannot be opened: {error}",
                hint="free space or repair the disk; the files in staging/tree are plain files and can be copied out",
            ) from error
        if meta.format != FORMAT:
            self._env.close()
            raise StagingError(
                f"the journal in {directory} has format {meta.format}, this cachefs reads {FORMAT}",
                hint="run the cachefs version that wrote it until everything is published, then upgrade",
            )
        self._waiting: list[_Write[Any]] = []
        self._committing = False
        self._changed = trio.Event()

    def _reserve(self, directory: Path) -> None:
        # Reading a memory map behind the end of a file that was cut short would kill the process: such a file is filled
        # up, and the empty pages are then found to be damaged.
        content = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        fd = os.open(directory / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < max(content, RESERVED):
                os.posix_fallocate(fd, 0, max(content, RESERVED))
        finally:
            os.close(fd)

    def _check(self) -> Meta:
        """Read every record once, so that damage is found here and not by some task later."""
        with self.read() as txn:
            for table in (txn.attempts, txn.shards, txn.parts, txn.shared, txn.runs, txn.loose):
                for _record in table.scan():
                    pass
            meta = txn.meta.get("meta")
        if meta is None:
            meta = Meta(format=FORMAT)
            with self._env.begin(write=True) as raw:
                Txn(raw, self._dbs).meta.put("meta", meta)
        return meta

    def forget_dead_readers(self) -> None:
        """Give back the snapshot of a process that was killed while it read: as long as it is kept, no freed page is
        used again, and the file grows with every commit.
        """
        self._env.reader_check()

    def close(self) -> None:
        """Close the environment; no transaction may be open."""
        self._env.close()

    @contextmanager
    def read(self) -> Iterator[Txn]:
        """Open a read transaction. Synchronous and short: no checkpoint while it is open."""
        with self._env.begin() as raw:
            txn = Txn(raw, self._dbs)
            try:
                yield txn
            finally:
                # A transaction keeps its place among LMDB's 126 readers for as long as it is referred to, and a task
                # that waits keeps the variable.
                vars(txn).clear()

    def write_now(self, fn: Callable[[Txn], T]) -> T:
        """Run `fn` in its own write transaction and commit it durably. For start-up and tools: blocks the caller."""
        try:
            with self._env.begin(write=True) as raw:
                return fn(Txn(raw, self._dbs))
        except lmdb.Error as error:
            raise StagingError(f"the journal cannot be written: {error}", hint="free space in staging") from error

    async def write(self, fn: Callable[[Txn], T]) -> T:
        """Run `fn` in a write transaction, in a worker thread; its changes are durable when this returns.

        Writers that wait at the same time share one transaction and one fdatasync. `fn` must only use the transaction
        (it may be run again when another writer of the batch fails); what it raises is raised here and changes nothing.
        Not interrupted by cancellation. Raises StagingError when the journal cannot be written (disk full, no thread).
        """
        write = _Write(fn)
        self._waiting.append(write)
        with trio.CancelScope(shield=True):
            if self._committing:
                await write.turn.wait()
            if not write.answered:
                await self._lead()
        if write.error is not None:
            raise write.error
        return write.result

    @property
    def version(self) -> int:
        """Return the number of the newest commit, of whatever process: tells a cache whether it is still right.

        What is read afterwards may lack a commit of another process that has this number already: LMDB writes the page
        first and then lets readers begin with it. `Txn.version` says what was seen.
        """
        return int(self._env.info()["last_txnid"])

    def note_commit(self) -> None:
        """Wake those who wait for a change; also called when the other process says that it has committed."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Return after the next commit."""
        await self._changed.wait()

    async def barrier(self) -> None:
        """Return when everything written before is durable."""
        await self.write(lambda _txn: None)

    async def _lead(self) -> None:
        """Commit what waits, and leave what came meanwhile to the first who waits: nobody serves others for ever."""
        self._committing = True
        batch, self._waiting = self._waiting, []
        try:
            await in_thread(self._commit, batch)
        except NoThread as error:
            for write in batch:
                write.error = StagingError(f"the journal cannot be written: {error.strerror}", hint="raise pids.max")
        except BaseException as error:
            for write in batch:
                write.error = write.error or error
            raise
        finally:
            for write in batch:
                write.answered = True
                write.turn.set()
            if self._waiting:
                self._waiting[0].turn.set()
            else:
                self._committing = False
            self.note_commit()

    def _commit(self, batch: list[_Write[Any]]) -> None:
        try:
            with self._env.begin(write=True) as raw:
                txn = Txn(raw, self._dbs)
                for write in batch:
                    write.result = write.fn(txn)
        except Exception:
            # One of them failed and took the transaction with it: each gets its own.
            for write in batch:
                self._commit_one(write)

    def _commit_one(self, write: _Write[Any]) -> None:
        try:
            write.result = self.write_now(write.fn)
        except Exception as error:
            write.error = error
