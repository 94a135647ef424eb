"""The bytes of files on both data paths: every kind of I/O, on every disk, and listings."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from integration.fsx import Checker
from integration.node import await_condition
from integration.posix import put
from integration.world import MIB, published

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, and the kernel data path needs root"),
]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_random_operations_on_every_disk_and_across_a_restart(kind, made):
    """Writes, truncations, maps, renames and reopens, while saves of the file are pinned (XFS: by reflink), sent and
    released; then the daemon starts again, and the same model goes on. What is published in the end are its bytes.
    """
    one = made("--early-upload-delay", "0.05", on=kind)
    (one.mnt / "run").mkdir()
    checkers = [Checker(one.mnt / "run" / f"{seed}.pt", seed) for seed in range(2)]
    for _ in range(2):
        for checker in checkers:
            checker.run(150)
        assert one.stop() == 0, one.logged()
        one.start()
    for checker in checkers:
        put(checker.path, b"the end", os.O_WRONLY | os.O_APPEND)
        checker.model += b"the end"
        one.wait(f"run/{checker.path.name}")
        assert published(one, "run", checker.path.name) == checker.model
    assert sum(checker.closed for checker in checkers) > 50
    await_condition(lambda: not list((one.staging / "pins").iterdir()), "no pin is left")
    assert one.stop() == 0, one.logged()
    for checker in checkers:
        assert (one.staging / "tree/run" / checker.path.name).read_bytes() == checker.model


@pytest.mark.parametrize(
    ("jobs", "block", "how"),
    [
        pytest.param(4, "4k", ("--ioengine=psync",), id="psync"),
        pytest.param(4, "16k", ("--ioengine=libaio", "--direct=1", "--iodepth=16"), id="libaio with O_DIRECT"),
        pytest.param(4, "64k", ("--ioengine=psync", "--direct=1", "--fsync=8"), id="psync with O_DIRECT and fsync"),
        # fio's own maps of several jobs on one file overlap, on a local disk too.
        pytest.param(1, "4k", ("--ioengine=mmap",), id="mmap"),
    ],
)
def test_fio_finds_every_block_that_it_wrote(mounted, mnt, jobs, block, how):
    """Processes write their parts of one file in random order, with checksums; all is read back from the mount, and
    then from the staging file itself.
    """
    share = (f"--size={16 // jobs}m", f"--offset_increment={16 // jobs}m", f"--numjobs={jobs}", f"--bs={block}")

    def fio(path: Path, *options: str) -> None:
        command = ["fio", "--name=job", f"--filename={path}", "--rw=randwrite", "--verify=crc32c", "--verify_fatal=1"]
        command += [*share, *options, "--fallocate=none", "--allow_file_create=0", "--verify_state_save=0"]
        done = subprocess.run(command, cwd=mnt, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    with (mnt / "x.bin").open("wb") as file:
        file.truncate(16 * MIB)
    fio(mnt / "x.bin", *how)
    fio(mounted.staging / "tree" / mnt.name / "x.bin", "--verify_only")
    os.unlink(mnt / "x.bin")


def append_lines(path: Path, who: int, lines: int) -> int:
    """Start a process that appends lines, each in one write; return its id."""
    child = os.fork()
    if child == 0:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number in range(lines):
                os.write(fd, b"%d %06d %s\n" % (who, number, b"x" * (number % 50)))
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_two_processes_append_to_one_file_and_no_line_is_lost(mounted, mnt):
    """As on a local disk: every write lands whole at the end of that moment, in the order of its process."""
    children = [append_lines(mnt / "log.txt", who, 500) for who in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    lines = (mnt / "log.txt").read_bytes().splitlines()
    for who in range(2):
        wanted = [b"%d %06d %s" % (who, number, b"x" * (number % 50)) for number in range(500)]
        assert [line for line in lines if line.startswith(b"%d " % who)] == wanted
    assert len(lines) == 1000


def test_a_listing_of_3000_entries_is_fresh_after_every_change(mounted, mnt):
    """The kernel keeps listings (FOPEN_CACHE_DIR), of the directory and of every descriptor on it."""
    names = {f"file-{number:04}" for number in range(3000)}
    for name in names:
        os.close(os.open(mnt / name, os.O_WRONLY | os.O_CREAT))
    moments = random.Random(3)
    fd = os.open(mnt, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(30):
            assert set(os.listdir(mnt)) == set(os.listdir(fd)) == names
            one = moments.choice(sorted(names))
            match number % 5:
                case 0:
                    put(mnt / f"new-{number}", b"")
                    names.add(f"new-{number}")
                case 1:
                    os.unlink(mnt / one)
                    names.remove(one)
                case 2:
                    os.rename(mnt / one, mnt / f"renamed-{number}")
                    names ^= {one, f"renamed-{number}"}
                case 3:
                    os.mkdir(mnt / f"dir-{number}")
                    names.add(f"dir-{number}")
                case 4:
                    os.link(mnt / one, mnt / f"link-{number}") if not one.startswith("dir") else None
                    names |= set() if one.startswith("dir") else {f"link-{number}"}
        # Listings that are under way while the directory changes must not be what is kept.
        errors: list[set[str]] = []
        ended = threading.Event()

        def change() -> None:
            for number in range(60):
                put(mnt / f"late-{number}", b"")
                names.add(f"late-{number}")
                if number % 3 == 0:
                    os.unlink(mnt / f"late-{number}")
                    names.remove(f"late-{number}")
                if (wrong := set(os.listdir(mnt)) ^ names) != set():
                    errors.append(wrong)
            ended.set()

        thread = threading.Thread(target=change)
        thread.start()
        while not ended.is_set():
            os.listdir(fd)
        thread.join()
        assert errors == []
        assert set(os.listdir(fd)) == names
    finally:
        os.close(fd)
    shutil.rmtree(mnt)
