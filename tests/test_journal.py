"""The journal: group commit, isolation of failing writers, and what it says when it cannot be read or written."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import trio
import trio.testing

from cachefs import journal as journal_module
from cachefs.errors import StagingError
from cachefs.formats.records import AttemptRecord, Identity, LooseRecord, Meta, PartRecord, RunRecord, ShardRecord
from cachefs.journal import Journal


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "journal")
    yield made
    made.close()


def attempt(name: str) -> AttemptRecord:
    return AttemptRecord(
        attempt=name, path="r/g", run="r", generation="g", kind="directory", preset="", step=1, opened_at=0.0, serial=1
    )


def shard(attempt_id: str, name: str, **more) -> ShardRecord:
    identity = Identity(ino=1, size=2, mtime_ns=3)
    return ShardRecord(attempt=attempt_id, shard=name, paths=("x",), identity=identity, mode=0o644, key="k", **more)


async def test_what_was_written_is_there_after_a_restart(tmp_path):
    first = Journal(tmp_path)
    await first.write(lambda txn: txn.attempts.put("a", attempt("a")))
    first.close()
    second = Journal(tmp_path)
    with second.read() as txn:
        assert txn.attempts.get("a") == attempt("a")
    second.close()


async def test_writers_that_wait_together_share_commits(journal):
    before = journal.version
    async with trio.open_nursery() as nursery:
        for number in range(100):
            name = f"{number:03}"
            nursery.start_soon(journal.write, lambda txn, name=name: txn.runs.put(name, RunRecord(run=name)))
    with journal.read() as txn:
        assert txn.runs.count() == 100
    assert journal.version - before <= 3


async def test_each_writer_gets_its_own_result_and_sees_those_before_it(journal):
    results = {}

    async def take(number):
        results[number] = await journal.write(lambda txn: txn.next_serial())

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(take, number)
    assert sorted(results.values()) == list(range(1, 21))


async def test_a_failing_writer_gets_its_error_and_harms_no_other(journal):
    """All others of the batch are committed, each exactly once."""

    def fail(txn):
        txn.runs.put("bad", RunRecord(run="bad"))
        raise ValueError("mine alone")

    failed = []

    async def bad():
        with pytest.raises(ValueError, match="mine alone"):
            await journal.write(fail)
        failed.append(True)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(journal.write, lambda txn: txn.next_serial())
            if number == 4:
                nursery.start_soon(bad)
    with journal.read() as txn:
        assert txn.runs.get("bad") is None
        assert txn.about().serial == 10
    assert failed == [True]


async def test_who_commits_for_others_is_answered_with_its_own_batch(journal, monkeypatch):
    """However many write meanwhile: the first of them commits for the next."""
    commits = 0
    commit = journal._commit

    def committed(batch):
        nonlocal commits
        commit(batch)
        commits += 1
        if commits < 5:
            trio.from_thread.run(another)

    async def another():
        nursery.start_soon(journal.write, lambda txn: txn.next_serial())
        await trio.testing.wait_all_tasks_blocked()

    monkeypatch.setattr(journal, "_commit", committed)
    async with trio.open_nursery() as nursery:
        await journal.write(lambda txn: txn.next_serial())
        assert commits == 1
    with journal.read() as txn:
        assert txn.about().serial == commits == 5


async def test_writes_that_get_no_thread_fail_and_none_is_left_without_an_answer(journal, no_threads):
    async def refused():
        with pytest.raises(StagingError, match="no more threads"):
            await journal.write(lambda txn: txn.next_serial())

    with trio.fail_after(30):
        with no_threads():
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(refused)
        assert await journal.write(lambda txn: txn.next_serial()) == 1


async def test_cancellation_does_not_tear_a_write(journal):
    """What was handed in is written, and the journal goes on."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await journal.write(lambda txn: txn.next_serial())
    await journal.barrier()
    with journal.read() as txn:
        assert txn.about().serial == 1


async def test_waiters_are_woken_by_every_commit(journal):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.wait_changed)
        await trio.testing.wait_all_tasks_blocked()
        before = journal.version
        await journal.write(lambda txn: txn.next_serial())
    assert journal.version == before + 1


async def test_paths_longer_than_an_lmdb_key_are_kept_apart(journal):
    """Two keys that differ only behind the 480th byte."""
    keys = ["d/" * 2000 + end for end in ("a", "b")]
    identity = Identity(ino=1, size=2, mtime_ns=3)
    records = [LooseRecord(path=key, identity=identity, key="k", version_id="v") for key in keys]

    def put(txn):
        for key, record in zip(keys, records, strict=True):
            txn.loose.put(key, record)

    await journal.write(put)
    with journal.read() as txn:
        assert [txn.loose.get(key) for key in keys] == records
        assert txn.loose.count() == 2
    await journal.write(lambda txn: txn.loose.delete(keys[0]))
    with journal.read() as txn:
        assert [txn.loose.get(key) for key in keys] == [None, records[1]]


