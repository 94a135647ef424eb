"""The instant a save closes: its exact set is pinned, whatever lies around it; and what is pinned before, early."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
import trio

from cachefs.formats.records import AttemptRecord, State
from cachefs.generations.closing import TRACKER_MAX, Closer
from cachefs.generations.early import EarlyUploads
from cachefs.journal import Journal
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins

ATTEMPT = AttemptRecord(
    attempt="a" * 32, path="run/step-1", run="run", generation="step-1", kind="directory", preset="", step=1,
    opened_at=0.0, serial=1,
)  # fmt: skip

CLOCK = msgspec.structs.replace(ATTEMPT, attempt="c" * 32, path="run/step-0", generation="step-0")
DELAY = 0.05


@pytest.fixture
def staging(tmp_path) -> Iterator[Staging]:
    made = Staging(tmp_path / "staging")
    (made.tree / "run/step-1/inner").mkdir(parents=True)
    yield made
    made.close()


@pytest.fixture
def pins(staging) -> Pins:
    return Pins(staging)


def put(staging, name: str, data: bytes = b"x") -> None:
    (staging.tree / name).write_bytes(data)


def close(staging, pins, attempt=ATTEMPT, early=(), temp_names=("*.tmp",), trackers=("latest*",)):
    ids = count(len(pins.shards(attempt.attempt)))
    closer = Closer(
        staging.tree_fd,
        pins,
        attempt,
        new_id=lambda: f"{next(ids):032}"[::-1],
        key=lambda shard, path: f"{shard}/{path}",
    )
    return closer.close(os.fsencode(attempt.path), early, temp_names=temp_names, trackers=trackers)


def test_every_file_is_pinned_and_links_and_directories_are_recorded(staging, pins):
    """Empty files and any names count; temporary names, fifos and what lies beside the save do not."""
    put(staging, "run/step-1/x.bin", b"12345")
    put(staging, "run/step-1/inner/empty", b"")
    put(staging, "run/step-1/inner/\udcff", b"raw")
    put(staging, "run/step-1/half.tmp")
    put(staging, "run/other")
    os.mkfifo(staging.tree / "run/step-1/fifo")
    os.symlink("inner", staging.tree / "run/step-1/link")
    os.chmod(staging.tree / "run/step-1/x.bin", 0o640)
    os.setxattr(staging.tree / "run/step-1/x.bin", "user.note", b"mine")
    closed = close(staging, pins)
    found = {shard.paths[0]: shard for shard in closed.shards}
    assert set(found) == {"x.bin", "inner/empty", "inner/%FF"}
    assert pins.shards(ATTEMPT.attempt) == {shard.shard for shard in closed.shards}
    one = found["x.bin"]
    assert (one.identity.size, one.mode, one.xattrs, one.key) == (
        5,
        0o640,
        {"user.note": b"mine"},
        f"{one.shard}/x.bin",
    )
    assert pins.path(ATTEMPT.attempt, one.shard).read_bytes() == b"12345"
    assert [(link.path, link.target) for link in closed.symlinks] == [("link", "inner")]
    assert [directory.path for directory in closed.directories] == [".", "inner"]


def test_hard_links_in_a_save_are_one_shard(staging, pins):
    put(staging, "run/step-1/x.bin")
    os.link(staging.tree / "run/step-1/x.bin", staging.tree / "run/step-1/inner/same")
    [shard] = close(staging, pins).shards
    assert sorted(shard.paths) == ["inner/same", "x.bin"]


@pytest.mark.parametrize("how", ["a map", "another name"])
def test_a_file_that_is_written_is_not_pinned(staging, pins, how):
    """Nobody has to know its writer: the file was closed, or is written under a name outside the save."""
    put(staging, "run/step-1/x.bin", b"bytes")
    os.link(staging.tree / "run/step-1/x.bin", staging.tree / "other")
    writer = os.open(staging.tree / "other", os.O_RDWR)
    if how == "a map":
        shared = mmap.mmap(writer, 5)
        os.close(writer)
        with pytest.raises(OSError, match=r"x\.bin is open for writing"):
            close(staging, pins)
        shared.close()
    else:
        with pytest.raises(OSError, match=r"x\.bin is open for writing"):
            close(staging, pins)
        os.close(writer)
    assert pins.shards(ATTEMPT.attempt) == set()
    (shard,) = close(staging, pins).shards
    assert shard.identity.size == 5


def test_trackers_beside_the_save_are_recorded_with_their_bytes(staging, pins):
    """A link only when it names this save; a large file is none."""
    put(staging, "run/latest", b"step-1")
    put(staging, "run/latest-large", b"x" * (TRACKER_MAX + 1))
    os.symlink("step-1/x.bin", staging.tree / "run/latest-link")
    os.symlink("step-0", staging.tree / "run/latest-other")
    found = [(one.path, one.content, one.symlink) for one in close(staging, pins).trackers]
    assert found == [("latest", b"step-1", False), ("latest-link", b"step-1/x.bin", True)]


@pytest.mark.parametrize("became", ["nothing", "a link", "a file"])
@pytest.mark.parametrize("moment", ["listed", "looked at"])
def test_a_tracker_that_is_replaced_during_the_close_costs_its_record_only(staging, pins, monkeypatch, moment, became):
    """Another rank removes and makes it again: nothing holds that back."""
    put(staging, "run/step-1/x.bin")
    put(staging, "run/latest")
    tracker = staging.tree / "run/latest-rank1"
    if became == "a file":
        tracker.symlink_to("step-1")
    else:
        put(staging, "run/latest-rank1", b"step-1")
    stat = os.stat

    def replaced(path, **options):
        before = stat(path, **options) if path != "latest-rank1" or moment == "looked at" else None
        if path != "latest-rank1":
            return before
        tracker.unlink()
        if became == "a link":
            tracker.symlink_to("step-2")
        elif became == "a file":
            tracker.write_bytes(b"x" * (TRACKER_MAX + 1))
        return before or stat(path, **options)

    monkeypatch.setattr(os, "stat", replaced)
    closed = close(staging, pins)
    assert [one.path for one in closed.trackers] == ["latest"]
    assert [shard.paths for shard in closed.shards] == [("x.bin",)]


def test_a_tracker_that_cannot_be_read_is_not_left_out(staging, pins, monkeypatch):
    put(staging, "run/latest")

    def fail(*_arguments):
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match="lost"):
        close(staging, pins)


def test_early_pins_are_taken_over_when_the_file_is_still_the_same(staging, pins):
    """A changed or missing one is dropped; a renamed one keeps its bytes under its new path."""
    for name in ("same", "renamed", "changed", "removed"):
        put(staging, f"run/step-1/{name}")
    early = close(staging, pins).shards
    by_path = {shard.paths[0]: shard for shard in early}
    os.rename(staging.tree / "run/step-1/renamed", staging.tree / "run/step-1/inner/new")
    os.utime(staging.tree / "run/step-1/changed", ns=(1, 1))
    os.unlink(staging.tree / "run/step-1/removed")
    closed = close(staging, pins, early=[msgspec.structs.replace(shard, early=True) for shard in early])
    now = {shard.paths[0]: shard for shard in closed.shards}
    assert now["same"].shard == by_path["same"].shard
    assert now["inner/new"].shard == by_path["renamed"].shard
    assert now["changed"].shard != by_path["changed"].shard
    assert not any(shard.early for shard in closed.shards)
    assert closed.kept == {by_path["same"].shard, by_path["renamed"].shard}


def test_a_single_file_is_a_save_of_its_own(staging, pins):
    put(staging, "run/x.pt", b"12345")
    put(staging, "run/y.pt")
    attempt = msgspec.structs.replace(ATTEMPT, path="run/x.pt", generation="x.pt", kind="file")
    closed = close(staging, pins, attempt)
    assert [shard.paths for shard in closed.shards] == [("x.pt",)]
    assert closed.directories == ()


# ---- early


class Early:
    """Early uploads, and files that serve as a clock: what was due before one of them was pinned has been looked at."""

    def __init__(self, staging, pins, journal) -> None:
        self.staging, self.pins, self.journal, self.sent = staging, pins, journal, 0
        self.turns = count()
        (staging.tree / "run/step-0").mkdir()
        for attempt in (ATTEMPT, CLOCK):
            journal.write_now(lambda txn, attempt=attempt: txn.attempts.put(attempt.attempt, attempt))
        self.uploads = EarlyUploads(
            journal,
            pins,
            staging.tree_fd,
            delay=DELAY,
            key=lambda _, shard, path: f"{shard}/{path}",
            pinned=self.pinned,
        )

    def pinned(self) -> None:
        self.sent += 1

    def closed(self, name: bytes) -> None:
        self.uploads.closed(b"run/step-1/" + name, ATTEMPT.attempt, b"run/step-1")

    async def later(self) -> None:
        """Return when everything that is due by now has been looked at."""
        name = f"{next(self.turns)}"
        put(self.staging, f"run/step-0/{name}")
        self.uploads.closed(os.fsencode(f"run/step-0/{name}"), CLOCK.attempt, b"run/step-0")
        with trio.fail_after(30):
            while not self.paths(CLOCK, name):
                await self.journal.wait_changed()

    def paths(self, attempt: AttemptRecord = ATTEMPT, name: str = "") -> list[str]:
        with self.journal.read() as txn:
            recorded = txn.shards_of(attempt.attempt)
        assert all(shard.early for shard in recorded)
        return sorted(shard.paths[0] for shard in recorded if name in ("", shard.paths[0]))


@pytest.fixture
async def early(staging, pins, tmp_path, nursery):
    journal = Journal(tmp_path / "journal")
    made = Early(staging, pins, journal)
    await nursery.start(made.uploads.run)
    yield made
    journal.close()


async def test_a_file_that_is_left_alone_is_pinned_before_its_save_closes(staging, early):
    put(staging, "run/step-1/x.bin")
    early.closed(b"x.bin")
    before = trio.current_time()
    await early.later()
    assert trio.current_time() - before >= DELAY
    assert early.paths() == ["x.bin"]
    assert len(early.pins.shards(ATTEMPT.attempt)) == 1
    assert early.sent >= 1


async def test_opening_it_again_drops_the_pin_or_never_makes_one(staging, early):
    put(staging, "run/step-1/x.bin")
    early.closed(b"x.bin")
    assert early.uploads.opening(b"run/step-1/x.bin") is None
    await early.later()
    assert early.paths() == []
    early.closed(b"x.bin")
    await early.later()
    shard = early.uploads.opening(b"run/step-1/x.bin")
    assert shard is not None
    await early.uploads.drop(shard)
    assert (early.paths(), early.pins.shards(ATTEMPT.attempt)) == ([], set())
    assert early.uploads.opening(b"run/step-1/x.bin") is None


@pytest.mark.parametrize("what", ["removed", "save removed", "save ended"])
async def test_what_is_gone_or_ended_meanwhile_is_not_pinned(staging, early, what):
    put(staging, "run/step-1/x.bin")
    early.closed(b"x.bin")
    if what == "removed":
        os.unlink(staging.tree / "run/step-1/x.bin")
    elif what == "save removed":
        os.rename(staging.tree / "run/step-1", staging.tree / "run/elsewhere")
    else:
        await early.journal.write(lambda txn: txn.update_attempt(ATTEMPT.attempt, state=State.ABANDONED))
    await early.later()
    assert (early.paths(), early.pins.shards(ATTEMPT.attempt)) == ([], set())


@pytest.mark.parametrize("what", ["a file in place of the directory", "no room"])
async def test_an_early_pin_that_cannot_be_made_is_only_not_made(staging, early, monkeypatch, what):
    """The upload then starts when the save closes."""
    put(staging, "run/step-1/x.bin")
    early.closed(b"x.bin")
    link = os.link

    def full(name, *arguments, **options):
        if name == b"x.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        link(name, *arguments, **options)

    if what == "no room":
        monkeypatch.setattr(os, "link", full)
    else:
        os.rename(staging.tree / "run/step-1", staging.tree / "run/elsewhere")
        put(staging, "run/step-1")
    await early.later()
    assert early.paths() == []
