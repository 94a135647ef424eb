"""POSIX on a real mount, on both data paths: what training frameworks and their tools rely on.

Most tests run one script of calls on the mount and on the local disk below it, and compare what it saw.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration import posix
from integration.fsx import Checker
from integration.node import await_condition
from integration.posix import LONG_AGO, failing, put, tree

pytestmark = [pytest.mark.mount, pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")]


@pytest.fixture
def local(tmp_path) -> Path:
    """An empty directory of the disk that staging is on."""
    path = tmp_path / "local"
    path.mkdir()
    return path


@pytest.mark.parametrize("script", posix.SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_sees_the_same_as_on_a_local_disk(script, mnt, local):
    """See posix.py. Afterwards the mount shows what is in staging, too."""
    assert script(mnt) == script(local)


def test_random_operations_leave_the_bytes_of_a_model(mounted, mnt):
    """Writes, truncations, maps, renames and reopens, while closes pin the file and publication drops the pins."""
    closed = 0
    for seed in range(3):
        checker = Checker(mnt / f"{seed}.pt", seed)
        checker.run(400)
        closed += checker.closed
    assert closed > 50
    await_condition(lambda: mounted.status()["backlog_files"] == 0, "the saves of the checker are in the store")


# ---- who may do what


def as_user(uid: int, directory: Path, work: Callable[[], Any], *, groups: tuple[int, ...] = ()) -> Any:
    """Run `work` as another user, in a child that stands in the directory; return its result, by way of JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(directory)
            os.umask(0o022)
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        result = json.loads(stream.read())
    os.waitpid(child, 0)
    return result


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
def test_other_users_have_exactly_the_rights_of_a_local_disk(mnt, local):
    """Owners, sticky directories, supplementary groups, set-group-id directories, set-id bits lost by a write."""

    def prepare(d: Path) -> None:
        d.chmod(0o755)
        for name, mode, gid in (("open", 0o777, 0), ("sticky", 0o1777, 0), ("team", 0o770, 77), ("sgid", 0o2777, 77)):
            (d / name).mkdir()
            os.chown(d / name, 0, gid)
            (d / name).chmod(mode)
        put(d / "sticky/theirs", b"x")
        put(d / "readonly", b"x")
        put(d / "secret", b"x")
        (d / "secret").chmod(0o600)
        put(d / "program", b"x")
        (d / "program").chmod(0o6777)

    def work() -> Any:
        def owner(name: str) -> tuple[int, int, str]:
            seen = os.lstat(name)
            return seen.st_uid, seen.st_gid, oct(seen.st_mode)

        seen: list[Any] = [failing(put, Path(name), b"x") for name in ("new", "readonly", "open/mine", "sgid/mine")]
        seen += [failing(put, Path("team/mine"), b"x"), failing(os.mkdir, "sgid/dir"), failing(os.mkfifo, "open/fifo")]
        seen += [failing(os.symlink, "x", "open/link"), failing(os.link, "open/mine", "open/second")]
        names = ("open/mine", "sgid/mine", "sgid/dir", "open/fifo", "open/link", "open/second")
        seen += [owner(name) for name in names]
        seen += [failing(os.unlink, "sticky/theirs"), failing(os.rename, "sticky/theirs", "sticky/mine")]
        seen += [failing(os.open, "secret", os.O_RDONLY), failing(os.chmod, "readonly", 0o777)]
        seen += [
            failing(os.chown, "open/mine", 0, 0),
            failing(os.utime, "readonly", (1, 1)),
            failing(os.listdir, "team"),
        ]
        seen += [failing(os.setxattr, "readonly", "user.a", b"x"), failing(os.getxattr, "secret", "user.a")]
        seen += [failing(put, Path("program"), b"y", os.O_WRONLY), owner("program")]
        return seen

    for groups in ((), (77,)):
        results = []
        for place in (mnt, local):
            here = place / f"groups-{len(groups)}"
            here.mkdir()
            prepare(here)
            results.append((as_user(1234, here, work, groups=groups), tree(here)))
        assert results[0] == results[1]
        assert results[0][0][4] == (None if groups else "EACCES")


# ---- identity and attributes over time


def test_a_file_keeps_its_identity_when_it_is_overwritten_after_its_save_closed(mounted, mnt):
    """st_dev, st_ino and hard link count stay, through close, publication, and a rewrite of the pinned file."""
    put(mnt / "x.pt", b"first")
    before = os.stat(mnt / "x.pt")
    path = f"{mnt.name}/x.pt"
    mounted.wait(path, "staged")
    for data in (b"second", b"third"):
        put(mnt / "x.pt", data)
        now = os.stat(mnt / "x.pt")
        assert (now.st_dev, now.st_ino, now.st_nlink) == (before.st_dev, before.st_ino, 1)
    mounted.wait(path)
    assert os.stat(mnt / "x.pt").st_ino == before.st_ino


