"""Why runs do not move, for the status: what could not be read or written at the last look, by run.

A look goes on past what concerns one attempt, report or wish alone; what it went past is noted here. What is noted
while nothing looks (a restore test, garbage collection) stays until the next look at that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import structlog

from cachefs.errors import CachefsError, CorruptError
from cachefs.problem import Problem
from cachefs.publish.writes import pause

_log = structlog.get_logger(__name__)
_run: ContextVar[str] = ContextVar("run", default="")
"""The run that this task works for."""


class Problems:
    """What is wrong now. Each text is logged once, until it is gone; `what` goes before each."""

    def __init__(self, what: str = "") -> None:
        self._what = what
        self._found: dict[str, dict[str, None]] = {}
        self._fresh: dict[str, dict[str, None]] = {}

    def all(self) -> tuple[Problem, ...]:
        """Return what is wrong, by run."""
        return tuple(Problem(run, text) for run, texts in sorted(self._found.items()) for text in texts)

    def note(self, run: str, error: CachefsError) -> None:
        """Note what went wrong in a run."""
        text = f"{self._what}{error}"
        if text not in self._found.get(run, {}):
            _log.warning("a run does not move", run=run, error=text, hint=error.hint)
        for texts in (self._found, self._fresh):
            texts.setdefault(run, {})[text] = None

    @contextmanager
    def look(self, run: str) -> Iterator[None]:
        """Replace what is known of a run by what is noted in the block, which a CachefsError ends: it is noted too."""
        self._fresh[run] = {}
        token = _run.set(run)
        try:
            yield
        except CachefsError as error:
            self.note(run, error)
        finally:
            _run.reset(token)
            if fresh := self._fresh.pop(run, {}):
                self._found[run] = fresh
            else:
                self._found.pop(run, None)

    @contextmanager
    def passed(self, run: str) -> Iterator[None]:
        """Note what is damaged or of another format, and go on after the block: nothing else depends on it."""
        try:
            yield
        except CorruptError as error:
            self.note(run, error)

    async def pause(self, error: CachefsError, retries: int) -> None:
        """Wait before the next try of a request; from the second one on it is a problem of the run that this task works
        for.
        """
        if retries:
            self.note(_run.get(), error)
        await pause(error, retries)
