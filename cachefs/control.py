"""The control socket: how the command line talks to a running daemon.

One request and one answer per connection, each one line of JSON. The socket is `<staging>/control.sock`; the extended
attribute `user.cachefs.socket` of the mountpoint names it. Anybody who can reach the mount may ask; closing a save
changes something and is for root, the daemon's user and the owner of the path.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog
import trio

from cachefs.errors import CachefsError, NotFoundError, UnavailableError
from cachefs.formats.records import State

_log = structlog.get_logger(__name__)

LINE_MAX = 256 << 20
CONNECTIONS = 256
"""Connections that are served at once; a further one is told so."""
TRANSFER_TIMEOUT = 10.0
"""Seconds that the other end may take to send its request, and to read the answer."""
_ATTRIBUTE = "user.cachefs.socket"
_INTERNAL = 70
"""Exit code of an error that we did not foresee (EX_SOFTWARE)."""
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the Status."""


class WaitRequest(msgspec.Struct, frozen=True, tag="wait"):
    """Wait until the newest attempt of the generation at `path` (text form, below the mount) has reached `state`."""

    path: str
    state: State
    timeout: _Seconds | None = None


class CloseRequest(msgspec.Struct, frozen=True, tag="close"):
    """Close the generation at `path` by hand; answered once it is closed."""

    path: str


class FlushRequest(msgspec.Struct, frozen=True, tag="flush"):
    """Wait until everything that is complete is published; answered with `status.Flushed`."""

    timeout: _Seconds | None = None


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
    """Answer requests for ever. `handler` returns the result or raises an error, which becomes the answer; it is
    cancelled when the other end goes away.
    """
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(_listen(path)))
    slots = trio.CapacityLimiter(CONNECTIONS)

    async def answer(stream: trio.SocketStream) -> None:
        await _answer(stream, handler, slots)

    task_status.started()
    await trio.serve_listeners(answer, [listener])  # waits and goes on when there are no descriptors left


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _address(path) as address:
        listener.bind(address)
    path.chmod(0o666)
    listener.listen(64)
    return listener


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a path that fits a socket address (108 bytes, unix(7)), however deep staging lies. The kernel follows it
    once, at bind(2) and connect(2).
    """
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


async def _answer(stream: trio.SocketStream, handler: Handler, slots: trio.CapacityLimiter) -> None:
    async with stream:
        try:
            slots.acquire_nowait()
        except trio.WouldBlock:
            busy = Failure("the daemon serves too many requests", "try again", UnavailableError.exit_code)
            await _send(stream, Answer(failure=busy))
            return
        try:
            raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            data = await _receive(stream)
            if data:
                answer = await _while_connected(stream, data, handler, Peer(uid=struct.unpack("3i", raw)[1]))
                if answer is not None:
                    await _send(stream, answer)
        finally:
            slots.release()


async def _receive(stream: trio.SocketStream) -> bytes:
    """Return the request; b"" when none comes."""
    data = b""
    with trio.move_on_after(TRANSFER_TIMEOUT):
        while not data.endswith(b"\n"):
            try:
                chunk = await stream.receive_some()
            except trio.BrokenResourceError:
                return b""
            if not chunk or len(data) > 1 << 20:
                return b""
            data += chunk
        return data
    return b""


async def _send(stream: trio.SocketStream, answer: Answer) -> None:
    try:
        with trio.move_on_after(TRANSFER_TIMEOUT):
            await stream.send_all(msgspec.json.encode(answer) + b"\n")
    except trio.BrokenResourceError:
        pass  # the other end is gone; nobody is left to tell


async def _while_connected(stream: trio.SocketStream, data: bytes, handler: Handler, peer: Peer) -> Answer | None:
    """Handle a request; None when the other end went away before it was done."""
    answer: Answer | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, stream, nursery.cancel_scope)
        answer = await _handle(data, handler, peer)
        nursery.cancel_scope.cancel()
    return answer


async def _watch(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    scope.cancel()


async def _handle(data: bytes, handler: Handler, peer: Peer) -> Answer:
    try:
        request = msgspec.json.decode(data, type=Request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Answer(failure=Failure(f"unknown request: {error}", "daemon and command have different versions", 2))
    try:
        return Answer(result=await handler(request, peer))
    except CachefsError as error:
        return Answer(failure=Failure(str(error), error.hint, error.exit_code))
    except Exception as error:  # whoever asks must not end the daemon
        _log.exception("a request failed", request=type(request).__name__)
        return Answer(failure=Failure(f"the daemon failed: {error!r}", "see its log", _INTERNAL))


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
            with _address(socket_path) as address:
                connection.connect(address)
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
