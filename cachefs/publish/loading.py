"""The restore test's highest level: a command of the user's loads a restored copy of the candidate.

    pinned versions ─► <staging>/load/<attempt>/<generation> ─► command ─► its status decides ─► everything removed

The command is the operator's (configuration), never the checkpoint's. It runs as a user of its own, without a shell,
without credentials, in a session of its own that is killed when it ends, takes too long, or is no longer wanted.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import trio

from cachefs import clock
from cachefs.errors import CachefsError, CorruptError, InvalidError, PendingError
from cachefs.formats.manifest import Loaded, Manifest
from cachefs.publish.writes import Writes
from cachefs.restore.files import remove_tree, restore
from cachefs.restore.verify import Progress

T = TypeVar("T")

TAIL = 64 << 10
"""Bytes of the end of the output that are kept."""
SHOWN = 400
"""Characters of it that an error shows."""
GRACE = 1.0
"""Seconds to wait for the rest of the output of a command that has ended."""
CHECKPOINT = "CACHEFS_CHECKPOINT"
_CAPABILITIES = {0: "CAP_CHOWN", 5: "CAP_KILL", 6: "CAP_SETGID", 7: "CAP_SETUID"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Switch(msgspec.Struct, frozen=True):
    """The user that root becomes for the command, by number; no other groups than `gid`."""

    uid: int
    gid: int


class Load(msgspec.Struct, frozen=True):
    """How to load: `command` gets the copy's path as its last argument. `user` is who it runs as, `switch` None when
    the daemon is that user anyway; `timeout` in seconds; `root` is where copies are made, `reserve` the bytes of its
    disk that a copy must leave free.
    """

    command: tuple[str, ...]
    user: str
    home: str
    switch: Switch | None
    timeout: float
    root: Path
    reserve: int = 0


def configured(command: str | None, user: str | None, *, timeout: float, root: Path, reserve: int = 0) -> Load:
    """Return the settings of the level `load`. Raises InvalidError that says what is missing."""
    words = _words(command or "")
    if not words:
        raise InvalidError(
            "test_level is load, but load_command is not set",
            hint="it gets the path of a restored copy as its last argument; its exit status says whether it loads",
        )
    if shutil.which(words[0]) is None:
        raise InvalidError(f"load_command: {words[0]} is not a program", hint="give its path, or set PATH")
    if os.geteuid() != 0:
        own = _own_name()
        if user not in (None, own):
            raise InvalidError(f"load_user is {user}, but the daemon runs as {own}", hint="only root can change that")
        return Load(words, own, os.environ.get("HOME", "/"), None, timeout, root, reserve)
    if user is None:
        raise InvalidError(
            "test_level is load and the daemon runs as root, but load_user is not set",
            hint="set load_user to an unprivileged user; with load_user = root the command runs as root",
        )
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise InvalidError(f"load_user: there is no user {user!r}", hint="create it, or name another one") from None
    if entry.pw_uid != 0 and (lacking := _lacking(Path("/proc/self/status").read_text())):
        raise InvalidError(
            f"load_user: the daemon has no {lacking}", hint="root needs it to run what another user runs"
        )
    return Load(words, user, entry.pw_dir, Switch(entry.pw_uid, entry.pw_gid), timeout, root, reserve)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may run under any number
        return str(os.geteuid())


def _lacking(status: str) -> str:
    """Return the capabilities that are needed and not in the text of a process's status (capabilities(7))."""
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return ", ".join(name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1)


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidError(f"load_command cannot be split into words: {error}", hint="check its quotes") from error


async def load(writes: Writes, manifest: Manifest, how: Load, *, workers: int, ranges: bool) -> Loaded:
    """Restore a manifest's pinned versions and let the command load them; waits for a store that does not answer.

    Nothing is left behind, also when it is cancelled. Raises CorruptError that names command, status and the end of the
    output when the command fails or takes too long, and other errors when nothing is known: no room, no such program.
    """
    place = how.root / manifest.attempt
    try:
        await writes.hop(_make, place, manifest.size + how.reserve)
        copy = await _stoppable(
            lambda progress: writes.read(
                restore, writes.store, manifest, place, workers=workers, ranges=ranges, progress=progress
            )
        )
        await writes.hop(_hand_over, place, how.switch)
        loaded = await _run(how, copy.path)
    finally:
        with trio.CancelScope(shield=True):
            await writes.hop(_clear, place)
    return loaded


def sweep(root: Path) -> None:
    """End the commands of an engine that was killed, and remove their copies; blocks."""
    if root.is_dir():
        for place in root.iterdir():
            _clear(place)


