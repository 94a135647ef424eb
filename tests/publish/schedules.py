"""Runs asynchronous code under every schedule: which process sends its next request, and what becomes of each request.

`Process` drives a coroutine by hand. Its hop parks at every request to the store, so one event is one request, or one
fault. `explore` replays a scenario once for every sequence of choices (depth first, without randomness).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from cachefs.errors import ConditionConflict, StoreError, UnavailableError

Choose = Callable[[int], int]


def explore(scenario: Callable[[Choose], bool]) -> int:
    """Run `scenario` for every sequence of answers that its `choose(n)` (0 to n-1) can get.

    Returns how many runs there were, without those for which the scenario says that another run is equal.
    """
    trail: list[list[int]] = []
    runs = 0
    while True:
        at = 0

        def choose(options: int) -> int:
            nonlocal at
            if at == len(trail):
                trail.append([0, options])
            assert trail[at][1] == options, "the scenario is not deterministic"
            at += 1
            return trail[at - 1][0]

        runs += scenario(choose)
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return runs
        trail[-1][0] += 1


class Request:
    """One call to the store that a process waits to make."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self.call = call
        self.name = name

    @property
    def writes(self) -> bool:
        return self.name == "put"


@types.coroutine
def _park(request: Request) -> Generator[Request, Any, Any]:
    return (yield request)


class ParkingHop:
    """Parks at every request."""

    async def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await _park(Request(partial(fn, *args, **kwargs), fn.__name__))


class Process:
    """One coroutine; `request` is what it waits to send, None when it has ended or was killed."""

    def __init__(self, name: str, main: Coroutine[Request, Any, Any]) -> None:
        self.name = name
        self._main = main
        self.request: Request | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.killed = False
        self._resume(partial(main.send, None))

    def _resume(self, resume: Callable[[], Request]) -> None:
        try:
            self.request = resume()
        except StopIteration as end:
            self.request, self.result = None, end.value
        except Exception as error:
            self.request, self.error = None, error

    def deliver(self) -> None:
        """Send the request and return the answer."""
        assert self.request is not None
        try:
            answer = self.request.call()
        except Exception as error:
            self._resume(partial(self._main.throw, error))
        else:
            self._resume(partial(self._main.send, answer))

    def lose_answer(self) -> None:
        """Send the request; the answer is lost."""
        assert self.request is not None
        send_quietly(self.request)
        self.time_out()

    def time_out(self) -> None:
        """Let the process wait in vain; what becomes of the request is up to the caller."""
        self._resume(partial(self._main.throw, UnavailableError("timeout", reason="timeout")))

    def refuse(self) -> None:
        """Answer 409 without any effect."""
        self._resume(partial(self._main.throw, ConditionConflict("409")))

    def finish(self) -> None:
        """Send all requests that are left, undisturbed; raise the error that the process ends with."""
        while self.request is not None:
            self.deliver()
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self.killed, self.request = True, None
        self._main.close()


def send_quietly(request: Request) -> None:
    """Send a request whose answer nobody hears."""
    try:
        request.call()
    except StoreError:
        pass
