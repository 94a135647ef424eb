"""The gate in front of the store: nothing is sent before the probe has passed with these credentials (invariant
I18), and nothing more once it fails: an address may come to lead to another server, or to another version of it.

    wait_open: the whole probe, until it passes ─► watch: its cheap part, until it fails ─► wait_open ...
"""

from __future__ import annotations

import structlog
import trio

from cachefs import clock
from cachefs.errors import (
    CachefsError,
    CorruptError,
    DeniedError,
    NoStoreError,
    NotFoundError,
    ProbeError,
    UnavailableError,
    Unsupported,
)
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop
from cachefs.store.probe import Outcome, ProbeReport, probe, watch_probe

RETRY = 1.0
RETRY_MOST = 30.0
"""Seconds until a store that gives no answer is probed again: at first, and at most."""
FIRST_WATCH = 60.0
"""Seconds until the first repetition, at most: an engine that was started again goes by the probe of another one."""
SUSPICION_REST = 10.0
"""Seconds after a repetition that was asked for in which no other one is: errors may come by the hundred."""
SUSPICIOUS = (CorruptError, ProbeError, Unsupported)
"""What a store that has passed the probe does not answer; damage of single objects is rare enough to ask."""
_log = structlog.get_logger(__name__)


def check(store: ObjectStore, *, writes: bool = False) -> None:
    """Check that a store is there and can be read, with `writes` also make it ready for them; an error names it.
    Blocks.
    """
    try:
        (store.prepare if writes else store.check)()
    except (NotFoundError, NoStoreError, DeniedError) as error:
        reason = str(error).removeprefix(f"{store.url}: ")
        hint = error.hint or "does it exist, in this region, and do these credentials allow it?"
        raise type(error)(f"{store.url}: {reason}", hint=hint) from error


def try_store(store: ObjectStore) -> tuple[bool | None, str]:
    """Check and probe the store; blocks. Return whether it can read ranges of a version, and why nothing may be
    published ("" when it may; the first is None then).

    Raises what a mount must not start with: a missing bucket, refused credentials, a failed probe. A store that does
    not answer is no reason: the mount absorbs writes, and the probe is repeated until there is an answer.
    """
    try:
        check(store, writes=True)
        report = probe(store)
    except UnavailableError as error:
        _log.warning("store does not answer; nothing is published until it does", error=str(error))
        return None, f"the store does not answer: {error}"
    if report.ok:
        return report.ranges, ""
    problems = _problems(report)
    if not report.conclusive:
        _log.warning("the store's probe had no clear result", problems=problems)
        return None, f"the store's probe had no clear result: {problems}"
    raise ProbeError(
        f"{store.url} does not honour what publication relies on: {problems}",
        hint="mount with --no-publish to keep everything local; cachefs doctor shows every check",
    )


async def _watched(hop: Hop, store: ObjectStore) -> ProbeReport | None:
    """Return what the probe's cheap part finds, None when it was not asked for want of a thread."""
    try:
        return await hop(watch_probe, store)
    except UnavailableError as error:
        _log.warning("the store is probed again later", error=str(error))
        return None


def _problems(report: ProbeReport) -> str:
    failed = [
        check for check in report.problems() if check.outcome is not Outcome.INCONCLUSIVE or not report.conclusive
    ]
    return "; ".join(f"{check.id}: {check.meaning}" for check in failed[:3])


class Gate:
    """Whether publication is allowed, and why not."""

    def __init__(self, store: ObjectStore, *, ranges: bool | None, blocked: str, interval: float = 0.0) -> None:
        """`ranges` and `blocked` are what `try_store` found at the start of the mount. `interval` is in seconds between
        two repetitions of the probe's cheap part; 0: it is not repeated.
        """
        self._store = store
        self._ranges = ranges
        self._interval = interval
        self._suspected = trio.Event()
        self._waiting: list[trio.Event] = []
        self.blocked = blocked

    async def wait_open(self, hop: Hop) -> bool:
        """Return whether the store can read ranges, once the probe has passed; probes again and again until then."""
        pause = RETRY
        while self._ranges is None:
            await trio.sleep(clock.jitter(pause))
            pause = min(pause * 2, RETRY_MOST)
            try:
                self._ranges, self.blocked = await hop(try_store, self._store)
            except CachefsError as error:
                self.blocked = str(error)
                _log.error("publication is blocked", error=str(error), hint=error.hint)
        return self._ranges

    def suspect(self, error: Exception) -> None:
        """Hint that the store may not be the one that passed. Errors that are no sign of that are ignored."""
        if self._interval and isinstance(error, SUSPICIOUS):
            self._suspected.set()

    async def confirm(self, error: Exception) -> None:
        """Return when the store has passed the cheap part of the probe once more, asked after this call. Waits while it
        does not answer; when it fails, `watch` returns, and the caller is to be cancelled. Does nothing for errors that
        `suspect` ignores.
        """
        if self._interval and isinstance(error, SUSPICIOUS):
            passed = trio.Event()
            self._waiting.append(passed)
            self._suspected.set()
            await passed.wait()

    async def watch(self, hop: Hop) -> None:
        """Repeat the probe's cheap part, and return when it fails: the gate is closed then, and `blocked` says why.

        Without an answer nothing is known, so nothing changes: each write waits for its own answer anyway.
        """
        pause = min(self._interval, FIRST_WATCH)
        while True:
            with trio.move_on_after(clock.jitter(pause) if self._interval else float("inf")) as rest:
                await self._suspected.wait()
            self._suspected, waiting = trio.Event(), len(self._waiting)
            report = await _watched(hop, self._store)
            pause = min(self._interval, RETRY_MOST)
            if report is not None and report.conclusive:
                if not report.ok or report.ranges != self._ranges:
                    return self._close(report)
                for passed in self._waiting[:waiting]:
                    passed.set()
                del self._waiting[:waiting]
                pause = self._interval
            if not rest.cancelled_caught:
                await trio.sleep(min(self._interval, SUSPICION_REST))

    def _close(self, report: ProbeReport) -> None:
        changed = "ranges of a version are read differently than before; the whole probe is repeated"
        self._ranges = None
        self._waiting.clear()
        self.blocked = f"{self._store.url} does not honour any more what publication relies on: " + (
            _problems(report) if not report.ok else changed
        )
        _log.error("publication stops: the store's probe failed", problems=self.blocked)