def test_a_reader_of_a_pinned_file_that_is_emptied_reads_one_file(mounted, mnt):
    """Through the daemon it reads what the file holds now; through the kernel what it opened, if it was not published
    by then (test_datapath_holders.py keeps it from that). Never a mixture.
    """
    put(mnt / "x.pt", b"first")
    reader = os.open(mnt / "x.pt", os.O_RDONLY)
    mounted.wait(f"{mnt.name}/x.pt", "staged")
    put(mnt / "x.pt", b"second")
    assert (mnt / "x.pt").read_bytes() == b"second"
    kernel = mounted.status()["data_path"] == "kernel"
    assert os.pread(reader, 10, 0) in ((b"first", b"second") if kernel else (b"second",))
    os.close(reader)
    assert os.stat(mnt / "x.pt").st_nlink == 1


def test_background_work_never_moves_a_time(mounted, mnt):
    """Pinning, staging, upload, publication and the drop of the pins leave the times of file and directory alone."""
    (mnt / "run").mkdir()
    put(mnt / "run/x.pt", b"x" * 100_000)
    os.utime(mnt / "run/x.pt", ns=(LONG_AGO, LONG_AGO))
    os.utime(mnt / "run", ns=(LONG_AGO, LONG_AGO))
    mounted.wait(f"{mnt.name}/run/x.pt")
    staged = mounted.staging / "tree" / mnt.name / "run/x.pt"
    await_condition(lambda: os.stat(staged).st_nlink == 1, "the pin is dropped")
    for place in (mounted.staging / "tree" / mnt.name, mnt):
        seen = os.stat(place / "run/x.pt")
        assert (seen.st_mtime_ns, seen.st_atime_ns, seen.st_nlink) == (LONG_AGO, LONG_AGO, 1)
        assert os.stat(place / "run").st_mtime_ns == LONG_AGO


def test_back_dating_a_file_after_its_close_does_not_cost_its_save(mounted, mnt):
    """As copies that keep times do; the call may come at any moment while the save is being staged and sent."""
    put(mnt / "x.pt", b"x" * 30_000_000)
    count = 0
    while os.getxattr(mnt / "x.pt", "user.cachefs.state") not in (b"published", b"abandoned"):
        count += 1
        os.utime(mnt / "x.pt", ns=(LONG_AGO + count, LONG_AGO + count))
    assert os.getxattr(mnt / "x.pt", "user.cachefs.error") == b""
    assert os.getxattr(mnt / "x.pt", "user.cachefs.state") == b"published"


def test_link_counts_are_truthful_while_pins_come_and_go(mounted, mnt):
    """Looked at again and again while saves of the file are pinned and published."""
    put(mnt / "x.pt", b"first")
    os.link(mnt / "x.pt", mnt / "other")
    seen = set()
    for number in range(20):
        put(mnt / "x.pt", b"%d" % number, os.O_WRONLY)
        seen |= {os.stat(mnt / name).st_nlink for name in ("x.pt", "other") for _ in range(20)}
    mounted.wait(f"{mnt.name}/x.pt")
    assert seen == {2}
    staged = mounted.staging / "tree" / mnt.name / "x.pt"
    await_condition(lambda: os.stat(staged).st_nlink == 2, "the pins are dropped")
    assert os.stat(mnt / "x.pt").st_nlink == 2


def test_statfs_tells_the_truth_about_the_disk(mounted):
    here, there = os.statvfs(mounted.mnt), os.statvfs(mounted.staging)
    for field in ("f_bsize", "f_frsize", "f_blocks", "f_files", "f_namemax"):
        assert getattr(here, field) == getattr(there, field), field
    assert abs(here.f_bavail - there.f_bavail) * here.f_frsize < 1 << 30  # others use the disk meanwhile


def test_the_daemons_own_answers_are_there_for_who_asks_and_listed_to_nobody(mounted, mnt):
    """user.cachefs.* on files and directories of saves, on loose files, on nothing."""
    (mnt / "step-1").mkdir()
    put(mnt / "step-1/x.bin", b"12345")
    assert os.getxattr(mnt / "step-1", "user.cachefs.state") == b"open"
    os.setxattr(mnt / "step-1", "user.cachefs.close", b"1")
    mounted.wait(f"{mnt.name}/step-1")
    put(mnt / "loose.txt", b"x")
    answers = {"state": b"published", "generation": b"step-1", "flushed": b"5/5", "error": b""}
    for place in (mnt / "step-1", mnt / "step-1/x.bin"):
        assert {name: os.getxattr(place, f"user.cachefs.{name}") for name in answers} == answers
        assert os.listxattr(place) == []
    assert os.getxattr(mnt / "loose.txt", "user.cachefs.state") == b"loose"
    assert failing(os.getxattr, mnt, "user.cachefs.state") == "ENODATA"
    assert failing(os.getxattr, mnt / "loose.txt", "user.cachefs.generation") == "ENODATA"
    assert failing(os.setxattr, mnt / "step-1", "user.cachefs.state", b"published") == "ENOTSUP"
    assert failing(os.removexattr, mnt / "step-1", "user.cachefs.state") == "ENOTSUP"
    assert failing(os.setxattr, mounted.mnt, "user.cachefs.close", b"1") == "EINVAL"


