"""Answers about the daemon: the status, the extended attributes, and the waits of the command line."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from cachefs import __version__, clock, control
from cachefs.config.schema import Config
from cachefs.errors import (
    CachefsError,
    CorruptError,
    DeniedError,
    FencedError,
    InvalidError,
    NotFoundError,
    ProbeError,
    WaitTimeout,
)
from cachefs.formats.names import checked_path, to_text
from cachefs.formats.records import AttemptRecord, State
from cachefs.journal import Journal
from cachefs.pending import Pending, pending
from cachefs.problem import Problem
from cachefs.publish.rules import effective_state
from cachefs.status import Flushed, GenerationStatus, Read, Status, Totals, add_up, generation_status, read, snapshot
from cachefs.threads import NoThread, in_thread

_LOOK = 0.2
"""Seconds after which a wait looks again at what only time changes."""
_TAKE_BACK = "find out which node owns the run (cachefs ls); if it is this one's turn, restart this daemon"


class Live(msgspec.Struct, frozen=True):
    """What the journal does not know. Each is asked when a status is."""

    publishing_blocked: Callable[[], str]
    store_health: Callable[[], str]
    data_path: Callable[[], str]
    staging_free: Callable[[], int]
    loose_pending: Callable[[], int]
    open_saves: Callable[[], dict[str, str]]
    close_now: Callable[[bytes], Any]
    closing: Callable[[], Sequence[str]] = tuple
    """The open saves whose close signal came, by path."""
    longest_idle: Callable[[], float] = float
    """For how many seconds an open save has not changed, at most."""
    problems: Callable[[], tuple[Problem, ...]] = tuple
    in_generation: Callable[[bytes], bool] = lambda _path: False
    """Whether a path is placed in a generation, by its name."""


class Reporter:
    """Reads the journal for everybody who asks. Only used from the event loop."""

    def __init__(self, journal: Journal, config: Config, store_url: str, socket: Path, tree: Path, live: Live) -> None:
        self._journal = journal
        self._config = config
        self._store_url = store_url
        self._socket = socket
        self._tree = tree
        self._live = live
        self._latest: dict[str, AttemptRecord] = {}
        self._latest_at = -1
        self._read = Read()
        self._read_at = -1

    async def read(self) -> Read:
        """Return what the journal holds: read in a worker thread, and only if it was written since the last time."""
        if self._read_at != self._journal.version:
            try:
                found, version = await in_thread(self._read_journal)
            except NoThread:  # who asks gets an answer all the same
                found, version = self._read_journal()
            if version >= self._read_at:  # else a later reading was quicker
                self._read, self._read_at = found, version
        return self._read

    def _read_journal(self) -> tuple[Read, int]:
        with self._journal.read() as txn:
            return read(txn), txn.version

    async def status(self) -> Status:
        """Return the whole status."""
        found = await self.read()
        seen = snapshot(found, now=clock.now(), waiting=self._live.open_saves(), closing=self._live.closing())
        members = self._config.membership
        return Status(
            version=__version__,
            pid=os.getpid(),
            mountpoint=str(self._config.mountpoint),
            store=self._store_url,
            staging=str(self._config.staging),
            member=self._config.member,
            data_path=self._live.data_path(),
            publishing_blocked=self._live.publishing_blocked(),
            store_health=self._live.store_health(),
            backlog_bytes=seen.backlog_bytes,
            backlog_files=seen.backlog_files,
            oldest_unpublished_age=seen.oldest_unpublished_age,
            loose_pending=self._live.loose_pending(),
            staging_free_bytes=self._live.staging_free(),
            runs=seen.runs,
            generations=seen.generations,
            members=members.names,
            member_count=members.count,
            owner=members.owner,
            problems=self._live.problems(),
            oldest_open_idle=self._live.longest_idle(),
        )

    # ---- extended attributes

    def answer(self, path: bytes, name: str) -> bytes | None:
        """Return the value of `user.cachefs.<name>`, or None where there is none."""
        if name == "socket":
            return os.fsencode(self._socket) if not path else None
        if name not in ("state", "generation", "flushed", "error"):
            return None
        # Only these two are worth reading every shard of a save.
        found = self._status_of(to_text(path), shards=name in ("flushed", "error"))
        if found is None:
            return b"loose" if name == "state" and self._is_loose(path) else None
        match name:
            case "state":
                return found.state.value.encode()
            case "generation":
                return found.generation.encode()
            case "flushed":
                return f"{found.bytes_flushed}/{found.bytes}".encode()
        return found.error.encode()

    def _is_loose(self, path: bytes) -> bool:
        """Whether a path without an attempt is a loose file; not one of a published save that was forgotten."""
        if not path or self._live.in_generation(path):
            return False
        return not os.path.isdir(os.path.join(os.fsencode(self._tree), path))

    def _status_of(self, path: str, *, shards: bool = True) -> GenerationStatus | None:
        attempt = self._newest(path)
        if attempt is None:
            return None
        with self._journal.read() as txn:
            totals = add_up(txn.shards.scan(f"{attempt.attempt}/")) if shards else Totals()
            return generation_status(attempt, totals, txn.runs.get(attempt.run), now=clock.now())

    def _newest(self, path: str) -> AttemptRecord | None:
        """Return the newest attempt of the generation a path lies in."""
        if self._latest_at != self._journal.version:
            with self._journal.read() as txn:
                self._latest_at = txn.version
                attempts = sorted(txn.attempts.scan(), key=lambda record: record.serial)
            self._latest = {attempt.path: attempt for attempt in attempts}
        while path:
            if (found := self._latest.get(path)) is not None:
                return found
            path = path.rpartition("/")[0]
        return None

    # ---- the control socket

    async def handle(self, request: control.Request, peer: control.Peer) -> Any:
        """Carry a request out; raises CachefsError."""
        match request:
            case control.StatusRequest():
                return await self.status()
            case control.WaitRequest(path, state, timeout):
                _checked(path)
                if state.rank < 0:
                    raise InvalidError(f"{state.value} is nothing to wait for")
                return await self._wait(path, state, timeout)
            case control.CloseRequest(path):
                inside = _checked(path)
                self._check_right(inside, peer)
                return await self._live.close_now(inside)
            case control.FlushRequest(timeout):
                return await self._flush(timeout)

    def _check_right(self, path: bytes, peer: control.Peer) -> None:
        try:
            owner = os.lstat(os.path.join(os.fsencode(self._tree), path)).st_uid
        except OSError:
            raise NotFoundError(f"{to_text(path)} does not exist in the mount") from None
        if peer.uid not in (0, os.geteuid(), owner):
            raise DeniedError(f"only its owner or root may close {to_text(path)}")

    async def _wait(self, path: str, state: State, timeout: float | None) -> str:
        with trio.move_on_after(math.inf if timeout is None else timeout):
            while True:
                reached = self._reached(path, state)
                if reached is not None:
                    return reached.value
                await self._journal.wait_changed()
        now = self._newest(path)
        raise WaitTimeout(
            f"{path} is {now.state.value if now else 'unknown'} and not {state.value} yet", hint=self._reason(path)
        )

    def _reason(self, path: str) -> str:
        """Return why a save does not move on, as far as that is known."""
        now = self._status_of(path)
        waiting = self._live.open_saves().get(now.path, "") if now is not None and now.state is State.OPEN else ""
        return "; ".join(filter(None, [now.error if now else "", waiting and f"waiting: {waiting}", self._obstacle()]))

    def _obstacle(self) -> str:
        """Return what keeps everything from being published."""
        health = self._live.store_health()
        return self._live.publishing_blocked() or (f"the store: {health}" if health not in ("", "ok") else "")

    def _reached(self, path: str, wanted: State) -> State | None:
        attempt = self._newest(path)
        if attempt is None:
            raise NotFoundError(
                f"{path} is not part of a generation that this mount has seen", hint="cachefs status lists them"
            )
        with self._journal.read() as txn:
            state = effective_state(attempt, txn.runs.get(attempt.run))
        if state is State.ABANDONED:
            raise CachefsError(f"the newest save of {path} was abandoned: {attempt.error}")
        if attempt.state.rank >= wanted.rank:
            return attempt.state
        if state is State.FENCED:
            raise FencedError(
                f"run {attempt.run} was taken over by another daemon; {path} stays in staging", hint=_TAKE_BACK
            )
        blocked = self._live.publishing_blocked()
        if blocked and wanted.rank > State.STAGED.rank and not self._config.publish:
            raise ProbeError(f"{path} will not become {wanted.value}: {blocked}")
        return None

    async def _flush(self, timeout: float | None) -> Flushed:
        if not self._config.publish:
            raise ProbeError(f"nothing is flushed: {self._live.publishing_blocked()}")
        with trio.move_on_after(math.inf if timeout is None else timeout):
            left = await self.settled()
            if left.fenced:
                raise FencedError(
                    f"{len(left.fenced)} closed saves stay in staging ({left.fenced[0]}): another daemon has taken"
                    " their run over",
                    hint=_TAKE_BACK,
                )
            waiting = self._live.open_saves()
            with self._journal.read() as txn:
                states = [attempt.state for attempt in txn.attempts.scan()]
            return Flushed(
                published=states.count(State.PUBLISHED),
                abandoned=states.count(State.ABANDONED),
                open={path: waiting.get(path, "") for path in left.open},
            )
        left = self.pending()
        first = (*left.closed, *left.closing)[:1]
        raise WaitTimeout(
            f"{len(left.closed) + len(left.closing)} generations are not published yet",
            hint="; ".join(f"{path}: {reason}" for path in first if (reason := self._reason(path))),
        )

    async def settled(self) -> Pending:
        """Wait until every closed save is published, also those whose close signal came and that are about to be
        closed; return what is left: it does not move by itself.
        """
        while (left := self.pending()).moving:
            with trio.move_on_after(_LOOK):
                await self._journal.wait_changed()
        return left

    def pending(self) -> Pending:
        """Return what is not published."""
        with self._journal.read() as txn:
            return pending(txn.attempts.scan(), txn.runs.scan(), self._live.closing())


def _checked(path: str) -> bytes:
    """Return the bytes of a path that somebody asks about. Raises InvalidError when it leaves the mount."""
    try:
        return checked_path(path)
    except CorruptError:
        raise InvalidError(
            f"{path!r} is no path inside the mount", hint="name it relative to the mountpoint, without . and .."
        ) from None
