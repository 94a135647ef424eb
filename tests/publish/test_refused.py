"""The publisher when the system refuses a thread, or the disk a write of the journal: neither ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cachefs.errors import StagingError, UnavailableError
from cachefs.formats.records import State
from cachefs.journal import Journal, Txn
from cachefs.store.hop import Inline
from tests.conftest import DeclaredWarnings
from tests.publish.stage import Member

Members = Callable[..., Member]


class Refusing(Inline):
    """The system refuses the first threads that would drop pins."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if fn.__name__ == "_drop_pins" and self.left:
            self.left -= 1
            raise UnavailableError("the system starts no more threads", reason="threads")
        return await super().__call__(fn, *args, **kwargs)


class Full:
    """A journal whose first write fails, as on a full disk or without a thread."""

    def __init__(self, inner: Journal, when: Callable[[], bool] = lambda: True) -> None:
        self.inner = inner
        self.when = when
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def write(self, fn: Callable[[Txn], Any]) -> Any:
        if not self.failed and self.when():
            self.failed += 1
            raise StagingError("the journal cannot be written")
        return await self.inner.write(fn)


async def test_a_refused_thread_does_not_end_the_publisher_that_abandons(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    declared_warnings("generation abandoned")
    declared_warnings("publication waits.*no more threads")
    declared_warnings("the journal cannot be written")
    member = members()
    member.save("step-200", 200)
    await member.publish()
    older = member.save("step-100", 100)
    member.save("step-300", 300)
    hop = Refusing(3)
    journal = Full(member.journal, lambda: member.attempt(older).state is State.ABANDONED)
    await member.publish(hop=hop, journal=journal)
    assert (hop.left, journal.failed) == (0, 1)
    assert member.attempt(older).state is State.ABANDONED
    assert member.generations() == ["step-200", "step-300"]
    assert member.pins.shards(older) == set()


async def test_a_refused_thread_does_not_end_the_publisher_that_starts(
    members: Members, declared_warnings: DeclaredWarnings
) -> None:
    """What was published before a crash is released then, and the journal may not be written either."""
    declared_warnings("publication waits.*no more threads")
    declared_warnings("the journal cannot be written")
    member = members()
    first = member.save("step-1", 1)
    member.journal.write_now(lambda txn: txn.update_attempt(first, state=State.PUBLISHED))
    member.save("step-2", 2)
    hop, journal = Refusing(3), Full(member.journal)
    await member.publish(hop=hop, journal=journal)
    assert (hop.left, journal.failed) == (0, 1)
    assert member.pins.shards(first) == set()
    assert member.generations() == ["step-2"]
