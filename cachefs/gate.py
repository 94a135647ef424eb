"""The gate in front of the store: nothing is sent before the probe has passed with these credentials (invariant
I18).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, DeniedError, NotFoundError, ProbeError, StoreError, UnavailableError
from cachefs.metrics import Metrics
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Threads
from cachefs.store.probe import ProbeReport, probe

T = TypeVar("T")
RETRY = 1.0
RETRY_MOST = 30.0
"""Seconds until a store that gives no answer is probed again: at first, and at most."""
_log = structlog.get_logger(__name__)


def check(store: ObjectStore) -> None:
    """Check that a store is there and can be used; an error names it. Blocks."""
    try:
        store.check()
    except (NotFoundError, DeniedError) as error:
        reason = str(error).removeprefix(f"{store.url}: ")
        hint = error.hint or "does it exist, in this region, and do these credentials allow it?"
        raise type(error)(f"{store.url}: {reason}", hint=hint) from error


class Gate:
    """Whether publication is allowed, and why not. `report` is set when it is."""

    def __init__(self, store: ObjectStore, metrics: Metrics, *, publish: bool) -> None:
        self._store = store
        self._metrics = metrics
        self.report: ProbeReport | None = None
        self.blocked = "the store has not been probed yet" if publish else "mounted with --no-publish"
        metrics.publishing.set(0)

    def try_now(self) -> None:
        """Check and probe the store at the start of a mount; blocks.

        Raises what a mount must not start with: a missing bucket, refused credentials, a failed probe. A store that
        does not answer is no reason: the mount absorbs writes, and the probe is repeated until there is an answer.
        """
        try:
            check(self._store)
            report = probe(self._store)
        except UnavailableError as error:
            self.blocked = f"the store does not answer: {error}"
            _log.warning("store does not answer; nothing is published until it does", error=str(error))
            return
        problems = "; ".join(f"{check.id}: {check.meaning}" for check in report.problems()[:3])
        if report.ok:
            self._open(report)
        elif not report.conclusive:
            self.blocked = f"the store's probe had no clear result: {problems}"
            _log.warning("the store's probe had no clear result", problems=problems)
        else:
            raise ProbeError(
                f"{self._store.url} does not honour what publication relies on: {problems}",
                hint="mount with --no-publish to keep everything local; cachefs doctor shows every check",
            )

    def _open(self, report: ProbeReport) -> None:
        self.report = report
        self.blocked = ""
        self._metrics.publishing.set(1)

    async def wait_open(self, hop: Callable[..., Any]) -> ProbeReport:
        """Return the probe's report once it has passed; probes again and again until then."""
        pause = RETRY
        while self.report is None:
            await trio.sleep(clock.jitter(pause))
            pause = min(pause * 2, RETRY_MOST)
            try:
                await hop(self.try_now)
            except CachefsError as error:
                self.blocked = str(error)
                _log.error("publication is blocked", error=str(error), hint=error.hint)
        return self.report


class MeteredHop:
    """Hops into worker threads, and counts what the store answered."""

    def __init__(self, threads: Threads, metrics: Metrics) -> None:
        self._threads = threads
        self._metrics = metrics
        self._problem = ""

    @property
    def health(self) -> str:
        """Return how the store is, in words: `ok`, or the last error."""
        return self._problem or "ok"

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the call in a worker thread. Raises what it raises."""
        outcome = "ok"
        try:
            result = await self._threads(partial(fn, *args, **kwargs))
        except StoreError as error:
            outcome = error.reason if isinstance(error, UnavailableError) else type(error).__name__
            self._note(str(error) if isinstance(error, UnavailableError) else "")
            raise
        else:
            self._note("")
            return result
        finally:
            name = getattr(fn, "__name__", type(fn).__name__).lstrip("_")
            self._metrics.store_requests.labels(operation=name, outcome=outcome).inc()

    def _note(self, problem: str) -> None:
        self._problem = problem
        self._metrics.store_healthy.set(0 if problem else 1)
