"""The hop of the daemon: it counts what the store answers, and says how the store is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from cachefs.errors import CachefsError, DeniedError, NoStoreError, NotFoundError, UnavailableError
from cachefs.store.base import ObjectStore
from cachefs.store.hop import Threads

T = TypeVar("T")

_WRITES = {"put", "create_multipart"}


class CountingHop:
    """Hops into worker threads, at most `limit` at a time; counts the answers of `store`, and no other calls."""

    def __init__(self, store: ObjectStore, limit: int) -> None:
        self._store = store
        self._threads = Threads(limit)
        self.requests: Counter[str] = Counter()
        """Requests by "operation outcome"."""
        self.health = "ok"
        """`ok`, or the last problem of the store in words."""
        self.failed: Callable[[CachefsError], None] = lambda error: None
        """Hears of every error."""

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the call in a worker thread. Raises what it raises."""
        request = getattr(fn, "__self__", None) is self._store
        outcome = "ok"
        try:
            result = await self._threads(fn, *args, **kwargs)
        except CachefsError as error:
            self.failed(error)
            outcome = error.reason if isinstance(error, UnavailableError) else type(error).__name__
            missing = isinstance(error, NotFoundError) and request and fn.__name__ in _WRITES
            if missing or isinstance(error, UnavailableError | DeniedError | NoStoreError):
                self.health = str(error)
            raise
        else:
            if request:
                self.health = "ok"
            return result
        finally:
            if request:
                self.requests[f"{fn.__name__} {outcome}"] += 1
