"""Starts the engine process, passes hints to it, keeps its figures, and starts it again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import structlog
import trio

from cachefs import clock, link
from cachefs.config.schema import Config
from cachefs.journal import Journal

RESTART = 0.5
RESTART_MOST = 30.0
"""Seconds until an engine that died is started again: at first, and at most."""
PATIENCE = 10.0
"""Seconds an engine has to end by itself when its work is over; the journal needs no farewell."""
_log = structlog.get_logger(__name__)


class Totals(msgspec.Struct):
    """Counters of all engines of this mount."""

    flushed_bytes: int = 0
    orphans_aborted: int = 0
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    requests: Counter[str] = msgspec.field(default_factory=Counter)
    gc: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, figures: link.Figures) -> None:
        """Add what one engine has counted."""
        self.flushed_bytes += figures.flushed_bytes
        self.orphans_aborted += figures.orphans_aborted
        self.failures.update(figures.failures)
        self.requests.update(figures.requests)
        self.gc.update(figures.gc)


class Supervisor:
    """The engine of one mount, whichever process it is just now."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        *,
        ranges: bool | None,
        blocked: str,
        changed: Callable[[], None],
        close: Callable[[link.CloseSave], None],
        log_fd: int,
    ) -> None:
        """`ranges` and `blocked` as in link.Start; `changed` is called when the engine has changed the journal, `close`
        when another member closed a save; `log_fd` is where it logs.
        """
        with journal.read() as txn:
            serial = txn.about().serial
        self._start = link.Start(link.packed(config), ranges, blocked, clock.new_id(), serial)
        self._journal = journal
        self._close = close
        self._changed = changed
        self._log_fd = log_fd
        self._mirrors = config.publish and config.loose
        self._link: link.Link[link.ToMount] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before = Totals()
        self._stopping = False
        self._gone = trio.Event()
        self.looked = trio.Event()
        """Set once an engine has looked at what other members have open."""
        self.restarts = 0
        self.figures = link.Figures(blocked, "ok", 0, 0, 0, {}, {})

    @property
    def pid(self) -> int:
        """Return the engine's process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def incarnation(self) -> str:
        """Return the id of this start of the daemon."""
        return self._start.incarnation

    def totals(self) -> Totals:
        """Return the counters of this engine and those before it."""
        before = self._before
        both = Totals(
            before.flushed_bytes,
            before.orphans_aborted,
            before.failures.copy(),
            before.requests.copy(),
            before.gc.copy(),
        )
        both.add(self.figures)
        return both

    def hint(self, what: str) -> None:
        """Tell the engine that the journal changed (link.Hint)."""
        self._send(link.Hint(what))  # type: ignore[arg-type]

    def loose(self, path: bytes) -> None:
        """Tell the engine that a loose file changed, if it mirrors them."""
        if self._mirrors:
            self._send(link.LooseChanged(path))

    def _send(self, message: link.ToEngine) -> None:
        if self._link is not None:  # a new engine reads the journal first
            self._link.send_nowait(message)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an engine running until `stop`."""
        task_status.started()
        pause = RESTART
        while not self._stopping:
            began = clock.monotonic()
            try:
                code = await self._one_engine()
            except OSError as error:  # no process or descriptor left for it
                code = error.errno or 1
            if self._stopping:
                break
            self._ended()
            pause = RESTART if clock.monotonic() - began > RESTART_MOST else min(pause * 2, RESTART_MOST)
            self.restarts += 1
            self._before = self.totals()
            self.figures = msgspec.structs.replace(
                self.figures, flushed_bytes=0, orphans_aborted=0, failures={}, requests={}, gc={}, problems=()
            )
            _log.error("the engine ended; it is started again", exit_code=code, seconds=pause)
            await trio.sleep(pause)
        self._gone.set()

    def _ended(self) -> None:
        """An engine is gone; its last word may not have come."""
        self._journal.forget_dead_readers()
        self._changed()

    async def _one_engine(self) -> int:
        """Start an engine and listen to it until it ends; return its exit code."""
        process, ours = _spawn(self._log_fd)
        self._process = process
        channel: link.Link[link.ToMount] = link.Link(
            trio.SocketStream(trio.socket.from_stdlib_socket(ours)), link.ToMount
        )
        start = self._start
        if self.figures.blocked:  # the gate had closed: another engine has to find it open first
            start = msgspec.structs.replace(start, ranges=None, blocked=self.figures.blocked)
        channel.send_nowait(start)
        self._link = channel
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(channel.run)
                while (message := await channel.receive()) is not None:
                    match message:
                        case link.Figures():
                            self.figures = message
                        case link.CloseSave():
                            self._close(message)
                        case link.Looked():
                            self.looked.set()
                        case link.Changed():
                            self._changed()
                nursery.cancel_scope.cancel()
            return await self._reap(process)
        finally:
            self._link = None
            if process.poll() is None:
                process.kill()
                process.wait()
            self._process = None

    async def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; kill it when it does not come."""
        fd = os.pidfd_open(process.pid)
        try:
            with trio.move_on_after(PATIENCE):
                await trio.lowlevel.wait_readable(fd)
        finally:
            os.close(fd)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        return process.wait()

    async def stop(self) -> None:
        """Let the engine end, and return when it has."""
        self._stopping = True
        if self._link is not None:
            await self._link.aclose()
            await self._gone.wait()


def _spawn(log_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an engine; return it and our end of the link.

    In this thread, the main one: an engine dies with the thread that made it (PR_SET_PDEATHSIG, prctl(2)).
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: the current directory is no place to import from.
        command = [sys.executable, "-P", "-m", "cachefs.engine", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log_fd, stderr=log_fd
        )
        return process, ours