async def test_shards_and_parts_belong_to_their_attempt(journal):
    one, other = shard("a", "s", upload_id="u"), shard("ab", "s")

    def put(txn):
        txn.put_shard(one)
        txn.put_shard(other)
        txn.put_part(one, PartRecord(1, "u", "etag", b""))
        txn.put_part(one, PartRecord(2, "an older upload", "etag", b""))

    await journal.write(put)
    with journal.read() as txn:
        assert txn.shards_of("a") == [one]
        assert [part.number for part in txn.parts_of(one)] == [1]
    await journal.write(lambda txn: txn.drop_shard(one))
    with journal.read() as txn:
        assert (txn.shards_of("a"), txn.shards_of("ab"), txn.parts.count()) == ([], [other], 0)


async def test_updating_an_attempt_that_is_gone_is_an_error_of_that_writer(journal):
    with pytest.raises(KeyError):
        await journal.write(lambda txn: txn.update_attempt("gone", error="x"))


def test_a_killed_writer_leaves_all_or_nothing(tmp_path):
    """kill -9 in the middle of a transaction: what was committed before is there, the rest is not."""
    code = """
import os, pathlib, sys
from cachefs.formats.records import RunRecord
from cachefs.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
journal.write_now(lambda txn: txn.runs.put("before", RunRecord(run="before")))
def die(txn):
    txn.runs.put("during", RunRecord(run="during"))
    os.kill(os.getpid(), 9)
journal.write_now(die)
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    journal = Journal(tmp_path)
    with journal.read() as txn:
        assert [run.run for run in txn.runs.scan()] == ["before"]
    journal.close()


@pytest.mark.parametrize("damage", ["garbage", "cut", "a record"])
def test_damage_is_one_clear_error(tmp_path, damage):
    """Also when the file is shorter than what it says, where a memory map would end the process."""
    journal = Journal(tmp_path)
    for number in range(40):
        record = RunRecord(run=f"{number}" * 200_000)
        journal.write_now(lambda txn, record=record: txn.runs.put(record.run[:10], record))
    assert (tmp_path / "data.mdb").stat().st_size > journal_module.RESERVED
    if damage == "a record":
        with journal._env.begin(write=True) as txn:
            txn.put(b"0", b"\xc1 is no MessagePack", db=journal._dbs["runs"])
    journal.close()
    with (tmp_path / "data.mdb").open("r+b") as stream:
        if damage == "garbage":
            stream.write(b"\xff" * 16384)
        elif damage == "cut":
            stream.truncate(journal_module.RESERVED)
    code = "import pathlib, sys; from cachefs.journal import Journal; Journal(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"StagingError: the journal in {tmp_path} cannot be opened" in done.stderr


def test_a_journal_of_another_format_is_refused_and_left_alone(tmp_path):
    journal = Journal(tmp_path)
    meta = msgspec.structs.replace(Meta(), format=99, serial=7)
    journal.write_now(lambda txn: txn.meta.put("meta", meta))
    journal.close()
    for _ in range(2):
        with pytest.raises(StagingError, match="has format 99, this cachefs reads 1"):
            Journal(tmp_path)


async def test_a_full_journal_is_a_clear_error_and_what_is_there_stays(tmp_path, monkeypatch):
    """Each of several writers gets it, and reading and small writes go on."""
    monkeypatch.setattr(journal_module, "MAP_SIZE", 1 << 20)
    monkeypatch.setattr(journal_module, "RESERVED", 0)
    journal = Journal(tmp_path)
    await journal.write(lambda txn: txn.runs.put("small", RunRecord(run="small")))
    errors = []

    async def put_large():
        try:
            await journal.write(lambda txn: txn.runs.put("large", RunRecord(run="x" * (2 << 20))))
        except StagingError as error:
            errors.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put_large)
        nursery.start_soon(put_large)
    assert len(errors) == 2
    assert all("the journal cannot be written" in error for error in errors)
    with journal.read() as txn:
        assert [run.run for run in txn.runs.scan()] == ["small"]
    await journal.write(lambda txn: txn.next_serial())
    journal.close()


@pytest.fixture
def small_disk(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.mount
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
async def test_a_full_disk_does_not_stop_the_journal_from_recording_it(small_disk):
    """Its first bytes are reserved; what does not fit is a clear error."""
    journal = Journal(small_disk / "journal")
    filler = (small_disk / "filler").open("wb")
    try:
        disk = os.statvfs(small_disk)
        os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize)
        for number in range(50):
            await journal.write(lambda txn, number=number: txn.runs.put(f"{number}", RunRecord(run="x" * 4096)))
        with pytest.raises(StagingError, match="cannot be written"):
            await journal.write(lambda txn: txn.runs.put("large", RunRecord(run="x" * (15 << 20))))
        await journal.write(lambda txn: txn.next_serial())
    finally:
        filler.close()
        journal.close()


def test_a_reader_that_was_killed_does_not_make_the_file_grow(tmp_path):
    """Its snapshot is given back; as long as it was kept, no freed page could be used again."""
    code = """
import os, pathlib, sys
from cachefs.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
with journal.read() as txn:
    list(txn.runs.scan())
    os.kill(os.getpid(), 9)
"""
    journal = Journal(tmp_path)

    def churn() -> int:
        for _ in range(200):
            journal.write_now(lambda txn: [txn.runs.put(str(n), RunRecord(run=str(n) * 50)) for n in range(50)])
        return journal._env.info()["last_pgno"]

    calm = churn()
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    journal.forget_dead_readers()
    assert churn() <= calm + 50
    journal.close()
