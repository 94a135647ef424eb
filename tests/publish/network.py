"""What may become of a request between a node and the store, and of the process that sends it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import trio

from cachefs.errors import ConditionConflict, StoreError, UnavailableError
from cachefs.store.base import ObjectInfo, ObjectStore

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Chances per request (`crash`: per effect on the store or the journal, once before it and once after)."""

    lost: float = 0.0
    """The request never arrives."""
    unheard: float = 0.0
    """The answer is lost."""
    held: float = 0.0
    """The caller hears nothing; the request arrives up to LATE seconds later."""
    copied: float = 0.0
    """A copy arrives up to LATE seconds later."""
    refused: float = 0.0
    """409 or 503, without effect."""
    slow: float = 0.0
    """Request and answer take up to SLOW seconds each."""
    lagging: float = 0.0
    """A read of the pointer shows one of its last versions, or none."""
    crash: float = 0.0


LATE, SLOW, TIMEOUT = 60.0, 15.0, 3.0
"""Seconds."""
LOCAL = ("_drop_pins", "check_pinned")
"""What the publisher does on its own disk, in a thread."""


class View:
    """The store as one node sees it: a read of the current pointer may lag `behind` by some versions."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.behind = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, key: str, version_id: str | None = None) -> tuple[ObjectInfo, bytes] | None:
        if version_id is None and self.behind and key.endswith("/pointer.json"):
            entries = [entry for entry in self.inner.list_versions(key) if entry.key == key]
            if self.behind >= len(entries):
                return None
            version_id = entries[self.behind].version_id
        return self.inner.get(key, version_id)


@dataclass
class Network:
    """Carries the requests of all nodes. `nursery` holds what arrives late, whatever became of the sender."""

    chance: random.Random
    rates: Rates
    nursery: trio.Nursery
    calm: bool = False
    requests: int = 0
    faults: int = 0
    cut: set[str] = field(default_factory=set)
    """Nodes without a network."""

    def hits(self, rate: float) -> bool:
        """Return whether a fault happens."""
        if self.calm or not rate or self.chance.random() >= rate:
            return False
        self.faults += 1
        return True

    async def carry(self, node: str, view: View, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Carry one request and its answer."""
        self.requests += 1
        rates, send = self.rates, partial(fn, *args, **kwargs)
        writes = fn.__name__ == "put"
        await self._travel()
        if node in self.cut or self.hits(rates.lost):
            return await self._time_out()
        if self.hits(rates.refused):
            if writes and self.chance.random() < 0.5:
                raise ConditionConflict("409")
            raise UnavailableError("503", reason="throttled")
        if writes and self.hits(rates.held):
            self.nursery.start_soon(self._arrive_late, send)
            return await self._time_out()
        if writes and self.hits(rates.copied):
            self.nursery.start_soon(self._arrive_late, send)
        if fn.__name__ == "read_pointer" and self.hits(rates.lagging):
            view.behind = self.chance.randint(1, 4)
        try:
            result = send()
        finally:
            view.behind = 0
        await self._travel()
        if node in self.cut or self.hits(rates.unheard):
            return await self._time_out()
        return result

    async def _travel(self) -> None:
        longest = SLOW if self.hits(self.rates.slow) else 0.05
        await trio.sleep(self.chance.uniform(0.001, longest))

    async def _time_out(self) -> Any:
        await trio.sleep(TIMEOUT)
        raise UnavailableError("timeout", reason="timeout")

    async def _arrive_late(self, send: Callable[[], Any]) -> None:
        await trio.sleep(self.chance.uniform(0.0, LATE))
        try:
            send()
        except StoreError:
            pass  # nobody hears the answer


class ProcessHop:
    """The hop of one process: it may be stopped for a while (`go`), and die before and after each effect."""

    def __init__(
        self, network: Network, node: str, view: View, go: Callable[[], Awaitable[None]], die: Callable[[], Any]
    ) -> None:
        self._network = network
        self._node = node
        self._view = view
        self.go = go
        self._die = die

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        writes = fn.__name__ == "put"
        await self.go()
        if fn.__name__ in LOCAL:
            return fn(*args, **kwargs)
        if writes:
            await self.perhaps_die()
        try:
            return await self._network.carry(self._node, self._view, fn, args, kwargs)
        finally:
            if writes:
                await self.perhaps_die()
            await self.go()

    async def perhaps_die(self) -> None:
        """Let the process die here, perhaps."""
        if self._network.hits(self._network.rates.crash):
            self._die()
            await trio.sleep_forever()
