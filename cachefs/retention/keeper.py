"""The background task: a pass over every run that this daemon owns, again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import structlog
import trio

from cachefs import clock
from cachefs.publish.problems import Problems
from cachefs.publish.writes import Writes
from cachefs.retention.executor import Collected, Collector, patience
from cachefs.retention.plan import Policy

_log = structlog.get_logger(__name__)


class Counts(msgspec.Struct):
    """What the passes did since the start. Bytes are those of deleted object versions."""

    passes: int = 0
    failures: int = 0
    deleted: int = 0
    freed_bytes: int = 0


class Keeper:
    """Makes passes over the runs that `owned` returns, every `interval` seconds."""

    def __init__(
        self,
        writes: Writes,
        policy: Policy,
        owned: Callable[[], Collection[str]],
        counts: Counts,
        problems: Problems,
        *,
        interval: float,
        holder: str,
    ) -> None:
        """`holder` names this program in the object by which it asks for the store's time. What keeps a pass over a run
        from its end is shown in `problems`, which nothing else may write, until the next one.
        """
        patient = Writes(writes.store, writes.keys, writes.hop, patience)
        self._collector = Collector(patient, policy, holder=holder, progress=self._count)
        self._owned = owned
        self._interval = interval
        self._problems = problems
        self.counts = counts

    def _count(self, objects: int, size: int) -> None:
        self.counts.deleted += objects
        self.counts.freed_bytes += size

    async def run(self) -> None:
        """Make passes for ever. An error ends one pass over one run, is shown and counted; the next one tries again.

        May be cancelled or killed at any point.
        """
        while True:
            await trio.sleep(clock.jitter(self._interval))
            for run in sorted(self._owned()):
                await self.one(run)

    async def one(self, run: str) -> None:
        """Make one pass over a run."""
        done: Collected | None = None
        with self._problems.look(run):
            done = await self._collector.collect(run)
        if done is None:
            self.counts.failures += 1
            return
        self.counts.passes += 1
        if done.retired or done.deleted:
            _log.info(
                "garbage collected", run=run, retired=len(done.retired), deleted=done.deleted, freed_bytes=done.freed
            )
