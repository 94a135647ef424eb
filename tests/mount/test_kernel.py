"""Who moves the bytes: decided by what the kernel takes, not by what it should take."""

from __future__ import annotations

import errno
import os

import pytest

from cachefs.errors import MountpointError
from cachefs.mount import kernel
from cachefs.mount.kernel import DataPath, Passthrough


class Extension:
    """The C extension before a kernel that offers passthrough, and refuses files when `refuses`."""

    def __init__(self) -> None:
        self.refuses = False
        self.open: list[int] = []
        self.replies: dict[int, int] = {}

    def configure(self, depth):
        pass

    def status(self):
        return 1, 1, 1, 1

    def backing_open(self, fd):
        if self.refuses:
            raise OSError(errno.EPERM, "Operation not permitted")
        self.open.append(fd)
        return len(self.open)

    def backing_close(self, backing):
        self.open.pop()

    def set_backing(self, fd, backing):
        self.replies[fd] = backing


@pytest.fixture
def extension(monkeypatch) -> Extension:
    made = Extension()
    monkeypatch.setattr(kernel, "_extension", made)
    monkeypatch.setattr(kernel, "obstacle", lambda: "")
    return made


async def test_the_kernel_is_tried_before_the_mount_says_how_it_serves(extension, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for refuses, shown in ((False, "kernel"), (True, "python (the kernel refused a staging file: Operation not ")):
        extension.refuses = refuses
        path = Passthrough("auto")
        path.negotiated()
        await path.wait_settled(tmp_path / "file")
        assert path.shown.startswith(shown)
        assert (extension.open, path.served) == ([], False)


async def test_where_the_kernel_path_is_demanded_a_refusal_ends_the_mount(extension, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    extension.refuses = True
    path = Passthrough("kernel")
    path.negotiated()
    with pytest.raises(MountpointError, match="refused a staging file") as raised:
        await path.wait_settled(tmp_path / "file")
    assert raised.value.exit_code == 73


async def test_a_later_refusal_is_told_and_files_that_are_served_stay_it(world, extension):
    """All handles of a file share its backing id, whatever becomes of others."""
    path = Passthrough("auto")
    told = []
    path.changed = lambda: told.append(path.shown)
    world.tree.handles._passthrough = world.tree.passthrough = path
    first = await world.create(b"first")
    assert extension.replies[first] == 1
    extension.refuses = True
    second = await world.create(b"second")
    assert (path.mode, len(told)) == (DataPath.PYTHON, 1)
    assert second not in extension.replies
    again = await world.open(b"first", os.O_RDWR)
    assert extension.replies[again] == 1
    for handle in (first, second, again):
        await world.content.release(handle)
    assert (extension.open, len(told)) == ([], 1)
