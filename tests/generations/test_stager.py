"""The stager: what it promises is the pinned bytes, whatever the training code does meanwhile."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
import trio
import xxhash

from cachefs.errors import StagingError
from cachefs.formats.records import AttemptRecord, Identity, ShardRecord, State
from cachefs.generations import retrying
from cachefs.generations.stager import Stager
from cachefs.journal import Journal
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins

OLD = b"closed" * 1000


@pytest.fixture
def staging(tmp_path):
    made = Staging(tmp_path / "staging")
    yield made
    made.close()


@pytest.fixture
def journal(staging):
    made = Journal(staging.journal)
    yield made
    made.close()


@pytest.fixture
def closed(staging, journal):
    """A closed save of one file; returns the pins."""
    pins = Pins(staging)
    (staging.tree / "run").mkdir()
    (staging.tree / "run/f").write_bytes(OLD)
    fd = os.open(staging.tree / "run", os.O_RDONLY)
    stat = pins.add("a", "s", fd, b"f")
    os.close(fd)
    attempt = AttemptRecord(
        attempt="a", path="run/f", run="run", generation="f", kind="file", preset="", step=0, opened_at=0.0, serial=1,
        closed_at=1.0,
    )  # fmt: skip
    identity = Identity(stat.st_ino, stat.st_size, stat.st_mtime_ns)
    shard = ShardRecord(attempt="a", shard="s", paths=("f",), identity=identity, mode=0o644, key="k")
    journal.write_now(lambda txn: (txn.attempts.put("a", attempt), txn.put_shard(shard)))
    return pins


async def stage(staging, journal, pins, nursery) -> tuple[AttemptRecord, ShardRecord]:
    await nursery.start(Stager(journal, pins, staging.tree_fd, staged=lambda: None).run)
    while True:
        with journal.read() as txn:
            attempt, shard = txn.attempts.get("a"), txn.shard("a", "s")
        if attempt.state is not State.OPEN:
            return attempt, shard
        await journal.wait_changed()


@pytest.mark.parametrize("change", ["append", "overwrite"])
async def test_a_file_that_is_written_while_it_is_staged_is_staged_as_it_was_closed(
    staging, journal, closed, nursery, monkeypatch, change
):
    """The mount moves the pin to a copy and lets the training code write; the stager must not take those bytes."""
    file = staging.tree / "run/f"
    fsync = os.fsync

    def write_meanwhile(fd):
        fsync(fd)
        if os.fstat(fd).st_ino == file.stat().st_ino and closed.holders(file.stat().st_ino):
            closed.release_inode(file.stat().st_ino)
            with file.open("ab" if change == "append" else "r+b") as out:
                out.write(b"next save")

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    attempt, shard = await stage(staging, journal, closed, nursery)
    assert (attempt.state, attempt.error) == (State.STAGED, "")
    assert shard.identity.xxh3 == xxhash.xxh3_128(OLD).hexdigest()
    assert closed.path("a", "s").read_bytes() == OLD
    assert file.read_bytes() != OLD


async def test_bytes_that_are_gone_end_the_attempt(staging, journal, closed, nursery, declared_warnings):
    declared_warnings("save abandoned")
    closed.path("a", "s").unlink()
    attempt, _ = await stage(staging, journal, closed, nursery)
    assert attempt.state is State.ABANDONED
    assert "f are gone from staging" in attempt.error


class Refused:
    """Makes os.fsync fail for the pinned file, the given number of times."""

    def __init__(self, monkeypatch, pins: Pins, number: int, times: int) -> None:
        self.left = times
        fsync = os.fsync

        def fail(fd):
            if self.left and pins.holders(os.fstat(fd).st_ino):
                self.left -= 1
                raise OSError(number, os.strerror(number))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.ENOSPC])
async def test_bytes_that_did_not_reach_the_disk_end_the_attempt_although_the_next_sync_would_succeed(
    staging, journal, closed, nursery, monkeypatch, declared_warnings, number
):
    declared_warnings("save abandoned")
    Refused(monkeypatch, closed, number, times=1)
    attempt, _ = await stage(staging, journal, closed, nursery)
    assert (attempt.state, attempt.error) == (State.ABANDONED, f"f did not reach the disk: {os.strerror(number)}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES])
async def test_what_passes_is_shown_and_tried_again(
    staging, journal, closed, nursery, monkeypatch, declared_warnings, number
):
    declared_warnings("staging waits")
    monkeypatch.setattr(retrying, "FIRST", 0.01)
    shown, open_pin = [], closed.open

    def fail(attempt, shard):
        with journal.read() as txn:
            shown.append(txn.attempts.get("a").error)
        if len(shown) < 3:
            raise OSError(number, os.strerror(number))
        return open_pin(attempt, shard)

    monkeypatch.setattr(closed, "open", fail)
    with trio.fail_after(30):
        attempt, shard = await stage(staging, journal, closed, nursery)
    assert (attempt.state, attempt.error) == (State.STAGED, "")
    assert shard.identity.xxh3 == xxhash.xxh3_128(OLD).hexdigest()
    assert [os.strerror(number) in error for error in shown] == [False, True, True]


async def test_a_save_that_has_to_wait_does_not_hold_back_the_next(
    staging, journal, closed, nursery, monkeypatch, declared_warnings
):
    declared_warnings("staging waits")
    monkeypatch.setattr(retrying, "FIRST", 3600.0)
    open_pin = closed.open

    def fail(attempt, shard):
        if attempt == "a":
            raise OSError(errno.EMFILE, "no descriptor")
        return open_pin(attempt, shard)

    monkeypatch.setattr(closed, "open", fail)
    stager = Stager(journal, closed, staging.tree_fd, staged=lambda: None)
    await nursery.start(stager.run)
    with trio.fail_after(30):
        while not _read(journal, "a").error:
            await journal.wait_changed()
        await journal.write(
            lambda txn: txn.attempts.put("b", msgspec.structs.replace(txn.attempts.get("a"), attempt="b", path="run/g"))
        )
        stager.wake()
        while _read(journal, "b").state is State.OPEN:
            await journal.wait_changed()
    assert _read(journal, "b").state is State.STAGED


async def test_staging_goes_on_after_the_journal_failed(
    staging, journal, closed, nursery, monkeypatch, declared_warnings
):
    declared_warnings("staging: the journal failed")
    monkeypatch.setattr(retrying, "FIRST", 0.01)
    write, refused = journal.write, []

    async def refuse(fn):
        if len(refused) < 2:
            refused.append(fn)
            raise StagingError("the journal cannot be written: disk full")
        return await write(fn)

    monkeypatch.setattr(journal, "write", refuse)
    with trio.fail_after(30):
        attempt, _ = await stage(staging, journal, closed, nursery)
    assert attempt.state is State.STAGED


def _read(journal, attempt: str) -> AttemptRecord:
    with journal.read() as txn:
        return txn.attempts.get(attempt)
