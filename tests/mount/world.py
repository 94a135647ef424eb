"""The file system of the mount without a kernel: its semantics on a real staging directory, and an observer that keeps
what it is told and holds back what a test wants held back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import trio

from cachefs.mount.attributes import Attributes
from cachefs.mount.content import Content
from cachefs.mount.inodes import ROOT_ID, Node
from cachefs.mount.kernel import Passthrough
from cachefs.mount.namespace import Namespace
from cachefs.mount.tree import Caller, Tree
from cachefs.staging.changes import Change, Kind
from cachefs.staging.layout import Staging
from cachefs.staging.pins import Pins

ME = Caller(os.getuid(), os.getgid())


class Recorder:
    """An observer. `holding` makes every operation on a path wait until `let_go`."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.room = True
        self.durable_calls = 0
        self.holding: dict[bytes, trio.Event] = {}
        self.waiting = 0

    def before(self, change):
        event = self.holding.get(change.path)
        return None if event is None else self._wait(event)

    async def _wait(self, event):
        self.waiting += 1
        await event.wait()
        self.waiting -= 1

    def hold(self, path: bytes) -> None:
        self.holding[path] = trio.Event()

    def let_go(self, path: bytes) -> None:
        self.holding.pop(path).set()

    def after(self, change):
        self.changes.append(change)

    async def durable(self):
        self.durable_calls += 1

    async def wait_for_room(self):
        if not self.room:
            raise OSError(errno.ENOSPC, "full")

    def answer(self, path, name):
        return {"state": b"staged" if path else None, "socket": None if path else b"/socket"}.get(name)

    async def request(self, path, name):
        raise OSError(errno.EBUSY, f"asked for {path!r}")

    def told(self) -> list[tuple[Kind, bytes]]:
        """Return what was told since the last call."""
        told = [(change.kind, change.path) for change in self.changes]
        self.changes.clear()
        return told


class World:
    """Paths in, system calls out: each method is what the kernel would ask for one call of a program."""

    def __init__(self, root: Path) -> None:
        self.staging = Staging(root)
        self.pins = Pins(self.staging)
        self.observer = Recorder()
        self.tree = Tree(self.staging, self.pins, self.observer, Passthrough("python", overlay=False))
        self.table = self.tree.table
        self.names = Namespace(self.tree)
        self.content = Content(self.tree, self.names)
        self.attributes = Attributes(self.tree, self.content)

    def close(self) -> None:
        self.staging.close()

    def walk(self, path: bytes) -> tuple[int, bytes]:
        """Look every directory of a path up; return the parent's node id and the last name."""
        *above, name = path.split(b"/")
        parent = ROOT_ID
        for part in above:
            entry = self.names.lookup(parent, part)
            assert entry is not None, path
            parent = entry[0].id
        return parent, name

    def node(self, path: bytes) -> Node:
        entry = self.names.lookup(*self.walk(path))
        assert entry is not None, path
        return entry[0]

    async def mkdir(self, path: bytes, mode: int = 0o755) -> Node:
        return (await self.names.mkdir(*self.walk(path), mode, ME))[0]

    async def create(self, path: bytes, flags: int = os.O_RDWR, mode: int = 0o644) -> int:
        return (await self.content.create(*self.walk(path), mode, flags | os.O_CREAT, ME))[0]

    async def open(self, path: bytes, flags: int = os.O_RDONLY) -> int:
        return await self.content.open(self.node(path).id, flags)

    async def put(self, path: bytes, data: bytes) -> None:
        handle = await self.create(path)
        await self.content.write(handle, 0, data)
        await self.content.release(handle)

    async def read(self, path: bytes) -> bytes:
        handle = await self.open(path)
        data = self.content.read(handle, 0, 1 << 20)
        await self.content.release(handle)
        return data

    async def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        await self.names.rename(*self.walk(old), *self.walk(new), flags)

    async def unlink(self, path: bytes) -> None:
        await self.names.unlink(*self.walk(path))

    def pin(self, path: bytes, attempt: str = "a", shard: str = "s") -> None:
        above, _, name = path.rpartition(b"/")
        fd = os.open(self.staging.tree / os.fsdecode(above), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.pins.add(attempt, shard, fd, name)
        finally:
            os.close(fd)

    def pinned(self, attempt: str = "a", shard: str = "s") -> bytes:
        return self.pins.path(attempt, shard).read_bytes()

    def links(self, path: bytes) -> int:
        node = self.node(path)
        return self.tree.stat(node).st_nlink - node.pins
