"""The task that looks at the bucket for what other members do, as often as pace.py allows.

Runs with something open are looked at every round, the others in their turn (lanes.py). Each look is a task of its own:
one that waits for the store does not hold up those at other runs, and the hop limits the requests under way. A daemon
that is alone in its runs only looks where it has taken over something.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import trio

from cachefs import clock
from cachefs.errors import FencedError
from cachefs.formats.keys import Keys
from cachefs.journal import Journal
from cachefs.publish.collecting import Collector
from cachefs.publish.lanes import Lanes
from cachefs.publish.members import Member
from cachefs.publish.pace import LISTS, busy, pace
from cachefs.publish.problems import Problems
from cachefs.publish.settings import Settings
from cachefs.publish.writes import Writes
from cachefs.restore.listing import names
from cachefs.restore.reader import Seen
from cachefs.store.base import ObjectStore

DISCOVER = 4.0
"""Polls between two listings of the runs: a member that has written nothing learns of a run in no other way. A run that
lies inside one that is known already is found at the next start.
"""


def _runs(store: ObjectStore, keys: Keys, known: set[str]) -> list[str]:
    return list(names(store, keys, wanted=True, known=known))


class Looking:
    """Looks for ever. `collector` is None on a member that is not the owner; what keeps a run from moving is shown in
    `problems`, which `member` and `collector` share.
    """

    def __init__(
        self,
        journal: Journal,
        writes: Writes,
        settings: Settings,
        member: Member,
        collector: Collector | None,
        problems: Problems,
    ) -> None:
        self._journal = journal
        self._writes = writes
        self._settings = settings
        self._member = member
        self._collector = collector
        self._problems = problems
        self._hint = trio.Event()
        self._lanes = Lanes()
        self._under_way: set[str] = set()
        self._listed: dict[str, bool] = {}
        """By run: whether its pointer listed something at the last look."""
        self._discovered = -float("inf")
        self._at_start: set[str] | None = None
        """The runs at the first listing."""
        self._unlooked: set[str] | None = None
        """Those of them that were not looked at yet; None before, and when there are none any more."""
        self.first: Callable[[], None] = lambda: None
        """Called when every run of the first listing was looked at once."""

    def wake(self) -> None:
        """Hint that there may be something to look for."""
        self._hint.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for ever; an error of one run is a problem of it until a look succeeds."""
        task_status.started()
        members, poll = self._settings.count, self._settings.poll
        idle_at = -float("inf")
        async with trio.open_nursery() as nursery:
            while True:
                self._hint = trio.Event()
                await self._discover()
                runs, now = self.busy(), trio.current_time()
                if now >= idle_at:
                    idle_at = now + clock.jitter(busy(members, poll)) + clock.jitter(pace(members, poll))
                    if members > 1:
                        runs |= self._lanes.due(now)
                for run in sorted(runs - self._under_way):
                    self._under_way.add(run)
                    nursery.start_soon(self._one, run)
                await trio.sleep(clock.jitter(busy(members, poll)))
                if not self.busy():
                    with trio.move_on_at(idle_at):
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
        with self._problems.look(""):
            found = await self._writes.hop(_runs, self._writes.store, self._writes.keys, self._lanes.known())
            self._discovered = trio.current_time()
            for run in found:
                if self._lanes.add(run):
                    self._listed.setdefault(run, True)  # look at once
            if self._at_start is None:
                self._at_start, self._unlooked = set(found), set(found)
                self._looked()

    async def _one(self, run: str) -> None:
        try:
            with self._problems.look(run):
                await self._look(run)
        finally:
            self._under_way.discard(run)
        self._looked(run)

    def _looked(self, run: str = "") -> None:
        if self._unlooked is not None:
            self._unlooked.discard(run)
            if not self._unlooked:
                self._unlooked = None
                self.first()

    async def _look(self, run: str) -> None:
        if self._collector is not None and self._collector.fenced(run):
            return  # whoever owns the run now does not hear from this daemon
        new = self._at_start is not None and run not in self._at_start
        try:
            seen = await self._member.look(run, new=new)
            self._listed[run] = seen is not None and bool(seen.pointer.open)
            self._lanes.looked(run, seen.pointer.seq if seen else 0, now=trio.current_time(), age=_age(seen))
            if self._collector is not None:
                await self._collector.look(run, seen)
        except FencedError:
            self._listed[run] = False
            raise


def _age(seen: Seen | None) -> float:
    """Return how old a pointer claims to be, in seconds: by the clock of whoever wrote it, and ours."""
    if seen is None:
        return 0.0
    try:
        return clock.now() - datetime.fromisoformat(seen.pointer.at).timestamp()
    except ValueError:
        return float("inf")
