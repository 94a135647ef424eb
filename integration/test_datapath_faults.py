"""The bytes of files on both data paths when the daemon dies under those who use them, or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from integration.disks import disk
from integration.node import Node, await_condition
from integration.posix import failing, put
from integration.proxy import reset
from integration.world import (
    MIB,
    SHARD,
    World,
    assert_same,
    await_state,
    metric,
    published,
    save,
    states,
    status,
    tensors,
    write,
)

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, and the kernel data path needs root"),
]
OUTLIVE = Path(__file__).with_name("scripts") / "outlive.py"


class Outliving:
    """A process that holds files of a mount open; see scripts/outlive.py."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        command = [sys.executable, str(OUTLIVE), str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else self.process.wait()

    def ask(self, what: str) -> Any:
        """Return what a round of calls gave; the exit code when the process died in it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def outliving() -> Iterator[Callable[[Path], Outliving]]:
    with ExitStack() as stack:

        def start(directory: Path) -> Outliving:
            one = Outliving(directory)
            stack.callback(one.end)
            return one

        yield start


@pytest.mark.parametrize("data_path", ["kernel"], indirect=True)
def test_files_open_through_the_kernel_path_outlive_a_kill_of_the_daemon(made, outliving):
    """Reads, writes and maps go on, before and after the next start; all that asks the daemon gives ENOTCONN. What is
    written is in the staging file and in the new mount; a save that was closed is published, and one that is still
    written is published when its writer has closed it, whole.
    """
    one = made()
    training = outliving(one.mnt / "run")
    (one.mnt / "other").mkdir()
    put(one.mnt / "other/closed.pt", b"closed" * 1000)
    one.kill()
    works = {
        "read": "mapped",
        "read what was not read before": "uuu",
        "write": 6,
        "append": 6,
        "write the second half": 13,
        **dict.fromkeys(("fstat", "fsync", "ftruncate"), "ENOTCONN"),
    }
    assert training.ask("calls") == works | {"stat": "ENOTCONN", "open": "ENOTCONN"}
    assert training.ask("maps") == ["mapped", "after ", "shared"]
    assert training.ask("unread") == "u"

    one.start()
    directory = one.mnt / "run"
    assert (directory / "append.bin").read_bytes() == b"before after "
    sizes = [os.stat(directory / "append.bin").st_size]
    assert training.ask("calls") == works | {"stat": True, "open": None}  # the path leads to the new mount
    sizes.append(os.stat(directory / "append.bin").st_size)
    assert sizes == [13, 19]
    assert training.ask("maps") == ["mapped", "after ", "shared"]
    seen = bytearray(b"s" * 100_000)
    seen[0:6] = b"mapped"
    for at in (1000, 2000):
        seen[at : at + 6], seen[at + 100 : at + 106] = b"after ", b"shared"
    for place in (directory, one.staging / "tree/run"):
        assert (place / "seen.bin").read_bytes() == seen
        assert (place / "append.bin").read_bytes() == b"before after after "
    one.wait("other/closed.pt")
    assert published(one, "other", "closed.pt") == b"closed" * 1000
    # closed.pt was quiet for longer, so half.pt would be closed by now if it counted as whole.
    assert states(one, "run/half.pt") == ["open"]
    assert training.ask("end") == [None] * 4
    one.wait("run/half.pt")
    assert published(one, "run", "half.pt") == b"first half, second half, second half, "
    assert one.stop() == 0


@pytest.mark.parametrize("data_path", ["python"], indirect=True)
def test_files_open_through_the_python_path_give_clean_errors_after_a_kill_of_the_daemon(made, outliving):
    """ENOTCONN from every call but reads of what the page cache holds; a map gives what is in memory, and SIGBUS where
    it was not read before. What was written until then is in staging; a save that was closed is published.
    """
    one = made()
    training = outliving(one.mnt / "run")
    (one.mnt / "other").mkdir()
    put(one.mnt / "other/closed.pt", b"closed" * 1000)
    one.kill()
    found = training.ask("calls")
    assert found.pop("read") == "mapped"
    assert set(found.values()) == {"ENOTCONN"}
    assert training.ask("unread") == -signal.SIGBUS
    one.start()
    assert (one.mnt / "run/append.bin").read_bytes() == b"before "
    assert (one.staging / "tree/run/half.pt").read_bytes() == b"first half, "
    one.wait("other/closed.pt")
    assert published(one, "other", "closed.pt") == b"closed" * 1000
    assert one.stop() == 0


@pytest.mark.server
def test_a_full_staging_disk_costs_its_writer_an_error_and_nothing_else(world: World, data_path):
    """The store is away and staging fills up to the last block: the writer gets ENOSPC, a new file waits and gets it,
    too, and saves still close. When the store is back, what was saved before and deleted gives its room back, the save
    is written again, and nothing that was cut short is ever in the store.
    """
    place = world.enter(disk("ext4", world.root / "node", 128 * MIB))
    (world.root / "node/staging").symlink_to(place)
    one = world.node("node", "--data-path", data_path, "--full-timeout", "1", "--reserve", "1GiB", metrics=True)
    world.proxy.on("", reset, times=None)
    first = save(one.mnt / "run/step-1", {"m-1.safetensors": tensors(40 * MIB), "m-2.safetensors": tensors(9)})
    await_state(one, "run/step-1", "staged")
    shutil.rmtree(one.mnt / "run/step-1")
    write(one.mnt / "other/step-1/m.safetensors", tensors(5))
    marker = os.open(one.mnt / "other/step-1/model.safetensors.index.json", os.O_WRONLY | os.O_CREAT)
    os.write(marker, b'{"weight_map": {"w": "m.safetensors"}}')

    large = tensors(70 * MIB)
    (one.mnt / "run/step-2").mkdir()
    fd = os.open(one.mnt / "run/step-2/m.safetensors", os.O_WRONLY | os.O_CREAT)
    cut = fill(fd, large * 2)
    os.close(fd)
    assert 60 * MIB < cut < 130 * MIB
    assert one.mnt.joinpath("run/step-2/m.safetensors").stat().st_size == cut
    assert os.statvfs(one.mnt).f_bavail == 0
    names = (one.mnt / f"late-{number}" for number in count())
    await_condition(lambda: failing(os.mknod, next(names)) == "ENOSPC", "new files are refused")
    os.close(marker)
    await_state(one, "other/step-1", "staged")
    assert failing(put, one.mnt / "torn.safetensors", b"x") == "ENOSPC"  # not even created
    assert failing(os.stat, one.mnt / "torn.safetensors") == "ENOENT"
    assert one.process is not None
    assert one.process.poll() is None
    assert states(one, "run/step-2") == ["open"]

    world.proxy.end()
    await_state(one, "run/step-1")
    await_state(one, "other/step-1")
    assert_same(world.bucket.files("run"), first)
    await_condition(lambda: os.statvfs(one.mnt).f_bavail * 4096 > 35 * MIB, "the room is free again")
    second = save(one.mnt / "run/step-2", {"m.safetensors": tensors(60 * MIB, 2)})
    await_state(one, "run/step-2")
    assert metric(one, "cachefs_engine_restarts") == 0
    assert "Traceback" not in one.logged()
    shards = [key for key in world.bucket.keys("runs/") if SHARD in key]
    sizes = {world.bucket.client.head_object(Bucket=world.bucket.bucket, Key=key)["ContentLength"] for key in shards}
    assert sizes <= {len(data) for data in (*first.values(), *second.values())} | {38, len(tensors(5))}
    assert status(one)["backlog_files"] == 0
    assert one.stop() == 0, one.logged()
    assert_same(world.bucket.files("run"), second)


def fill(fd: int, data: bytes) -> int:
    """Write until the disk is full, the last blocks in small pieces; return how many bytes fit. What the file system
    kept back for its own needs is used, too, and what it gives back late.
    """
    done, full, piece = 0, -1, MIB
    while True:
        try:
            done += os.write(fd, data[done : done + piece])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            if piece == 512:
                os.fsync(fd)
                if done == full and os.fstatvfs(fd).f_bavail == 0:
                    return done
                full = done
            piece = 512 if piece == 4096 else 4096


def test_more_directories_than_descriptors(made, monkeypatch):
    """Every directory that was visited stays known to the kernel; none keeps a descriptor from who needs one."""
    command = Node.command
    monkeypatch.setattr(Node, "command", lambda self, *extra: ["prlimit", "--nofile=128", *command(self, *extra)])
    one = made("--loose-interval", "3600")
    for number in range(300):
        (one.mnt / f"d{number}").mkdir()
        put(one.mnt / f"d{number}/x", b"%d" % number)
    os.rename(one.mnt / "d0/x", one.mnt / "d1/x")
    assert (one.mnt / "d1/x").read_bytes() == b"0"
    assert [(one.mnt / f"d{number}/x").read_bytes() for number in range(2, 300)] == [b"%d" % n for n in range(2, 300)]
    assert sum(entry.is_dir() and entry.stat().st_nlink == 2 for entry in os.scandir(one.mnt)) == 300
    assert one.stop() == 0


def test_a_change_that_was_carried_out_and_refused_is_seen(tmp_path):
    """The kernel takes an error to say that nothing was done: it has to ask again for every name, of which it would
    believe what it knows for minutes.
    """
    staging, mnt = tmp_path / "staging", tmp_path / "mnt"
    made, link, symlink, node, file, moved = (mnt / "refused" / name for name in "abcdef")
    command = [sys.executable, str(OUTLIVE.with_name("refusing.py")), str(staging), str(mnt)]
    with subprocess.Popen(command) as serving:
        try:
            await_condition(lambda: os.path.ismount(mnt), "it is mounted")
            made.parent.mkdir()
            put(mnt / "whole", b"bytes")
            assert not any(map(os.path.lexists, (made, link, symlink, node, file, moved)))
            assert [
                failing(os.mkdir, made),
                failing(os.link, mnt / "whole", link),
                failing(os.symlink, "whole", symlink),
                failing(os.mknod, node, stat.S_IFREG | 0o644),
                failing(os.open, file, os.O_CREAT | os.O_WRONLY),
                failing(os.rename, mnt / "whole", moved),
            ] == ["EIO"] * 6
            await_condition(
                lambda: all(map(os.path.lexists, (made, link, symlink, node, file, moved))), "what was made is there"
            )
            await_condition(lambda: not (mnt / "whole").exists(), "the old name is gone")
            assert moved.read_bytes() == b"bytes"
            assert [failing(os.rmdir, made), failing(os.unlink, link)] == ["EIO"] * 2
            await_condition(lambda: not any(map(os.path.lexists, (made, link))), "what was removed is gone")
            await_condition(lambda: sorted(os.listdir(made.parent)) == ["c", "d", "e", "f"], "it is listed so")
        finally:
            subprocess.run(["fusermount3", "-u", "-z", mnt], check=False, capture_output=True)
            try:
                serving.wait(20)
            except subprocess.TimeoutExpired:
                serving.kill()
