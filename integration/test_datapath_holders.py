"""Files that others hold open while they are changed, on both data paths: first as on a local disk, then pinned."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.node import Node, await_condition, node
from integration.posix import failing, put, tree
from integration.world import await_state, states

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, and the kernel data path needs root"),
]


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


@pytest.fixture(scope="module", params=["kernel", "python"])
def pinning(request, tmp_path_factory) -> Iterator[Node]:
    """A mount that keeps all its saves pinned, since its store never answers."""
    root = tmp_path_factory.mktemp(f"pinning-{request.param}")
    options = (
        "--data-path",
        request.param,
        "--endpoint-url",
        "http://127.0.0.1:1",
        "--quiet",
        "0.1",
        "--settle",
        "0.1",
    )
    environ = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    with node(root, "s3://bucket", options=options, environ=environ) as one:
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
