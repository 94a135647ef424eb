"""The staging directory and its room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from cachefs import clock
from cachefs.errors import StagingError
from cachefs.staging.capacity import Room
from cachefs.staging.copying import clone
from cachefs.staging.layout import Staging


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(tmp_path):
    first = Staging(tmp_path)
    with pytest.raises(StagingError, match=rf"in use by another cachefs daemon \(pid {os.getpid()}\)"):
        Staging(tmp_path)
    first.close()
    Staging(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path):
    """kill -9 leaves a lock file, but no lock."""
    code = "import os, sys, pathlib; from cachefs.staging.layout import Staging; Staging(pathlib.Path(sys.argv[1]));"
    child = [sys.executable, "-c", f"{code} os.kill(os.getpid(), 9)", tmp_path]
    assert subprocess.run(child, check=False).returncode == -9
    Staging(tmp_path).close()


def test_scratch_files_of_a_killed_daemon_are_removed_and_the_tree_is_kept(tmp_path):
    staging = Staging(tmp_path)
    (staging.scratch / "fresh-1").write_bytes(b"half")
    (staging.tree / "x.pt").write_bytes(b"whole")
    staging.close()
    staging = Staging(tmp_path)
    assert os.listdir(staging.scratch) == []
    assert (staging.tree / "x.pt").read_bytes() == b"whole"
    staging.close()


@pytest.mark.parametrize("what", ["a file", "not writable"])
def test_an_unusable_directory_is_one_clear_error(tmp_path, what):
    place = tmp_path / "file" / "staging" if what == "a file" else Path("/proc/nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match="cannot be used"):
        Staging(place)


def test_a_clone_has_the_bytes_mode_and_time_of_its_source(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(100_000))
    with source.open("r+b") as stream:
        stream.truncate(10_000_000)  # with a hole
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18 + 1))
    with source.open("rb") as stream:
        clone(stream.fileno(), tmp_path / "copy")
    copy = (tmp_path / "copy").stat()
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (copy.st_mode & 0o777, copy.st_mtime_ns) == (0o640, 10**18 + 1)


class Disk:
    """A staging whose disk is as full as the test says."""

    def __init__(self, free: int, total: int = 1000) -> None:
        self.free, self.total = free, total

    def free_bytes(self):
        return self.free

    def total_bytes(self):
        return self.total


async def test_a_new_file_waits_for_room(autojump_clock, monkeypatch):
    monkeypatch.setattr(clock, "monotonic", trio.current_time)
    disk = Disk(free=5)
    room = Room(disk, reserve=10, timeout=60)
    assert not room.has_room()
    before = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(room.wait)
        await trio.sleep(10)
        assert len(nursery.child_tasks) == 1
        disk.free = 10
    assert trio.current_time() - before < 11


async def test_no_room_in_time_is_enospc(autojump_clock, monkeypatch):
    monkeypatch.setattr(clock, "monotonic", trio.current_time)
    room = Room(Disk(free=5), reserve=10, timeout=60)
    before = trio.current_time()
    with pytest.raises(OSError, match="below its reserve") as caught:
        await room.wait()
    assert caught.value.errno == 28
    assert 60 <= trio.current_time() - before < 61


def test_a_small_disk_stays_usable():
    """The reserve is at most a twentieth of the disk."""
    assert Room(Disk(free=0, total=1000), reserve=10**9, timeout=0).reserve == 50
