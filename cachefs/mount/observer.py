"""What the mount asks of the part of the daemon that watches saves. The mount knows this protocol and nothing
behind it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from cachefs.staging.changes import Change


class Observer(Protocol):
    """Watches the visible tree. Both hooks return None when there is nothing to wait for: that is the fast path."""

    def before(self, change: Change) -> Awaitable[None] | None:
        """Called before an operation that may change closed or uploading bytes; awaited before it is carried out."""
        ...

    def after(self, change: Change) -> Awaitable[None] | None:
        """Called right after the operation, before anything else runs; awaited before the caller gets its answer."""
        ...

    async def durable(self) -> None:
        """Return when everything observed so far is durable in the journal."""
        ...

    async def wait_for_room(self) -> None:
        """Return when a new file may be created. Raises OSError(ENOSPC) when no room comes in time."""
        ...

    def answer(self, path: bytes, name: str) -> bytes | None:
        """Return the value of the read-only attribute `user.cachefs.<name>` of a path, or None for no such
        attribute.
        """
        ...

    async def request(self, path: bytes, name: str) -> None:
        """Carry out the request made by setting `user.cachefs.<name>`. Raises OSError."""
        ...


ANSWERS = ("state", "generation", "flushed", "error", "socket")
"""The names `answer` knows, listed to nobody: they answer when asked."""
