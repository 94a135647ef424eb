"""The bytes of files on both data paths: every kind of I/O, files that others hold open, a daemon that dies under them,
a disk that is full.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cachefs.formats.keys import Keys
from cachefs.restore import reader
from cachefs.restore.shards import read_shard
from cachefs.store.open import open_store
from integration.disks import disk
from integration.fsx import Checker
from integration.node import Node, await_condition, node
from integration.posix import failing, put, tree
from integration.proxy import reset
from integration.world import MIB, SHARD, World, assert_same, await_state, metric, save, states, status, tensors, write

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, and the kernel data path needs root"),
]
PATHS = ["kernel", "python"]
OUTLIVE = Path(__file__).with_name("scripts") / "outlive.py"


@pytest.fixture(params=PATHS)
def data_path(request) -> str:
    return request.param


@pytest.fixture
def made(tmp_path, data_path) -> Iterator[Callable[..., Node]]:
    """Makes a node with a directory store that a test may stop and kill."""
    with ExitStack() as stack:

        def make(*options: str, on: str = "") -> Node:
            (tmp_path / "store").mkdir()
            one = Node(tmp_path, f"file://{tmp_path}/store", options=("--data-path", data_path, *options))
            if on:
                one.staging = stack.enter_context(disk(on, tmp_path)) / "staging"
            stack.callback(one.end)
            return one.start()

        yield make


def published(one: Node, run: str, generation: str) -> bytes:
    """Return the bytes of a single-file generation in a directory store."""
    store = open_store(one.store)
    (shard,) = reader.load_manifest(store, run, reader.find(store, Keys(store.prefix), run, generation)).shards
    found = bytearray()
    read_shard(store, shard, lambda _at, data: found.extend(data))
    return bytes(found)


# ---- every kind of I/O


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


# ---- files that others hold open


class Holders:
    """Random calls on a few names of one directory, by holders that keep their descriptors. The same seed makes the
    same calls, whatever they return.
    """

    def __init__(self, directory: Path, seed: int, names: list[str], *, emptying: bool) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.names = names
        self.flags = [os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDONLY, os.O_WRONLY | os.O_APPEND]
        self.flags += [os.O_RDWR | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_TRUNC] if emptying else []
        self.least = 0 if emptying else 1
        self.fds: list[int] = []

    def path(self) -> Path:
        return self.directory / self.random.choice(self.names)

    def seen(self, fd: int) -> tuple[int, int, bytes]:
        stat = os.fstat(fd)
        return stat.st_size, stat.st_nlink, failing(os.pread, fd, 500, 0)

    def open(self) -> Any:
        if len(self.fds) > 12:
            os.close(self.fds.pop(self.random.randrange(len(self.fds))))
        fd = failing(os.open, self.path(), self.random.choice(self.flags), 0o644)
        if not isinstance(fd, int):
            return fd
        self.fds.append(fd)
        return self.seen(fd)

    def use(self) -> Any:
        at, data = self.random.randrange(300), self.random.randbytes(self.random.randrange(1, 200))
        call = self.random.randrange(3)
        size = self.random.randrange(self.least, 500)
        if not self.fds:
            return None
        fd = self.fds[at % len(self.fds)]
        if call == 0:
            return failing(os.ftruncate, fd, size), self.seen(fd)
        return failing(os.pwrite, fd, data, at) if call == 1 else None, self.seen(fd)

    def close(self) -> Any:
        return os.close(self.fds.pop(self.random.randrange(len(self.fds)))) if self.fds else None

    def truncate(self) -> Any:
        return failing(os.truncate, self.path(), self.random.randrange(self.least, 500))

    def rename(self) -> Any:
        return failing(os.rename, self.path(), self.path())

    def unlink(self) -> Any:
        return failing(os.unlink, self.path())

    def link(self) -> Any:
        return failing(os.link, self.path(), self.path())

    def same(self) -> Any:
        one, two = self.path(), self.path()
        return failing(lambda: os.path.samefile(one, two))

    def run(self, steps: int) -> list[Any]:
        """Return what every call gave, and in the end what every holder and the directory have."""
        calls = (self.open, self.open, self.use, self.use, self.use, self.close, self.truncate, self.rename)
        calls += (self.unlink, self.link, self.same)
        found: list[Any] = []
        for _ in range(steps):
            call = self.random.choice(calls)
            found.append((call.__name__, call()))
        found += [self.seen(fd) for fd in self.fds]
        for fd in self.fds:
            os.close(fd)
        return [*found, tree(self.directory)]


@pytest.mark.parametrize("names", ["loose", "saves"])
def test_holders_of_open_files_see_what_a_local_disk_shows(mounted, mnt, tmp_path, names):
    """Renames, unlinks, truncations, links and re-opens of files while others hold them open. `saves` are pinned as
    soon as nobody writes them; with the kernel path nothing empties those (the tests below say what that does).
    """
    suffix = "bin" if names == "loose" else "pt"
    emptying = names == "loose" or "kernel" not in mounted.options
    for seed in range(6):
        results = []
        for place in (mnt / f"{seed}", tmp_path / f"{seed}"):
            place.mkdir()
            results.append(Holders(place, seed, [f"{n}.{suffix}" for n in range(3)], emptying=emptying).run(200))
        for number, (here, there) in enumerate(zip(*results, strict=True)):
            assert here == there, f"seed {seed}, call {number}"
        assert sum(isinstance(one[1], tuple) for one in results[0][:200]) > 30


CHANGES = {
    "O_TRUNC": (True, lambda path: os.open(path, os.O_RDWR | os.O_TRUNC)),
    "O_CREAT and O_TRUNC": (True, lambda path: os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)),
    "truncate to nothing": (True, lambda path: (os.truncate(path, 0), os.open(path, os.O_RDWR))[1]),
    "truncate to a part": (False, lambda path: (os.truncate(path, 5000), os.open(path, os.O_RDWR))[1]),
    "r+b": (False, lambda path: os.open(path, os.O_RDWR)),
    "append": (False, lambda path: os.open(path, os.O_RDWR | os.O_APPEND)),
}
"""Ways to begin to write to a pinned file, and whether they empty it."""


@pytest.mark.parametrize("names", ["one name", "two names"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_pinned_file_is_written_while_others_hold_it(pinning, mnt_pinned, change, names):
    """The closed save keeps its bytes. Readers and maps see the change as on a local disk, but for one case: with the
    kernel path, who holds a file with one name when it is emptied keeps the old file, as if it had been replaced by a
    rename: the old bytes, to the end, no link left, and under the name is another file.
    """
    empties, begin = CHANGES[change]
    path = mnt_pinned / "x.pt"
    old, new = b"o" * 10_000, b"n" * 4096
    put(path, old)
    if names == "two names":
        os.link(path, mnt_pinned / "best.bin")
    await_state(pinning, f"{mnt_pinned.name}/x.pt", "staged")
    (pin,) = [pin for pin in (pinning.staging / "pins").glob("*/*") if os.path.samefile(pin, staged(pinning, path))]
    reader_fd = os.open(path, os.O_RDONLY)
    before = os.fstat(reader_fd)
    shared = mmap.mmap(reader_fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    private = mmap.mmap(reader_fd, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    assert shared[:] == private[:] == old[:4096]

    writer = begin(path)
    os.write(writer, new)
    keeps = empties and names == "one name" and "kernel" in pinning.options
    size = {"append": 14_096, "r+b": 10_000, "truncate to a part": 5000}.get(change, 4096)
    head = old[:4096] if change == "append" else new
    assert (os.fstat(writer).st_size, path.read_bytes()[:4096]) == (size, head)
    now = os.fstat(reader_fd)
    if keeps:
        assert os.pread(reader_fd, 20_000, 0) == old
        assert shared[:] == private[:] == old[:4096]
        assert (now.st_size, now.st_nlink, now.st_ino) == (10_000, 0, before.st_ino)
        assert os.stat(path).st_ino != before.st_ino
    else:
        assert os.pread(reader_fd, 4096, 0) == shared[:] == private[:] == head
        assert (now.st_size, now.st_nlink, now.st_ino) == (size, before.st_nlink, before.st_ino)
        assert os.path.samestat(now, os.stat(path))
    assert pin.read_bytes() == old
    os.pwrite(writer, b"more", 100)
    os.close(writer)
    shared.close()
    private.close()
    os.close(reader_fd)
    assert path.read_bytes() == staged(pinning, path).read_bytes()
    assert os.stat(path).st_size == size + (4 if change == "append" else 0)
    assert pin.read_bytes() == old
    if names == "two names":
        assert os.path.samefile(path, mnt_pinned / "best.bin")
    await_condition(
        lambda: states(pinning, f"{mnt_pinned.name}/x.pt") == ["staged", "staged"], "what was written is a save, too"
    )


@pytest.fixture(scope="module", params=PATHS)
def pinning(request, tmp_path_factory) -> Iterator[Node]:
    """A mount that keeps all its saves pinned, since it publishes nothing."""
    root = tmp_path_factory.mktemp(f"pinning-{request.param}")
    (root / "store").mkdir()
    options = ("--data-path", request.param, "--no-publish", "--quiet", "0.1", "--settle", "0.1")
    with node(root, f"file://{root}/store", options=options) as one:
        yield one
        assert "Traceback" not in one.logged()


@pytest.fixture
def mnt_pinned(pinning) -> Path:
    """An empty directory of that mount."""
    path = pinning.mnt / f"{len(os.listdir(pinning.mnt))}.d"
    path.mkdir()
    return path


def staged(one: Node, path: Path) -> Path:
    """Return the staging file of a file in the mount."""
    return one.staging / "tree" / path.relative_to(one.mnt)


# ---- listings


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


# ---- the daemon dies


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
    assert training.ask("calls") == works | {"stat": True, "open": None}  # the path leads to the new mount
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


# ---- the disk is full


@pytest.mark.server
def test_a_full_staging_disk_costs_its_writer_an_error_and_nothing_else(world: World, data_path):
    """The store is away and staging fills up to the last block: the writer gets ENOSPC, a new file waits and gets it,
    too, and saves still close. When the store is back, what was saved before and deleted gives its room back, the save
    is written again, and nothing that was cut short is ever in the store.
    """
    place = world.enter(disk("ext4", world.root / "node", 128 * MIB))
    (world.root / "node/staging").symlink_to(place)
    one = world.node("node", "--data-path", data_path, "--full-timeout", "1", metrics=True)
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
    kept back for its own needs is used, too.
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
                if done == full:
                    return done
                full = done
            piece = 512 if piece == 4096 else 4096
