"""No descriptor is left: a call fails then, and leaves nothing behind that the kernel would never release."""

from __future__ import annotations

import errno
import os
from itertools import count

import pytest

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
