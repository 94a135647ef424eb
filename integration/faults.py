"""More harm for the proxy: requests that arrive late or twice, slow links, and a store that ignores what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from integration.proxy import PATIENCE, Action, Answer, Exchange, Request


class Delayed:
    """Keeps requests, and delivers them when told: the client hears nothing, or (`copy`) its request goes through and
    what is kept is a second copy.
    """

    def __init__(self, *, copy: bool = False) -> None:
        self._copy = copy
        self._kept: list[Exchange] = []
        self._caught = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        if self._copy:
            exchange.reply(exchange.forward())
        else:
            exchange.drop()
        self._kept.append(exchange)
        self._caught.set()

    def caught(self) -> None:
        """Wait until a request is kept. Fails the test if none comes."""
        assert self._caught.wait(PATIENCE), "no request to keep came"

    def land(self) -> list[tuple[Request, int]]:
        """Deliver what was kept; return the requests and what the server answered to them now."""
        landed = [(exchange.request, exchange.forward().status) for exchange in self._kept]
        self._kept.clear()
        return landed


class Trickle:
    """A slow link: bodies come and go in small pieces with pauses, until `release`."""

    receives = True
    PIECE, PAUSE = 16 << 10, 0.01

    def __init__(self) -> None:
        self._slow = threading.Event()
        self._slow.set()
        self.moved = 0
        """Pieces that went slowly."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.receive(self.PIECE, self._between)
        exchange.reply(exchange.forward(), piece=self.PIECE, between=self._between)

    def _between(self) -> None:
        if self._slow.is_set():
            self.moved += 1
            time.sleep(self.PAUSE)

    def release(self) -> None:
        """Let everything go at full speed."""
        self._slow.clear()


def ignored(*names: str) -> Action:
    """The server does not see these headers and parameters (in lower case, as S3 spells parameters)."""
    return lambda exchange: exchange.reply(exchange.forward(without=names))


def damaged(change: Callable[[bytes], bytes]) -> Action:
    """The body of the request changes on its way to the server."""
    return lambda exchange: exchange.reply(exchange.forward(change=change))


def meanwhile(act: Callable[[Request], None], then: Callable[[Exchange, Answer], None] | None = None) -> Action:
    """The server does it, and `act` happens before the client hears of it: the answer, or (`then`) something else."""

    def between(exchange: Exchange) -> None:
        answer = exchange.forward()
        act(exchange.request)
        if then is None:
            exchange.reply(answer)
        else:
            then(exchange, answer)

    return between


def before(act: Callable[[Request], None]) -> Action:
    """`act` happens just before the server sees the request."""

    def first(exchange: Exchange) -> None:
        act(exchange.request)
        exchange.reply(exchange.forward())

    return first


def flip(body: bytes) -> bytes:
    """Change one bit."""
    return body[:50] + bytes([body[50] ^ 1]) + body[51:]
