"""Tasks that go on when the journal cannot be written for a while, as on a full disk, or a system call fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from cachefs.errors import StagingError

_log = structlog.get_logger(__name__)
FIRST = 1.0
LAST = 30.0
"""Seconds between two tries, at first and at most."""


async def persist(step: Callable[[], Awaitable[None]], what: str) -> None:
    """Run a step that may be repeated until it raises no StagingError and no OSError; `what` names it in the log."""
    pause = FIRST
    while True:
        try:
            return await step()
        except StagingError as error:
            _log.error(f"{what}: the journal failed", reason=str(error), again_in=pause)
        except OSError as error:
            _log.error(f"{what} failed", reason=str(error), again_in=pause)
        await trio.sleep(pause)
        pause = min(2 * pause, LAST)
