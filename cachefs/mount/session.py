"""The life of a mount: check the mountpoint, clean up what a killed daemon left, mount, serve, unmount."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pyfuse3
import trio

from cachefs.errors import MountpointError
from cachefs.formats.names import to_text
from cachefs.mount.inodes import descriptors
from cachefs.mount.operations import Operations
from cachefs.mount.threads import REQUESTS
from cachefs.mount.tree import Tree
from cachefs.threads import in_thread

TYPE = "fuse.cachefs"
"""The file system type that `mount` and /proc/self/mountinfo show."""
GRACE = 1.0
"""Seconds that an unmounted file system serves the files still open."""


def mounted_type(mountpoint: Path) -> str | None:
    """Return the type of the file system mounted exactly at a path, or None. Does not touch the mount itself."""
    wanted = os.fsencode(mountpoint)
    found = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        where = before.split(b" ")[4]
        for escaped, plain in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
            where = where.replace(escaped, plain)
        if where == wanted:
            found = after.split(b" ")[0].decode()  # the last one listed is on top
    return found


def is_overlay(directory: Path) -> bool:
    """Return whether a directory, or what will be created there, lies on overlayfs."""
    while not directory.exists():
        directory = directory.parent
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] == "overlay"
    return False


def prepare(mountpoint: Path) -> None:
    """Make a path ready to be mounted on: create it, and unmount what a killed cachefs left there.

    Raises MountpointError for a path that is in use, not empty or not a directory.
    """
    if check(mountpoint):
        unmount(mountpoint)
        check(mountpoint)
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(mountpoint, error) from error


def check(mountpoint: Path) -> bool:
    """Look at a mountpoint without changing anything; return whether a killed cachefs has left its mount there. A path
    that does not exist is fine.

    Raises MountpointError for a path that is in use, not empty or not a directory.
    """
    kind = mounted_type(mountpoint)
    if kind == TYPE and is_stale(mountpoint):
        return True
    if kind is not None:
        raise MountpointError(
            f"{mountpoint} is already a mountpoint ({kind})",
            hint=f"unmount it first (fusermount3 -u {mountpoint}), or choose another directory",
        )
    try:
        left = os.listdir(os.fsencode(mountpoint))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(mountpoint, error) from error
    if left:
        raise MountpointError(
            f"{mountpoint} is not empty ({to_text(left[0])}, ...): a mount would hide what is in it",
            hint="was it written while nothing was mounted? Move it away, mount, and copy it into the mount;"
            " or choose an empty or new directory",
        )
    return False


def _unusable(mountpoint: Path, error: OSError) -> MountpointError:
    wrong_kind = isinstance(error, FileExistsError | NotADirectoryError)
    reason = "it is not a directory" if wrong_kind else error.strerror
    return MountpointError(f"{mountpoint} cannot be used as mountpoint: {reason}", hint="choose an empty directory")


def served_by(mountpoint: Path) -> int | None:
    """Return the process id of the daemon that serves a cachefs mount, None when it cannot be found out."""
    try:
        socket = os.fsdecode(os.getxattr(mountpoint, "user.cachefs.socket"))
        return int((Path(socket).parent / "lock").read_text())
    except (OSError, ValueError):
        return None


def is_stale(mountpoint: Path) -> bool:
    """Return whether the daemon behind a FUSE mount is gone."""
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    return False


def unmount(mountpoint: Path) -> None:
    """Unmount, lazily when it is busy. Raises MountpointError when nothing helps."""
    commands = [["fusermount3", "-u", str(mountpoint)], ["fusermount3", "-u", "-z", str(mountpoint)]]
    if os.geteuid() == 0:
        commands.append(["umount", "-l", str(mountpoint)])
    message = "fusermount3 is not installed"
    for command in commands:
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            message = done.stderr.strip()
    raise MountpointError(f"cannot unmount {mountpoint}: {message}", hint="unmount it by hand: umount -l")


class Session:
    """One mount, from `start` to `stop`."""

    def __init__(self, tree: Tree, mountpoint: Path, *, allow_other: bool) -> None:
        self._mountpoint = mountpoint
        self._options = {"fsname=cachefs", "subtype=cachefs", "default_permissions"}
        if allow_other:
            self._options.add("allow_other")
        self._tree = tree
        self._operations = Operations(tree)
        self._mounted = False

    def start(self) -> None:
        """Mount. Requests are answered once `serve` runs. Raises MountpointError."""
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise MountpointError(
                "/dev/fuse cannot be opened", hint="load the fuse module (modprobe fuse), or run with rights to it"
            )
        # Every open file and every directory in use costs a descriptor; the usual soft limit is for select(2).
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._tree.table.most_open = descriptors()
        try:
            pyfuse3.init(self._operations, str(self._mountpoint), self._options)
        except RuntimeError as error:
            raise MountpointError(
                f"cannot mount on {self._mountpoint}: {error}",
                hint="see the message of fusermount3 above; --allow-other needs user_allow_other in /etc/fuse.conf"
                " unless cachefs runs as root",
            ) from error
        self._mounted = True

    async def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tree.mapped.run)
            await pyfuse3.main(max_tasks=REQUESTS)
            nursery.cancel_scope.cancel()

    async def leave(self) -> None:
        """Unmount, so that `serve` returns once what was asked before is answered; harmless when it has returned.

        Whoever still has files open gets errors after a moment.
        """
        if self._mounted:
            try:
                await in_thread(unmount, self._mountpoint)
            except (MountpointError, OSError):
                pass  # `stop` tries again
            await trio.sleep(GRACE)
        if self._mounted:  # afterwards the library would touch freed memory
            pyfuse3.terminate()

    def stop(self) -> None:
        """Unmount, if it is not already; open files then get ENOTCONN."""
        if self._mounted:
            self._mounted = False
            pyfuse3.close(unmount=True)
