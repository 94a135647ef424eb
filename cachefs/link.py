"""What the mount process and the engine process say to each other, over a socket pair: one JSON object per line.

Hints only, and figures for people: whatever counts is in the journal, which both have open. A line that is lost, or an
engine that dies, delays; nothing else.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec
import trio

from cachefs.config.schema import Config
from cachefs.problem import Problem

T = TypeVar("T")
_BATCH = 1000


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first line to the engine: the configuration, and what the probe at the start of the mount found.

    `incarnation` is this start of the daemon: engines of one daemon own runs as one process would. `serial` numbers the
    newest save before it. `ranges` is whether the store can read ranges of a version; None when it has not passed a
    probe yet, `blocked` says why.
    """

    config: dict[str, Any]
    ranges: bool | None
    blocked: str
    incarnation: str
    serial: int = 0


class Hint(msgspec.Struct, frozen=True, tag="hint"):
    """The mount process changed the journal."""

    what: Literal["opened", "closed", "pinned"]


class LooseChanged(msgspec.Struct, frozen=True, tag="loose"):
    """A loose file changed. `path` is relative to the mount root."""

    path: bytes


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """The engine changed the journal."""


class CloseSave(msgspec.Struct, frozen=True, tag="close"):
    """Another member saw the close signal of an attempt: close our save of it, unless files of it were written a second
    time. It must be quiet for `quiet` seconds first. Sent again until it is closed.
    """

    path: str
    attempt: str
    by: str
    quiet: float


class Looked(msgspec.Struct, frozen=True, tag="looked"):
    """The engine has looked once at what other members have open: saves that begin from now on are told from those."""


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """What the engine does. Counters are totals since its start; `requests` by "operation outcome",
    `gc` by the fields of retention.keeper.Counts. `problems` say why runs do not move.
    """

    blocked: str
    health: str
    loose_pending: int
    flushed_bytes: int
    orphans_aborted: int
    failures: dict[str, int]
    requests: dict[str, int]
    gc: dict[str, int] = {}
    problems: tuple[Problem, ...] = ()


ToEngine = Start | Hint | LooseChanged
ToMount = Changed | CloseSave | Looked | Figures


class Link(Generic[T]):
    """One end of the pair. `receive` gives the other end's messages; sending never waits for long."""

    def __init__(self, stream: trio.SocketStream, incoming: Any) -> None:
        """`incoming` is the union of the messages that come."""
        self._stream = stream
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(incoming)
        self._encoder = msgspec.json.Encoder()
        self._outgoing, self._queue = trio.open_memory_channel[bytes](10_000)
        self._rest = b""

    def send_nowait(self, message: ToEngine | ToMount) -> None:
        """Queue a message; when the other end is so slow that the queue is full, the message is dropped: it is a hint
        like those before it.
        """
        try:
            self._outgoing.send_nowait(self._encoder.encode(message) + b"\n")
        except trio.WouldBlock:
            return

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is queued, for ever; returns when the other end is gone."""
        task_status.started()
        async for data in self._queue:
            try:
                await self._stream.send_all(data + self._queued())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    def _queued(self) -> bytes:
        """Return what else waits to be sent: many hints cost one system call."""
        more: list[bytes] = []
        try:
            while len(more) < _BATCH:
                more.append(self._queue.receive_nowait())
        except trio.WouldBlock:
            pass
        return b"".join(more)

    async def receive(self) -> T | None:
        """Return the next message, or None when the other end is gone."""
        while b"\n" not in self._rest:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return self._decoder.decode(line)

    async def aclose(self) -> None:
        """Close this end; the other one then receives None."""
        await self._stream.aclose()


def packed(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values."""
    built: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    return built


def unpacked(values: dict[str, Any]) -> Config:
    """Return the configuration that `packed` was given."""
    return msgspec.convert(values, Config, dec_hook=lambda kind, value: kind(value))
