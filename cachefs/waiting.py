"""How several things are waited for, one after the other."""

from __future__ import annotations

from collections.abc import Awaitable


async def each(waiting: list[Awaitable[None]]) -> None:
    """Await every one, also when one fails: each may hold a gate. Raises the first error afterwards."""
    failed: BaseException | None = None
    for one in waiting:
        try:
            await one
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
