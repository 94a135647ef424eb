"""How async code calls the synchronous store: one request per hop.

In the daemon a hop is a worker thread; a simulation replaces it by a checkpoint and a direct call, so that the
scheduler decides every interleaving. A hop is never abandoned when its task is cancelled: the request ends first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import trio

from cachefs.errors import UnavailableError
from cachefs.threads import NoThread, in_thread

T = TypeVar("T")


class Hop(Protocol):
    """Runs one blocking call for an async caller and returns its result or raises its error."""

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)`."""
        ...


class Threads:
    """Hops into worker threads, at most `limit` at a time."""

    def __init__(self, limit: int) -> None:
        self._limiter = trio.CapacityLimiter(limit)

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the call in a worker thread. Raises UnavailableError when there is none: nothing was called."""
        try:
            return await in_thread(partial(fn, *args, **kwargs), limiter=self._limiter)
        except NoThread as error:
            raise UnavailableError(str(error), reason="threads") from error


class Inline:
    """Hops nowhere: yields to the scheduler, then calls. For deterministic tests."""

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the call in place."""
        await trio.lowlevel.checkpoint()
        return fn(*args, **kwargs)
