"""The gate in front of the store: nothing is sent before the probe has passed with these credentials (invariant
I18).
"""

from __future__ import annotations

import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, DeniedError, NotFoundError, ProbeError, UnavailableError
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Hop
from cachefs.store.probe import Outcome, probe

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


def try_store(store: ObjectStore) -> tuple[bool | None, str]:
    """Check and probe the store; blocks. Return whether it can read ranges of a version, and why nothing may be
    published ("" when it may; the first is None then).

    Raises what a mount must not start with: a missing bucket, refused credentials, a failed probe. A store that does
    not answer is no reason: the mount absorbs writes, and the probe is repeated until there is an answer.
    """
    try:
        check(store)
        report = probe(store)
    except UnavailableError as error:
        _log.warning("store does not answer; nothing is published until it does", error=str(error))
        return None, f"the store does not answer: {error}"
    if report.ok:
        return report.ranges, ""
    failed = [
        check for check in report.problems() if check.outcome is not Outcome.INCONCLUSIVE or not report.conclusive
    ]
    problems = "; ".join(f"{check.id}: {check.meaning}" for check in failed[:3])
    if not report.conclusive:
        _log.warning("the store's probe had no clear result", problems=problems)
        return None, f"the store's probe had no clear result: {problems}"
    raise ProbeError(
        f"{store.url} does not honour what publication relies on: {problems}",
        hint="mount with --no-publish to keep everything local; cachefs doctor shows every check",
    )


class Gate:
    """Whether publication is allowed, and why not."""

    def __init__(self, store: ObjectStore, *, ranges: bool | None, blocked: str) -> None:
        """`ranges` and `blocked` are what `try_store` found at the start of the mount."""
        self._store = store
        self._ranges = ranges
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