def _make(place: Path, needed: int) -> None:
    """Make the private directory. While root writes into it, nobody else can reach in."""
    try:
        place.parent.mkdir(exist_ok=True)
        place.parent.chmod(0o711)
        _clear(place)
        place.mkdir(mode=0o700)
        stat = os.statvfs(place)
    except OSError as error:
        raise CachefsError(f"{place} cannot be made: {error.strerror}") from error
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise CachefsError(
            f"a copy to load does not fit: {needed} bytes with the reserve, {free} free at {place}",
            hint="the restore test goes on when there is room; staging needs room for one more generation",
        )


def _hand_over(place: Path, switch: Switch | None) -> None:
    """Give the copy to the user, what is inside first: the user can reach in when all is done."""
    if switch is None:
        return
    for _, _, _, fd in os.fwalk(place, topdown=False):
        for name in os.listdir(fd):
            os.chown(name, switch.uid, switch.gid, dir_fd=fd, follow_symlinks=False)
    os.chown(place, switch.uid, switch.gid)


def _clear(place: Path) -> None:
    """End what still runs on a copy, whatever session it fled to, and remove the copy."""
    if not os.path.lexists(place):
        return
    _end_users(place)
    if os.geteuid() != 0:
        place.chmod(0o700)
        remove_tree(place)
    else:
        # The user could have changed it: nothing here follows a link, and root needs no permission bits.
        os.chown(place, 0, 0, follow_symlinks=False)
        shutil.rmtree(place)


def _end_users(place: Path) -> None:
    """Kill the processes whose environment names the copy, as only its command's descendants do.

    For what left the command's session, or was left by a killed engine; root needs CAP_SYS_PTRACE to see it in others'.
    """
    mark = b"\0" + os.fsencode(f"{CHECKPOINT}={place}/")
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            fd = os.pidfd_open(int(entry))
        except OSError:  # it has ended
            continue
        try:
            if mark in b"\0" + Path("/proc", entry, "environ").read_bytes():
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:  # it has ended, or is somebody else's
            pass
        finally:
            os.close(fd)


async def _stoppable(work: Callable[[Progress], Awaitable[T]]) -> T:
    """Run what blocks in threads and reports its progress; cancelling makes its next report stop it."""
    stopped = threading.Event()
    failed: list[Exception] = []
    results: list[T] = []

    def progress(_count: int) -> None:
        if stopped.is_set():
            raise PendingError("the restore test was stopped")

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_when_cancelled)
        try:
            results.append(await work(progress))
        except Exception as error:
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return results[0]


async def _run(how: Load, copy: Path) -> Loaded:
    """Run the command on a copy to its end. Raises as `load`."""
    began = clock.monotonic()
    tail = bytearray()
    process, output = _spawn(how, copy)
    # It stays a zombie until it is waited for, so its number belongs to its session and to nobody else.
    ended = os.pidfd_open(process.pid)
    try:
        async with trio.open_nursery() as nursery, trio.lowlevel.FdStream(output) as stream:
            everything = trio.Event()
            nursery.start_soon(_keep_tail, stream, tail, everything)
            try:
                with trio.move_on_after(how.timeout) as limit:
                    await trio.lowlevel.wait_readable(ended)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.wait_readable(ended)
                status = process.wait()
            with trio.move_on_after(GRACE):
                await everything.wait()
            nursery.cancel_scope.cancel()
    finally:
        os.close(ended)
    text = tail.decode(errors="replace")
    if limit.cancelled_caught:
        raise _refused(how, f"did not end within {how.timeout:g} s", text)
    if status != 0:
        raise _refused(how, f"ended with {_meaning(status)}", text)
    return Loaded(how.command, how.user, status, text, round(clock.monotonic() - began, 3))


def _meaning(status: int) -> str:
    return f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"


def _refused(how: Load, what: str, output: str) -> CorruptError:
    end = " ".join(output.split())[-SHOWN:]
    return CorruptError(f"load_command {shlex.join(how.command)} {what}; its output ends: {end or '(nothing)'}")


async def _keep_tail(stream: trio.lowlevel.FdStream, tail: bytearray, everything: trio.Event) -> None:
    async for chunk in stream:
        tail += chunk
        del tail[:-TAIL]
    everything.set()


def _spawn(how: Load, copy: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command; return it and the descriptor that its output comes from."""
    environment = {
        "PATH": os.environ.get("PATH", _PATH),
        "HOME": how.home,
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        CHECKPOINT: str(copy),
    }
    switch = how.switch
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [*how.command, str(copy)],
            cwd=copy if copy.is_dir() else copy.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
            umask=0o077,
            user=switch.uid if switch else None,
            group=switch.gid if switch else None,
            extra_groups=[] if switch else None,
        )
    except OSError as error:
        os.close(reader)
        raise CachefsError(
            f"load_command {shlex.join(how.command)} cannot be run as {how.user}: {error.strerror}",
            hint="the restore test is repeated; can this user run it, and reach the staging directory?",
        ) from error
    finally:
        os.close(writer)
    return process, reader
