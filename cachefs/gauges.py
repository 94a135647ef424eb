"""Keeps the metrics in step with the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import trio

from cachefs.formats.records import AttemptRecord, State
from cachefs.metrics import Metrics
from cachefs.reporter import Reporter
from cachefs.staging.layout import Staging
from cachefs.supervisor import Supervisor, Totals

INTERVAL = 2.0
"""Least seconds between two looks."""
_REASONS = {
    "superseded": "superseded",
    "removed": "removed",
    "renamed": "renamed",
    "restore test": "restore-test",
    "manifest": "incomplete",
}
"""By how an abandoned attempt's error begins: the label of its metric."""


class Gauges:
    """Writes the gauges, and counts what moved on since the last look."""

    def __init__(self, metrics: Metrics, reporter: Reporter, supervisor: Supervisor, staging: Staging) -> None:
        self._metrics = metrics
        self._reporter = reporter
        self._supervisor = supervisor
        self._staging = staging
        self._states: dict[str, State] | None = None
        self._counted = Totals()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Update for ever, when the journal changed and at least every INTERVAL seconds."""
        task_status.started()
        while True:
            await self.update()
            await trio.sleep(INTERVAL)

    async def update(self) -> None:
        """Look once."""
        metrics, status = self._metrics, await self._reporter.status()
        metrics.backlog_bytes.set(status.backlog_bytes)
        metrics.backlog_files.set(status.backlog_files)
        metrics.oldest_unpublished_seconds.set(status.oldest_unpublished_age)
        metrics.oldest_open_seconds.set(status.oldest_open_idle)
        metrics.loose_pending_files.set(status.loose_pending)
        metrics.staging_free_bytes.set(status.staging_free_bytes)
        metrics.staging_used_bytes.set(self._staging.total_bytes() - status.staging_free_bytes)
        counts = Counter(generation.state for generation in status.generations)
        for state in State:
            metrics.generations.labels(state=state.value).set(counts[state])
        for run in status.runs:
            metrics.epoch.labels(run=run.run).set(0 if run.fenced_by else run.epoch)
            metrics.fenced.labels(run=run.run).set(bool(run.fenced_by))
        self._count_moves((await self._reporter.read()).attempts)
        self._count_engine()
        figures = self._supervisor.figures
        metrics.publishing.set(not figures.blocked)
        metrics.store_healthy.set(figures.health == "ok")
        metrics.engine_restarts.set(self._supervisor.restarts)

    def _count_moves(self, attempts: Sequence[AttemptRecord]) -> None:
        before, self._states = self._states, {attempt.attempt: attempt.state for attempt in attempts}
        if before is None:
            return  # what happened before this process counts for that one
        for attempt in attempts:
            if before.get(attempt.attempt) is not attempt.state:
                self._count_move(attempt)

    def _count_move(self, attempt: AttemptRecord) -> None:
        if attempt.state is State.PUBLISHED and attempt.published_at and attempt.closed_at:
            self._metrics.close_to_published_seconds.observe(max(0.0, attempt.published_at - attempt.closed_at))
        elif attempt.state is State.ABANDONED:
            reason = next((label for start, label in _REASONS.items() if attempt.error.startswith(start)), "other")
            self._metrics.abandoned.labels(reason=reason).inc()

    def _count_engine(self) -> None:
        now, before = self._supervisor.totals(), self._counted
        self._metrics.flushed_bytes.inc(now.flushed_bytes - before.flushed_bytes)
        self._metrics.orphans_aborted.inc(now.orphans_aborted - before.orphans_aborted)
        for reason, count in (now.failures - before.failures).items():
            self._metrics.upload_retries.labels(reason=reason).inc(count)
        for request, count in (now.requests - before.requests).items():
            operation, outcome = request.split(" ", 1)
            self._metrics.store_requests.labels(operation=operation, outcome=outcome).inc(count)
        gc = now.gc - before.gc
        self._metrics.gc_passes.inc(gc["passes"])
        self._metrics.gc_failures.inc(gc["failures"])
        self._metrics.gc_deleted.inc(gc["deleted"])
        self._metrics.gc_freed_bytes.inc(gc["freed_bytes"])
        self._counted = now
