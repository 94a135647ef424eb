"""The control socket: how the command line talks to a running daemon.

One request and one answer per connection, each one line of JSON. The socket is `<staging>/control.sock`; the extended
attribute `user.cachefs.socket` of the mountpoint names it. Anybody who can reach the mount may ask; closing a save
changes something and is for root, the daemon's user and the owner of the path.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from cachefs.errors import CachefsError, NotFoundError, UnavailableError

LINE_MAX = 256 << 20
_ATTRIBUTE = "user.cachefs.socket"


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the Status."""


class WaitRequest(msgspec.Struct, frozen=True, tag="wait"):
    """Wait until the newest attempt of the generation at `path` (text form, below the mount) has reached `state`."""

    path: str
    state: str
    timeout: float | None = None


class CloseRequest(msgspec.Struct, frozen=True, tag="close"):
    """Close the generation at `path` by hand."""

    path: str


class FlushRequest(msgspec.Struct, frozen=True, tag="flush"):
    """Wait until everything closed so far is published."""

    timeout: float | None = None


Request = StatusRequest | WaitRequest | CloseRequest | FlushRequest


class Failure(msgspec.Struct, frozen=True):
    """An error answer: what the command prints, and its exit code."""

    message: str
    hint: str
    exit_code: int


class Answer(msgspec.Struct, frozen=True):
    """One of the two is set."""

    result: Any = None
    failure: Failure | None = None


class DaemonError(CachefsError):
    """The daemon answered with an error; it carries the exit code of the original."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, hint=failure.hint)
        self.exit_code = failure.exit_code  # type: ignore[misc]


class Peer(msgspec.Struct, frozen=True):
    """The user at the other end, as the kernel tells it (SO_PEERCRED)."""

    uid: int


Handler = Callable[[Request, Peer], Awaitable[Any]]


async def serve(path: Path, handler: Handler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Answer requests for ever. `handler` returns the result or raises a CachefsError, which becomes the answer."""
    listener = trio.socket.from_stdlib_socket(_listen(path))
    task_status.started()
    async with trio.open_nursery() as nursery:
        while True:
            connection, _ = await listener.accept()
            nursery.start_soon(_answer, trio.SocketStream(connection), handler)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_short(path))
    path.chmod(0o666)
    listener.listen(64)
    return listener


def _short(path: Path) -> str:
    """Return a path that fits a socket address (108 bytes, unix(7)), however deep staging lies."""
    if len(os.fsencode(path)) < 100:
        return str(path)
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # stays open: the address is used as long as the daemon lives
    return f"/proc/self/fd/{fd}/{path.name}"


async def _answer(stream: trio.SocketStream, handler: Handler) -> None:
    async with stream:
        raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        peer = Peer(uid=struct.unpack("3i", raw)[1])
        data = b""
        try:
            while not data.endswith(b"\n"):
                chunk = await stream.receive_some()
                if not chunk or len(data) > 1 << 20:
                    return
                data += chunk
            answer = await _handle(data, handler, peer)
            await stream.send_all(msgspec.json.encode(answer) + b"\n")
        except trio.BrokenResourceError:
            return  # the other end is gone; nobody is left to tell


async def _handle(data: bytes, handler: Handler, peer: Peer) -> Answer:
    try:
        request = msgspec.json.decode(data, type=Request)
        return Answer(result=await handler(request, peer))
    except msgspec.MsgspecError as error:
        return Answer(failure=Failure(f"unknown request: {error}", "daemon and command have different versions", 2))
    except CachefsError as error:
        return Answer(failure=Failure(str(error), error.hint, error.exit_code))


def find(path: Path) -> tuple[Path, Path]:
    """Return the control socket of the daemon that serves the mount `path` lies in, and the mountpoint.

    `path` need not exist. Raises NotFoundError when no cachefs is mounted above it.
    """
    place = Path(os.path.realpath(path))
    for above in (place, *place.parents):
        if os.path.ismount(above):
            try:
                return Path(os.fsdecode(os.getxattr(above, _ATTRIBUTE))), above
            except OSError:
                break
    raise NotFoundError(f"{path} is not in a cachefs mount", hint="is the daemon running? start it with cachefs mount")


def ask(socket_path: Path, request: Request) -> Any:
    """Send one request and return its result. Blocks as long as the daemon takes.

    Raises DaemonError for an error answer, UnavailableError when the daemon cannot be reached or stops meanwhile.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(_short(socket_path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as stream:
                data = stream.readline(LINE_MAX)
        except OSError as error:
            raise UnavailableError(f"the daemon cannot be reached: {error.strerror}", hint="is it running?") from error
    if not data:
        raise UnavailableError("the daemon stopped before it answered")
    answer = msgspec.json.decode(data, type=Answer)
    if answer.failure is not None:
        raise DaemonError(answer.failure)
    return answer.result
