"""counting.py: what the daemon says of its store."""

from __future__ import annotations

import pytest

from cachefs.errors import CachefsError, CorruptError, DeniedError, NoStoreError, NotFoundError, UnavailableError
from cachefs.store.base import CREATE_ONLY
from cachefs.store.counting import CountingHop
from cachefs.store.memory import MemoryStore
from tests.store.faults import FaultyStore, Rule, refused, rules


@pytest.mark.parametrize(
    ("operation", "error", "ill"),
    [
        ("put", UnavailableError("no answer"), True),
        ("put", DeniedError("AccessDenied"), True),
        ("put", NoStoreError("NoSuchBucket"), True),
        ("get", NoStoreError("NoSuchBucket"), True),
        ("put", NotFoundError("NoSuchKey"), True),
        ("get", NotFoundError("NoSuchKey"), False),
        ("get", CorruptError("other bytes"), False),
    ],
)
async def test_the_health_is_what_keeps_the_store_from_being_used(
    operation: str, error: CachefsError, ill: bool
) -> None:
    store = FaultyStore(MemoryStore(), rules(Rule(operation, refused(error))))
    hop = CountingHop(store, 1)

    async def ask() -> None:
        if operation == "put":
            await hop(store.put, "a", b"", condition=CREATE_ONLY)
        else:
            await hop(store.get, "a")

    with pytest.raises(type(error)):
        await ask()
    assert hop.health == (str(error) if ill else "ok")
    await ask()
    assert hop.health == "ok"
    outcome = "unavailable" if isinstance(error, UnavailableError) else type(error).__name__
    assert hop.requests == {f"{operation} {outcome}": 1, f"{operation} ok": 1}
