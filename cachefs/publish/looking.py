"""The task that looks at the bucket for what other members do, as often as pace.py allows.

Runs with something open are looked at every round, others one by one in turn, so that the number of runs in a bucket
costs nothing. A daemon that is alone in its runs only looks where it has taken over something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog
import trio

from cachefs import clock
from cachefs.errors import CachefsError, FencedError
from cachefs.formats.keys import Keys
from cachefs.journal import Journal
from cachefs.publish.collecting import Collector
from cachefs.publish.members import Member
from cachefs.publish.pace import LISTS, busy, pace
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.listing import names
from cachefs.restore.reader import Seen
from cachefs.store.base import ObjectStore

DISCOVER = 4.0
"""Polls between two listings of the runs: a member that has written nothing learns of a run in no other way. A run that
lies inside one that is known already is found at the next start.
"""
_log = structlog.get_logger(__name__)


def _runs(store: ObjectStore, keys: Keys, known: set[str]) -> list[str]:
    return list(names(store, keys, wanted=True, known=known))


class Looking:
    """Looks for ever. `collector` is None on a member that is not the owner."""

    def __init__(
        self, journal: Journal, writes: Writes, settings: Settings, member: Member, collector: Collector | None
    ) -> None:
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._member = member
        self._collector = collector
        self._hint = trio.Event()
        self._idle: deque[str] = deque()
        self._listed: dict[str, bool] = {}
        """By run: whether its pointer listed something at the last look."""
        self._discovered = -float("inf")
        self._at_start: set[str] | None = None
        """The runs at the first listing."""
        self.first: Callable[[], None] = lambda: None
        """Called when every run was looked at once."""
        self.problems: dict[str, str] = {}
        """By run: why it could not be looked at last time."""

    def wake(self) -> None:
        """Hint that there may be something to look for."""
        self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for ever; errors are kept in `problems` until a look succeeds."""
        task_status.started()
        members, waiting = self._settings.count, True
        while True:
            self._hint = trio.Event()
            await self._discover()
            runs = self.busy()
            if self._idle and members > 1:
                self._idle.rotate(-1)
                runs.add(self._idle[-1])
            for run in sorted(runs):
                await self._look(run)
            if waiting and self._at_start is not None:
                waiting = False
                self.first()
            await trio.sleep(clock.jitter(busy(members, self._settings.poll)))
            if not self.busy():
                with trio.move_on_after(clock.jitter(pace(members, self._settings.poll))):
                    await self._hint.wait()

    def busy(self) -> set[str]:
        """Return the runs with saves, attempts or answers under way."""
        with self._journal.read() as txn:
            several = self._settings.count > 1
            mine = {one.run for one in txn.attempts.scan() if not one.state.final and (several or one.foreign)}
            shared = {record.run for record in txn.shared.scan()}
        return mine | shared | {run for run, listed in self._listed.items() if listed and several}

    async def _discover(self) -> None:
        members = self._settings.count
        interval = pace(members, DISCOVER * self._settings.poll, LISTS)
        if members == 1 or trio.current_time() - self._discovered < interval:
            return
        try:
            found = await self._writes.hop(_runs, self._writes.store, self._writes.keys, set(self._idle))
        except CachefsError as error:
            self._problem("", error)
            return
        self._discovered = trio.current_time()
        if self._at_start is None:
            self._at_start = set(found)
        self.problems.pop("", None)
        for run in found:
            if run not in self._idle:
                self._idle.append(run)
                self._listed.setdefault(run, True)  # look at once

    async def _look(self, run: str) -> None:
        if self._collector is not None and self._collector.fenced(run):
            return  # whoever owns the run now does not hear from this daemon
        try:
            new = self._at_start is not None and run not in self._at_start
            seen: Seen | None = await self._member.look(run, new=new)
            self._listed[run] = seen is not None and bool(seen.pointer.open)
            if self._collector is not None:
                await self._collector.look(run, seen)
            self.problems.pop(run, None)
        except FencedError as error:
            self._listed[run] = False
            self._problem(run, error)
        except CachefsError as error:
            self._problem(run, error)

    def _problem(self, run: str, error: CachefsError) -> None:
        if self.problems.get(run) != str(error):
            _log.warning("cannot look at what other members do", run=run, error=str(error), hint=error.hint)
        self.problems[run] = str(error)
