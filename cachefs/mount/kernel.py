"""Kernel passthrough: open files are read, written and mapped by the kernel straight from the staging file.

The C extension must be loaded, with its symbols global, before pyfuse3 is (see _passthrough.c); importing this module
does that, and nothing else may import pyfuse3 first. Linux >= 6.9, libfuse >= 3.13 (its ChangeLog:
`fuse_session_custom_io`) and CAP_SYS_ADMIN outside every user namespace are needed; where one is missing the same
handlers serve reads and writes in Python.

All opens of one inode share one backing id, which is released with the last of them (Linux refuses a second one:
EBUSY).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

import trio

from cachefs.errors import MountpointError

Wanted = Literal["auto", "kernel", "python"]
_CAP_SYS_ADMIN = 21


class DataPath(StrEnum):
    """Who moves the bytes of reads and writes."""

    KERNEL = "kernel"
    PYTHON = "python"


def _load() -> tuple[ModuleType | None, str]:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        return import_module("cachefs.mount._passthrough"), ""
    except ImportError as error:
        return None, f"the extension is not built: {error}"
    finally:
        sys.setdlopenflags(flags)


_extension, _missing = _load()


def drops_privileges() -> bool:
    """Return whether the request being handled asks for set-user-id and set-group-id bits to be dropped.

    Only right before the handler's first wait. Without the extension the kernel drops them by itself. With the Python
    data path nobody sees the request: bits are then dropped for root, too, where Linux would leave them.
    """
    return _extension is not None and bool(_extension.kills())


def directory_opened(node: int, fd: int) -> None:
    """Let the extension answer for a directory's attributes, from this descriptor, until `directory_closing`."""
    if _extension is not None:
        _extension.set_directory(node, fd)


def directory_closing(node: int) -> None:
    """The descriptor of a directory is about to be closed."""
    if _extension is not None:
        _extension.set_directory(node, -1)


def obstacle() -> str:
    """Return why the kernel path cannot be used here, or "" as far as that is known before the mount."""
    if _extension is None:
        return _missing
    usable, _, _, _ = _extension.status()
    if not usable:
        return "libfuse is older than 3.13"
    if not _has_capability():
        return "CAP_SYS_ADMIN is missing (run as root)"
    if _in_user_namespace():
        return "CAP_SYS_ADMIN counts only outside user namespaces (rootless containers are in one)"
    release = platform.release()
    if _version(release) < (6, 9):
        return f"Linux {release} is older than 6.9"
    return ""


def _has_capability() -> bool:
    with open("/proc/self/status", encoding="ascii") as lines:
        effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


def _in_user_namespace() -> bool:
    """Return whether user ids are mapped; the initial user namespace maps all to themselves (user_namespaces(7))."""
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        return lines.read().split() != ["0", "0", "4294967295"]


def _version(release: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in release.split(".")[:2])


class Passthrough:
    """The backing ids of one mount. Only used from the FUSE loop."""

    def __init__(self, wanted: Wanted, *, overlay: bool = False) -> None:
        """Decide as far as possible. Raises MountpointError when `kernel` is demanded and cannot be had."""
        self.reason = "asked for" if wanted == "python" else obstacle()
        self._wanted = wanted
        self._on = wanted != "python" and not self.reason
        self._settled = trio.Event()
        self.served = False
        """Whether the kernel ever served a file: a map of one may live on without a handle."""
        self.changed: Callable[[], None] = lambda: None
        """Called when the kernel path is off from now on, after `wait_settled`."""
        if wanted == "kernel" and not self._on:
            self._refuse()
        if _extension is not None:
            # One layer for a staging directory on a plain file system, two where that is a layer itself.
            _extension.configure((2 if overlay else 1) if self._on else 0)

    def _refuse(self) -> None:
        raise MountpointError(
            f"the kernel data path cannot be used: {self.reason}", hint="use --data-path auto or --data-path python"
        )

    @property
    def mode(self) -> DataPath:
        """Return who moves the bytes."""
        return DataPath.KERNEL if self._on else DataPath.PYTHON

    @property
    def shown(self) -> str:
        """Return the mode, and why it is not the kernel's, for people."""
        return self.mode.value if self._on or not self.reason else f"{self.mode.value} ({self.reason})"

    def negotiated(self) -> None:
        """The kernel has spoken (INIT): settle whether it offers passthrough."""
        self._settled.set()
        if not self._on or _extension is None:
            return
        _, hooked, offered, _ = _extension.status()
        if not (hooked and offered):
            self._on = False
            self.reason = "the kernel does not offer it" if hooked else "libfuse's messages cannot be reached"

    async def wait_settled(self, file: Path) -> None:
        """Return when the mount has been negotiated, and the kernel has been tried with a file of the staging
        directory: whether it takes one is known only then.

        Raises MountpointError when `kernel` is demanded and was not granted.
        """
        await self._settled.wait()
        self._try_out(file)
        if self._wanted == "kernel" and not self._on:
            self._refuse()

    def _try_out(self, file: Path) -> None:
        if not self._on or _extension is None:
            return
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _extension.backing_close(_extension.backing_open(fd))
        except OSError as error:
            self._refused(error)
        finally:
            os.close(fd)

    def _refused(self, error: OSError) -> None:
        self._on = False
        self.reason = f"the kernel refused a staging file: {error.strerror}"

    def open(self, fd: int, file: int, backing: int) -> int:
        """Let the reply for handle `fd` carry a backing id: the inode's, or a new one for its file, of which `file` is
        a descriptor. Return it, 0 for none.

        When the kernel refuses a file, the kernel path is off for all that are opened later.
        """
        if _extension is None or not (self._on or backing):
            return 0
        if not backing:
            try:
                backing = int(_extension.backing_open(file))
            except OSError as error:
                self._refused(error)
                self.changed()
                return 0
        _extension.set_backing(fd, backing)
        self.served = True
        return backing

    def close(self, fd: int, backing: int, *, last: bool) -> None:
        """The handle is gone; `last` releases the backing id."""
        if _extension is None or not backing:
            return
        _extension.set_backing(fd, 0)
        if last:
            _extension.backing_close(backing)
