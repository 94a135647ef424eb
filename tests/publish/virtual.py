"""Time, randomness and scheduling of a simulated world: virtual, and the same in every run with the same seed.

`cachefs.clock` is the only place that asks for them; here what it asks is replaced. Each node has a wall clock of its
own, wrong by as much as the world likes, and a monotonic clock with its own zero.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import trio
from trio._core import _run
from trio.testing import MockClock

from cachefs import clock

NODE: ContextVar[str] = ContextVar("node", default="")
"""The node on which the running task runs."""
BEGAN = 1_800_000_000.0


class Clocks:
    """What cachefs.clock is given: `wall` and `zero` are seconds by node."""

    def __init__(self, chance: random.Random) -> None:
        self.wall: dict[str, float] = {}
        self.zero: dict[str, float] = {}
        self._chance = chance
        self._ids = 0

    def now(self) -> float:
        return BEGAN + trio.current_time() + self.wall.get(NODE.get(), 0.0)

    def monotonic(self) -> float:
        return trio.current_time() + self.zero.get(NODE.get(), 0.0)

    def new_id(self) -> SimpleNamespace:
        self._ids += 1
        return SimpleNamespace(hex=f"{self._ids:032x}")

    @contextmanager
    def installed(self) -> Iterator[None]:
        def today(zone: Any) -> datetime:
            return datetime.fromtimestamp(self.now(), UTC)

        with (
            patch.object(clock, "time", SimpleNamespace(time=self.now, monotonic=self.monotonic)),
            patch.object(clock, "random", SimpleNamespace(random=self._chance.random)),
            patch.object(clock, "uuid", SimpleNamespace(uuid4=self.new_id)),
            patch.object(clock, "datetime", SimpleNamespace(now=today)),
        ):
            yield


def run(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """Run `main` in virtual time. Trio shuffles what is runnable: here by `seed`, from a fixed order."""
    state = _run._r.getstate()
    with patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        _run._r.seed(seed)
        try:
            trio.run(main, clock=MockClock(autojump_threshold=0))
        finally:
            _run._r.setstate(state)