def test_private_state_is_invisible(mounted):
    """Journal, pins, socket and lock of the staging directory are not in the mount."""
    names = set(os.listdir(mounted.mnt))
    assert names == set(os.listdir(mounted.staging / "tree"))
    assert not names & {"pins", "journal", "scratch", "control.sock", "lock", "tree"}


# ---- many and large


def test_a_large_directory_is_listed_completely_while_it_changes(mnt):
    """Every name that is there all the time is listed exactly once, whatever else comes and goes."""
    kept = {f"kept-{number:04}" for number in range(5000)}
    for name in sorted(kept):
        put(mnt / name, b"")
    ended = threading.Event()

    def come_and_go() -> None:
        number = 0
        while not ended.is_set():
            put(mnt / f"other-{number % 50}", b"")
            os.rename(mnt / f"other-{number % 50}", mnt / f"renamed-{number % 50}")
            os.unlink(mnt / f"renamed-{number % 50}")
            number += 1

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3):
            listed = [name for name in os.listdir(mnt) if name.startswith("kept")]
            assert len(listed) == 5000
            assert set(listed) == kept
            assert sum(entry.stat().st_size == 0 for entry in os.scandir(mnt) if entry.name in kept) == 5000
    finally:
        ended.set()
        thread.join()
    shutil.rmtree(mnt)


def test_a_listing_is_complete_although_the_kernel_drops_what_it_has_cached_of_it(mnt):
    """As it does when memory is short: whoever is in the middle of it goes on at the same place."""
    names = {f"{number:04}" for number in range(3000)}
    for name in names:
        put(mnt / name, b"")
    assert set(os.listdir(mnt)) == names
    fd = os.open(mnt, os.O_RDONLY)
    with os.scandir(mnt) as entries:
        seen = [next(entries).name]
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        seen += [entry.name for entry in entries]
    os.close(fd)
    assert sorted(seen) == sorted(names)
    shutil.rmtree(mnt)


def test_thousands_of_directories_cost_no_call_its_descriptor(mnt):
    """More directories in use than the usual soft limit of open files."""
    for number in range(1500):
        (mnt / f"{number}").mkdir()
        put(mnt / f"{number}/file", b"")
    assert sum(len(files) for _, _, files in os.walk(mnt)) == 1500
    shutil.rmtree(mnt)


def test_very_deep_directories_do_not_stop_the_daemon(mnt):
    """Deeper than PATH_MAX allows to name at once."""
    name = "d" * 255
    here = os.open(mnt, os.O_RDONLY)
    for _ in range(40):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    fd = os.open("x.pt", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(fd, b"deep")
    os.close(fd)
    assert os.listdir(here) == ["x.pt"]
    os.unlink("x.pt", dir_fd=here)
    for _ in range(40):
        above = os.open("..", os.O_RDONLY, dir_fd=here)
        os.rmdir(name, dir_fd=above)
        os.close(here)
        here = above
    os.close(here)
    assert os.listdir(mnt) == []


def test_a_sparse_file_larger_than_4_gib(mnt):
    """Offsets beyond 32 bits are kept, and holes take no room."""
    size = (5 << 30) + 3
    fd = os.open(mnt / "large.bin", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, size)
        assert os.pwrite(fd, b"middle", 1 << 32) == 6
        assert os.pwrite(fd, b"end", size - 3) == 3
        assert os.pread(fd, 8, (1 << 32) - 1) == b"\0middle\0"
        assert os.pread(fd, 10, size - 4) == b"\0end"
        seen = os.fstat(fd)
        assert (seen.st_size, seen.st_blocks * 512 < 1 << 20) == (size, True)
    finally:
        os.close(fd)
        os.unlink(mnt / "large.bin")


def test_rmtree_beside_readers(mnt):
    """Rotation removes a directory by descriptors while it is being read: it ends empty-handed, never with an error."""
    errors: list[OSError] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            for root, _, files in os.walk(mnt):
                for name in files:
                    try:
                        Path(root, name).read_bytes()
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(10):
            for rank in range(20):
                path = mnt / f"step-{step}/inner/{rank}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"x" * 5000)
            shutil.rmtree(mnt / f"step-{step}")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert os.listdir(mnt) == []


def test_many_writers_at_once(mnt):
    """Threads create, write, rename and read files of one directory: each finds its own bytes."""
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(30):
            data = os.urandom(1000 + number)
            put(mnt / f"{number}.tmp", data)
            os.replace(mnt / f"{number}.tmp", mnt / f"{number}.pt")
            if (mnt / f"{number}.pt").read_bytes() != data:
                wrong.append(f"{number} in turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(os.listdir(mnt)) == 8


def test_a_writer_that_is_killed_leaves_what_it_wrote(mnt):
    """The kernel closes its files; nothing stays open in the daemon."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        fd = os.open(mnt / "x.bin", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"half")
        os.write(writer, b"1")
        signal.pause()
    assert os.read(reader, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert (mnt / "x.bin").read_bytes() == b"half"
    assert stat.S_ISREG(os.stat(mnt / "x.bin").st_mode)
