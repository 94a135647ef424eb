"""No descriptor is left: a call fails then, and leaves nothing behind that the kernel would never release."""

from __future__ import annotations

import errno
import os
import stat
from itertools import count

import pytest

from cachefs.mount.inodes import LEAST_OPEN
from cachefs.mount.kernel import DataPath
from cachefs.staging.changes import Kind


class Limit:
    """Lets some calls of os.open succeed, and then fails them."""

    def __init__(self, monkeypatch) -> None:
        self.left = 1 << 30
        self._open = os.open
        monkeypatch.setattr(os, "open", self._limited)

    def _limited(self, *arguments, **options):
        if self.left == 0:
            raise OSError(errno.EMFILE, "too many open files")
        self.left -= 1
        return self._open(*arguments, **options)


@pytest.fixture
def limit(world, monkeypatch) -> Limit:
    """With the kernel path, which backs every file by a descriptor of its own."""
    backing = count(1)
    monkeypatch.setattr(type(world.tree.passthrough), "mode", DataPath.KERNEL)
    monkeypatch.setattr(world.tree.passthrough, "open", lambda fd, file, known: known or next(backing))
    monkeypatch.setattr(world.tree.passthrough, "close", lambda fd, backing, last: None)
    return Limit(monkeypatch)


def left_behind(world) -> tuple:
    """Return what the tables hold, and how many descriptors are open."""
    names = sorted(os.listdir(world.staging.tree))
    return names, len(world.tree.handles), len(world.table), len(os.listdir("/proc/self/fd"))


async def every_position(world, limit, call) -> int:
    """Make a call with fewer descriptors than it needs; return how many it took when it succeeded."""
    for position in count():
        before = left_behind(world)
        limit.left = position
        handle = failed = None
        try:
            handle = await call()
        except OSError as error:
            failed = error.errno
        limit.left = 1 << 30
        if handle is not None:
            await world.content.release(handle)
            return position
        assert (failed, left_behind(world)) == (errno.EMFILE, before)
    raise AssertionError


async def test_a_create_without_descriptors_leaves_no_file(world, limit):
    assert await every_position(world, limit, lambda: world.create(b"x.pt")) == 2
    assert world.node(b"x.pt").writers == 0
    assert world.observer.told() == [(Kind.CREATED, b"x.pt"), (Kind.CLOSED, b"x.pt")]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
async def test_an_open_without_descriptors_changes_nothing(world, limit, flags):
    """Of a file that would be emptied no byte is lost, and its save still closes when it is written later."""
    await world.put(b"x.pt", b"bytes")
    node = world.node(b"x.pt")
    world.observer.told()
    sizes = []

    async def call():
        sizes.append(os.stat(world.staging.tree / "x.pt").st_size)
        return await world.content.open(node.id, flags)

    assert await every_position(world, limit, call) == 2
    assert sizes == [5, 5, 5]
    assert (node.writers, node.backed, len(node.handles)) == (0, 0, 0)
    assert [kind for kind, _ in world.observer.told()][-1:] == ([] if flags == os.O_RDONLY else [Kind.CLOSED])


async def test_directories_that_are_not_used_cost_no_descriptor(world):
    """The kernel remembers every directory that it has seen: more of them than there may be descriptors."""
    world.table.most_open = LEAST_OPEN
    before = len(os.listdir("/proc/self/fd"))
    names = [b"d%d" % number for number in range(3 * LEAST_OPEN)]
    for name in names:
        await world.mkdir(name)
        await world.put(name + b"/x", name)
    assert len(os.listdir("/proc/self/fd")) == before + LEAST_OPEN
    for name in names:
        assert await world.read(name + b"/x") == name
    await world.rename(names[0], b"moved")
    await world.rename(b"moved/x", names[1] + b"/x")
    assert await world.read(names[1] + b"/x") == names[0]
    assert os.listdir(world.staging.tree / "moved") == []


async def test_a_directory_in_use_keeps_its_descriptor_however_deep_others_are(world):
    """Two names of a rename are reached at the same time."""
    world.table.most_open = LEAST_OPEN
    path = b"/".join([b"d"] * 3 * LEAST_OPEN)
    nodes = [await world.mkdir(path[: 2 * depth + 1]) for depth in range(3 * LEAST_OPEN)]
    other = await world.mkdir(b"other")
    used = world.table.descriptor(other)
    for node in nodes[:LEAST_OPEN]:
        world.table.descriptor(node)
    assert other.dir_fd == -1, "it was used longest ago"
    used = world.table.descriptor(other)
    world.table.descriptor(nodes[-1])
    assert other.dir_fd == used
    await world.put(path + b"/x", b"deep")
    await world.rename(path + b"/x", b"other/x")
    assert await world.read(b"other/x") == b"deep"


async def test_a_removed_directory_keeps_its_descriptor(world):
    """Nothing leads to it any more, but who is in it."""
    world.table.most_open = LEAST_OPEN
    node = await world.mkdir(b"gone")
    await world.names.rmdir(1, b"gone")
    for number in range(2 * LEAST_OPEN):
        world.table.descriptor(await world.mkdir(b"d%d" % number))
    assert stat.S_ISDIR(world.tree.stat(node).st_mode)
